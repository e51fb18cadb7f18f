// The XLA FFI handlers of q_absorb.

#include <cstdint>
#include <string_view>

#include "driver.h"
#include "launch.h"
#include "loading.h"
#include "operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {
namespace {

ffi::Error InitializeImpl(int32_t ordinal, std::string_view key, int32_t abi, float /*eps*/,
                          int32_t /*style*/) {
  return EnsureLoaded(ordinal, key, abi);
}

// Adds the operands and results that only some calls have.
ffi::Error AddOptional(Operands& o, const ffi::RemainingArgs& args,
                       const ffi::RemainingRets& rets) {
  if ((args.size() != 0 && args.size() != 2) || rets.size() > 1) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "9 or 11 operands and 2 or 3 results expected. Call it through"
                      " jax_mla.q_absorb.");
  }
  if (args.size() != 0) {
    auto cos_sin = args.get<ffi::AnyBuffer>(0), positions = args.get<ffi::AnyBuffer>(1);
    if (cos_sin.has_error()) return cos_sin.error();
    if (positions.has_error()) return positions.error();
    o.cos_sin = *cos_sin;
    o.positions = *positions;
  }
  if (rets.size() != 0) {
    auto q_latent = rets.get<ffi::AnyBuffer>(0);
    if (q_latent.has_error()) return q_latent.error();
    o.q_latent = **q_latent;
  }
  return ffi::Error::Success();
}

// Execute: may run while a graph is captured, so it only looks up, checks and launches.
ffi::Error QAbsorbImpl(CUstream stream, int32_t ordinal, ffi::BufferR2<ffi::BF16> qkv,
                       ffi::BufferR1<ffi::BF16> q_norm, ffi::BufferR1<ffi::BF16> kv_norm,
                       ffi::BufferR2<ffi::BF16> w_qb, ffi::BufferR3<ffi::BF16> w_uk,
                       ffi::AnyBuffer cache, ffi::BufferR1<ffi::S32> slots,
                       ffi::BufferR0<ffi::F32> q_scale, ffi::BufferR0<ffi::F32> k_scale,
                       ffi::RemainingArgs rope, ffi::Result<ffi::AnyBuffer> q,
                       ffi::Result<ffi::AnyBuffer> cache_out, ffi::RemainingRets q_latent,
                       std::string_view key, int32_t abi, float eps, int32_t style) {
  if (ffi::Error error = CheckAbi(key, abi); error.failure()) return error;
  Operands operands = {qkv,     q_norm,  kv_norm, w_qb,       w_uk, cache, slots,
                       q_scale, k_scale, *q,      *cache_out, {},   {},    {}};
  if (ffi::Error error = AddOptional(operands, rope, q_latent); error.failure()) return error;
  if (const char* violation = Violation(operands, style)) return Invalid(key, violation);
  if (q->element_count() == 0) return ffi::Error::Success();  // no token

  const Kernel* kernel;
  if (ffi::Error error = FindLoaded(ordinal, key, &kernel); error.failure()) return error;
  if (const char* mismatch = MismatchWith(*kernel, operands, style)) return Invalid(key, mismatch);
  const auto heads = static_cast<uint32_t>(w_uk.dimensions()[0]);
  const CUresult result =
      Launch(OpenDriver(), *kernel, ParametersOf(operands, eps, style), heads, stream);
  return Launched(key, ordinal, result);
}

}  // namespace
}  // namespace jax_mla

extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaQAbsorbInitialize, jax_mla::InitializeImpl,
                              xla::ffi::Ffi::BindInitialize()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attr<std::string_view>("kernel")
                                  .Attr<int32_t>("abi")
                                  .Attr<float>("eps")
                                  .Attr<int32_t>("style"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxMlaQAbsorb, jax_mla::QAbsorbImpl,
    xla::ffi::Ffi::Bind()
        .Ctx<xla::ffi::PlatformStream<CUstream>>()
        .Ctx<xla::ffi::DeviceOrdinal>()
        .Arg<xla::ffi::BufferR2<xla::ffi::BF16>>()  // qkv      [B, W]
        .Arg<xla::ffi::BufferR1<xla::ffi::BF16>>()  // q_norm   [1536]
        .Arg<xla::ffi::BufferR1<xla::ffi::BF16>>()  // kv_norm  [512]
        .Arg<xla::ffi::BufferR2<xla::ffi::BF16>>()  // w_qb     [H * 192, 1536]
        .Arg<xla::ffi::BufferR3<xla::ffi::BF16>>()  // w_uk     [H, 128, 512]
        .Arg<xla::ffi::AnyBuffer>()                 // cache    [P, S, columns]
        .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()   // slots    [B]
        .Arg<xla::ffi::BufferR0<xla::ffi::F32>>()   // q_scale  []
        .Arg<xla::ffi::BufferR0<xla::ffi::F32>>()   // k_scale  []
        .RemainingArgs()                            // cos_sin  [M, 64] f32, positions [B] int32
        .Ret<xla::ffi::AnyBuffer>()                 // q        [B, H, 576] e4m3 or bf16
        .Ret<xla::ffi::AnyBuffer>()                 // cache, the operand's own buffer
        .RemainingRets()                            // q_latent [B, 1536] bf16
        .Attr<std::string_view>("kernel")           // key in the manifest
        .Attr<int32_t>("abi")                       // jax_mla/variants.py
        .Attr<float>("eps")
        .Attr<int32_t>("style"),  // of RoPE: 0 none, 1 interleaved, 2 half
    {xla::ffi::Traits::kCmdBufferCompatible});

}  // extern "C"
