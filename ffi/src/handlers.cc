// The XLA FFI handlers of q_absorb and the C functions through which Python hands over loaded
// kernels.

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "driver.h"
#include "kernel_table.h"
#include "launch.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {
namespace {

namespace ffi = xla::ffi;

// jax_mla/variants.py has the same number; the Python package compares them when it is imported.
constexpr int32_t kAbi = 1;

// jax_mla/rules.py has the same geometry.
constexpr int64_t kQRank = 1536, kKvRank = 512, kNope = 128, kHeadRows = 192, kRow = 576;
constexpr int64_t kQkvColumns = 2112;
constexpr int64_t kAlignment =
    16;  // bytes: every global access but slots and scales may be a 16-byte one
constexpr int64_t kAny = -1;

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
ffi::Error InitializeImpl(int32_t ordinal, std::string_view key, int32_t abi, float /*eps*/) {
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

bool HasShape(const ffi::AnyBuffer::Dimensions& dimensions,
              std::initializer_list<int64_t> expected) {
  if (dimensions.size() != expected.size()) return false;
  auto actual = dimensions.begin();
  for (int64_t size : expected) {
    if (size != kAny && *actual != size) return false;
    ++actual;
  }
  return true;
}

bool IsAligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

struct Operands {
  ffi::BufferR2<ffi::BF16> qkv;
  ffi::BufferR1<ffi::BF16> q_norm, kv_norm;
  ffi::BufferR2<ffi::BF16> w_qb;
  ffi::BufferR3<ffi::BF16> w_uk;
  ffi::AnyBuffer cache;
  ffi::BufferR1<ffi::S32> slots;
  ffi::BufferR0<ffi::F32> q_scale, k_scale;
  ffi::AnyBuffer q, cache_out;
};

// Returns which fact that keeps the kernel inside its buffers does not hold, or null.
// jax_mla/rules.py gives users the better message; this guards against programs that did not come
// from our lowering.
const char* Violation(const Operands& o) {
  const int64_t batch = o.qkv.dimensions()[0], columns = o.qkv.dimensions()[1];
  const int64_t heads = o.w_uk.dimensions()[0];
  if (columns < kQkvColumns || columns % 8 != 0) {
    return "qkv must have at least 2112 columns and a multiple of 8";
  }
  if (batch > std::numeric_limits<int32_t>::max()) return "qkv has too many rows";
  if (!HasShape(o.q_norm.dimensions(), {kQRank})) return "q_norm must be [1536]";
  if (!HasShape(o.kv_norm.dimensions(), {kKvRank})) return "kv_norm must be [512]";
  if (!HasShape(o.w_qb.dimensions(), {heads * kHeadRows, kQRank}))
    return "w_qb must be [heads * 192, 1536]";
  if (!HasShape(o.w_uk.dimensions(), {heads, kNope, kKvRank}))
    return "w_uk must be [heads, 128, 512]";
  if (!HasShape(o.slots.dimensions(), {batch})) return "slots must be [batch]";
  if (o.q.element_type() != ffi::F8E4M3FN || !HasShape(o.q.dimensions(), {batch, heads, kRow})) {
    return "q must be [batch, heads, 576] float8_e4m3fn";
  }
  if (o.cache.element_type() != ffi::F8E4M3FN ||
      !HasShape(o.cache.dimensions(), {kAny, kAny, kRow})) {
    return "cache must be [pages, page size, 576] float8_e4m3fn";
  }
  // A cache without pages has no memory: XLA may give it any pointer, also two different ones.
  if (o.cache.element_count() != 0 && o.cache.untyped_data() != o.cache_out.untyped_data()) {
    return "the cache result must alias the cache operand, but XLA gave it another buffer";
  }
  for (const void* pointer :
       {o.qkv.untyped_data(), o.q_norm.untyped_data(), o.kv_norm.untyped_data(),
        o.w_qb.untyped_data(), o.w_uk.untyped_data(), o.cache.untyped_data(), o.q.untyped_data()}) {
    if (!IsAligned(pointer, kAlignment)) return "a buffer does not start at a multiple of 16 bytes";
  }
  for (const void* pointer :
       {o.slots.untyped_data(), o.q_scale.untyped_data(), o.k_scale.untyped_data()}) {
    if (!IsAligned(pointer, 4)) return "slots or a scale does not start at a multiple of 4 bytes";
  }
  return nullptr;
}

Parameters ParametersOf(const Operands& o, float eps) {
  Parameters p = {};
  p.qkv = o.qkv.untyped_data();
  p.q_norm = o.q_norm.untyped_data();
  p.kv_norm = o.kv_norm.untyped_data();
  p.w_qb = o.w_qb.untyped_data();
  p.w_uk = o.w_uk.untyped_data();
  p.cache = o.cache.untyped_data();
  p.slots = o.slots.untyped_data();
  p.q_scale = o.q_scale.untyped_data();
  p.k_scale = o.k_scale.untyped_data();
  p.q = o.q.untyped_data();
  p.qkv_stride = o.qkv.dimensions()[1];
  p.cache_rows = o.cache.dimensions()[0] * o.cache.dimensions()[1];
  p.batch = static_cast<int32_t>(o.qkv.dimensions()[0]);
  p.eps = eps;
  return p;
}

// Execute: may run while a graph is captured, so it only looks up, checks and launches.
ffi::Error QAbsorbImpl(CUstream stream, int32_t ordinal, ffi::BufferR2<ffi::BF16> qkv,
                       ffi::BufferR1<ffi::BF16> q_norm, ffi::BufferR1<ffi::BF16> kv_norm,
                       ffi::BufferR2<ffi::BF16> w_qb, ffi::BufferR3<ffi::BF16> w_uk,
                       ffi::AnyBuffer cache, ffi::BufferR1<ffi::S32> slots,
                       ffi::BufferR0<ffi::F32> q_scale, ffi::BufferR0<ffi::F32> k_scale,
                       ffi::Result<ffi::AnyBuffer> q, ffi::Result<ffi::AnyBuffer> cache_out,
                       std::string_view key, int32_t abi, float eps) {
  if (ffi::Error error = CheckAbi(key, abi); error.failure()) return error;
  const Operands operands = {qkv,   q_norm,  kv_norm, w_qb, w_uk,      cache,
                             slots, q_scale, k_scale, *q,   *cache_out};
  if (const char* violation = Violation(operands)) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      Named(key) + violation + ". Call it through jax_mla.q_absorb.");
  }
  if (q->element_count() == 0) return ffi::Error::Success();  // no token

  const Kernel* kernel = Kernels().Find(ordinal, key);
  if (kernel == nullptr) {
    return Refuse(key, "it was not loaded on device " + std::to_string(ordinal) +
                           " before it was called. Call it through jax_mla.q_absorb.");
  }
  const Driver& driver = OpenDriver();
  const auto heads = static_cast<uint32_t>(w_uk.dimensions()[0]);
  const CUresult result = Launch(driver, *kernel, ParametersOf(operands, eps), heads, stream);
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
                                  .Attr<float>("eps"));

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
        .Arg<xla::ffi::AnyBuffer>()                 // cache    [P, S, 576] e4m3
        .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()   // slots    [B]
        .Arg<xla::ffi::BufferR0<xla::ffi::F32>>()   // q_scale  []
        .Arg<xla::ffi::BufferR0<xla::ffi::F32>>()   // k_scale  []
        .Ret<xla::ffi::AnyBuffer>()                 // q        [B, H, 576] e4m3
        .Ret<xla::ffi::AnyBuffer>()                 // cache, the operand's own buffer
        .Attr<std::string_view>("kernel")           // key in the manifest
        .Attr<int32_t>("abi")                       // jax_mla/variants.py
        .Attr<float>("eps"),
    {xla::ffi::Traits::kCmdBufferCompatible});

int32_t jax_mla_abi() { return jax_mla::kAbi; }

void jax_mla_set_loader(jax_mla::Loader loader) { jax_mla::loader.store(loader); }

// `function` is a CUfunction of the primary context of device `ordinal`; the sizes are described at
// Kernel.
void jax_mla_add_kernel(int32_t ordinal, const char* key, void* function, uint32_t block,
                        uint32_t cluster, uint32_t tokens, uint32_t shared_memory) {
  jax_mla::Kernels().Add(
      ordinal, key, {static_cast<CUfunction>(function), block, cluster, tokens, shared_memory});
}

}  // extern "C"
