// The C functions through which Python hands over loaded kernels, and what handlers need of them.

#include "loading.h"

#include <atomic>

#include "driver.h"

namespace jax_mla {
namespace {

// jax_mla/variants.py has the same number; the Python package compares them when it is imported.
constexpr int32_t kAbi = 2;

// Loads kernel `key` on device `ordinal` and calls jax_mla_add_kernel, or writes why it cannot as a
// C string.
using Loader = void (*)(int32_t ordinal, const char* key, char* message, size_t message_bytes);

std::atomic<Loader> loader{nullptr};

}  // namespace

KernelTable& Kernels() {
  static KernelTable* const table = new KernelTable();
  return *table;
}

std::string Named(std::string_view key) { return "jax_mla kernel '" + std::string(key) + "': "; }

ffi::Error Refuse(std::string_view key, const std::string& reason) {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, Named(key) + reason);
}

ffi::Error Invalid(std::string_view key, const char* reason) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                    Named(key) + reason + ". Call it through jax_mla.q_absorb.");
}

ffi::Error CheckAbi(std::string_view key, int32_t abi) {
  if (abi == kAbi) return ffi::Error::Success();
  return Refuse(key, "the program was built for kernel interface " + std::to_string(abi) +
                         ", the installed jax_mla has " + std::to_string(kAbi) +
                         ". Export the program again with this version.");
}

ffi::Error EnsureLoaded(int32_t ordinal, std::string_view key, int32_t abi) {
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

ffi::Error FindLoaded(int32_t ordinal, std::string_view key, const Kernel** kernel) {
  *kernel = Kernels().Find(ordinal, key);
  if (*kernel != nullptr) return ffi::Error::Success();
  return Refuse(key, "it was not loaded on device " + std::to_string(ordinal) +
                         " before it was called. Call it through jax_mla.q_absorb.");
}

ffi::Error Launched(std::string_view key, int32_t ordinal, CUresult result) {
  if (result == CUDA_SUCCESS) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    Named(key) + "cuLaunchKernelEx returned " + OpenDriver().ErrorName(result) +
                        " on device " + std::to_string(ordinal) +
                        ". Run `python -m jax_mla` and check what it reports.");
}

}  // namespace jax_mla

extern "C" {

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
