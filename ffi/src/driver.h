#ifndef JAX_MLA_DRIVER_H_
#define JAX_MLA_DRIVER_H_

#include <cuda.h>

#include <string>

namespace jax_mla {

// Entry points of the CUDA driver. They are looked up at run time so that the library also loads,
// and programs can be built and exported, on a machine that has no driver.
struct Driver {
  decltype(&cuLaunchKernelEx) launch_kernel = nullptr;
  decltype(&cuGetErrorName) get_error_name = nullptr;
  std::string failure;  // why the entry points are missing; empty when they are there

  std::string ErrorName(CUresult result) const;
};

// Opens libcuda.so.1 at the first call and never closes it. Thread-safe.
const Driver& OpenDriver();

}  // namespace jax_mla

#endif  // JAX_MLA_DRIVER_H_
