// The XLA FFI handlers of q_absorb and the C functions through which Python hands over loaded
// kernels.

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "driver.h"
#include "kernel_table.h"
#include "launch.h"
#include "operands.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {
namespace {

// jax_mla/variants.py has the same number; the Python package compares them when it is imported.
constexpr int32_t kAbi = 2;

// Loads kernel `key` on device `ordinal` and calls jax_mla_add_kernel, or writes why it cannot as a
// C string.
using Loader = void (*)(int32_t ordinal, const char* key, char* message, size_t message_bytes);

std::atomic<Loader> loader{nullptr};

KernelTable& Kernels() {
  // Never destroyed: an XLA thread may still launch while the process exits.
  static KernelTable* const table = new KernelTable();
  return *table;
}

std::string Named(std::string_view key) { return "jax_mla kernel '" + std::string(key) + "': "; }

ffi::Error Refuse(std::string_view key, const std::string& reason) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, Named(key) + reason);
}

ffi::Error CheckAbi(std::string_view key, int32_t abi) {
  if (abi == kAbi) return ffi::Error::Success();
  return Refuse(key, "the program was built for kernel interface " + std::to_string(abi) +
                         ", the installed jax_mla has " + std::to_string(kAbi) +
                         ". Export the program again with this version.");
}

// Initialize: the last moment at which something may be loaded. Usually the lowering has loaded the
// kernel already; a program from jax.export or from the persistent compilation cache gets here
// without it.
//
// No deadlock with the GIL: XLA's threads come here without it, the loader (Python, through ctypes)
// waits for it, and nothing that a holder of the GIL may wait for is held meanwhile: no lock of
// ours, and XLA's Python bindings release the GIL for as long as they wait for an execution.
ffi::Error InitializeImpl(int32_t ordinal, std::string_view key, int32_t abi, float /*eps*/,
                          int32_t /*style*/) {
  if (ffi::Error error = CheckAbi(key, abi); error.failure()) return error;
  const Driver& driver = OpenDriver();
  if (!driver.failure.empty()) return Refuse(key, driver.failure);
  if (Kernels().Find(ordinal, key) != nullptr) return ffi::Error::Success();

  const Loader load = loader.load();
  if (load == nullptr) {
    return Refuse(key,
                  "the library was opened without its Python package. Run `import jax_mla` first.");
  }
  char message[2048] = "";
  load(ordinal, std::string(key).c_str(), message, sizeof(message));
  if (message[0] != '\0') return Refuse(key, message);
  if (Kernels().Find(ordinal, key) == nullptr) {
    return Refuse(
        key, "loading it on device " + std::to_string(ordinal) +
                 " was interrupted; the traceback is on standard error. Run the program again.");
  }
  return ffi::Error::Success();
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
  const auto invalid = [key](const char* reason) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      Named(key) + reason + ". Call it through jax_mla.q_absorb.");
  };
  if (const char* violation = Violation(operands, style)) return invalid(violation);
  if (q->element_count() == 0) return ffi::Error::Success();  // no token

  const Kernel* kernel = Kernels().Find(ordinal, key);
  if (kernel == nullptr) {
    return Refuse(key, "it was not loaded on device " + std::to_string(ordinal) +
                           " before it was called. Call it through jax_mla.q_absorb.");
  }
  if (const char* mismatch = MismatchWith(*kernel, operands, style)) return invalid(mismatch);
  const Driver& driver = OpenDriver();
  const auto heads = static_cast<uint32_t>(w_uk.dimensions()[0]);
  const CUresult result =
      Launch(driver, *kernel, ParametersOf(operands, eps, style), heads, stream);
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    Named(key) + "cuLaunchKernelEx returned " + driver.ErrorName(result) +
                        " on device " + std::to_string(ordinal) +
                        ". Run `python -m jax_mla` and check what it reports.");
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

int32_t jax_mla_abi() { return jax_mla::kAbi; }

void jax_mla_set_loader(jax_mla::Loader loader) { jax_mla::loader.store(loader); }

// `function` is a CUfunction of the primary context of device `ordinal`; the sizes are described at
// Kernel.
void jax_mla_add_kernel(int32_t ordinal, const char* key, void* function, uint32_t block,
                        uint32_t cluster, uint32_t tokens, uint32_t shared_memory, uint32_t q_bytes,
                        bool has_options) {
  jax_mla::Kernels().Add(ordinal, key,
                         {static_cast<CUfunction>(function), block, cluster, tokens, shared_memory,
                          q_bytes, has_options});
}

}  // extern "C"
