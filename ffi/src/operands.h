#ifndef JAX_MLA_OPERANDS_H_
#define JAX_MLA_OPERANDS_H_

#include <cstdint>
#include <optional>

#include "kernel_table.h"
#include "launch.h"
#include "loading.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {

// What XLA passes to one call: operands, then results.
struct Operands {
  ffi::BufferR2<ffi::BF16> qkv;
  ffi::BufferR1<ffi::BF16> q_norm, kv_norm;
  ffi::BufferR2<ffi::BF16> w_qb;
  ffi::BufferR3<ffi::BF16> w_uk;
  ffi::AnyBuffer cache;
  ffi::BufferR1<ffi::S32> slots;
  ffi::BufferR0<ffi::F32> q_scale, k_scale;
  ffi::AnyBuffer q, cache_out;
  std::optional<ffi::AnyBuffer> cos_sin, positions;  // where the call rotates
  std::optional<ffi::AnyBuffer> q_latent;            // where it is a result
};

// Returns which fact that keeps a kernel inside its buffers does not hold, or null.
// jax_mla/rules.py gives users the better message; this guards against programs that did not come
// from our lowering.
const char* Violation(const Operands& o, int32_t style);

// The same for what the kernel was compiled for.
const char* MismatchWith(const Kernel& kernel, const Operands& o, int32_t style);

Parameters ParametersOf(const Operands& o, float eps, int32_t style);

}  // namespace jax_mla

#endif  // JAX_MLA_OPERANDS_H_
