#include "driver.h"

#include <dlfcn.h>

namespace jax_mla {
namespace {

// Neither entry point has a versioned successor that cuda.h would silently rename it to.
Driver Open() {
  Driver driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    driver.failure = std::string("the NVIDIA driver cannot be opened (") + dlerror() +
                     "). Install it, or make libcuda.so.1 visible to this process.";
    return driver;
  }
  driver.launch_kernel =
      reinterpret_cast<decltype(driver.launch_kernel)>(dlsym(library, "cuLaunchKernelEx"));
  driver.get_error_name =
      reinterpret_cast<decltype(driver.get_error_name)>(dlsym(library, "cuGetErrorName"));
  if (driver.launch_kernel == nullptr || driver.get_error_name == nullptr) {
    driver.failure =
        "the NVIDIA driver has no cuLaunchKernelEx, so it is too old for clusters. Install driver "
        "580 or newer.";
  }
  return driver;
}

}  // namespace

std::string Driver::ErrorName(CUresult result) const {
  const char* name = nullptr;
  if (get_error_name(result, &name) == CUDA_SUCCESS && name != nullptr) return name;
  return "CUDA driver error " + std::to_string(static_cast<int>(result));
}

const Driver& OpenDriver() {
  // Never destroyed: an XLA thread may still launch while the process exits.
  static const Driver* const driver = new Driver(Open());
  return *driver;
}

}  // namespace jax_mla
