#ifndef JAX_MLA_LAUNCH_H_
#define JAX_MLA_LAUNCH_H_

#include <cuda.h>

#include <cstdint>

#include "driver.h"
#include "kernel_table.h"

namespace jax_mla {

// The parameter list that the cubins have, in its order; those of plain calls end after eps. A
// change of it is a new ABI.
struct Parameters {
  const void* qkv;      // [batch, qkv_stride] bf16
  const void* q_norm;   // [1536] bf16
  const void* kv_norm;  // [512] bf16
  const void* w_qb;     // [heads * 192, 1536] bf16
  const void* w_uk;     // [heads, 128, 512] bf16
  void* cache;          // [cache_rows, bytes of a row]
  const void* slots;    // [batch] int32
  const void* q_scale;  // f32
  const void* k_scale;  // f32
  void* q;              // [batch, heads, 576] e4m3 or bf16
  int64_t qkv_stride;   // elements a row
  int64_t cache_rows;
  int32_t batch;
  float eps;
  const void* cos_sin;    // [table_rows, 64] f32
  const void* positions;  // [batch] int32
  void* q_latent;         // [batch, 1536] bf16, or null
  int32_t table_rows;
  int32_t style;         // of RoPE; 0 for none, then cos_sin and positions are not read
  int32_t cache_format;  // 0 e4m3, 1 bf16, 2 fp8_ds_mla
};

// The parameter list of the kernel that gathers queries through mailboxes.
struct ExchangeParameters {
  const void* q;        // [batch, words] words of 16 bytes, this rank's
  void* out;            // [batch, ranks, words]
  const void* control;  // the mailbox's control block (jax_mla/mailbox_layout.py)
  int32_t batch;
  int32_t words;         // of 16 bytes, a token and rank
  uint32_t replacement;  // for a word of 4 bytes that would mean "not published yet": NaN too
};

// Queues one launch on `stream`, whose context must be current, and returns what the driver says of
// this very launch. Neither allocates nor synchronises, so that it may be captured into a graph.
CUresult Launch(const Driver& driver, const Kernel& kernel, Parameters parameters, uint32_t heads,
                CUstream stream);

// The same for the kernel that gathers queries, with `ctas` CTAs.
CUresult LaunchExchange(const Driver& driver, const Kernel& kernel, ExchangeParameters parameters,
                        uint32_t ctas, CUstream stream);

}  // namespace jax_mla

#endif  // JAX_MLA_LAUNCH_H_
