#ifndef JAX_MLA_LAUNCH_H_
#define JAX_MLA_LAUNCH_H_

#include <cuda.h>

#include <cstdint>

#include "driver.h"
#include "kernel_table.h"

namespace jax_mla {

// The parameter list that every cubin has, in its order. A change of it is a new ABI.
struct Parameters {
  const void* qkv;      // [batch, qkv_stride] bf16
  const void* q_norm;   // [1536] bf16
  const void* kv_norm;  // [512] bf16
  const void* w_qb;     // [heads * 192, 1536] bf16
  const void* w_uk;     // [heads, 128, 512] bf16
  void* cache;          // [cache_rows, 576] e4m3
  const void* slots;    // [batch] int32
  const void* q_scale;  // f32
  const void* k_scale;  // f32
  void* q;              // [batch, heads, 576] e4m3
  int64_t qkv_stride;   // elements a row
  int64_t cache_rows;
  int32_t batch;
  float eps;
};

// Queues one launch on `stream`, whose context must be current, and returns what the driver says of
// this very launch. Neither allocates nor synchronises, so that it may be captured into a graph.
CUresult Launch(const Driver& driver, const Kernel& kernel, Parameters parameters, uint32_t heads,
                CUstream stream);

}  // namespace jax_mla

#endif  // JAX_MLA_LAUNCH_H_
