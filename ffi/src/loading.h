#ifndef JAX_MLA_LOADING_H_
#define JAX_MLA_LOADING_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "kernel_table.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {

namespace ffi = xla::ffi;

// The kernels that are loaded in this process. Never destroyed: an XLA thread may still launch
// while the process exits.
KernelTable& Kernels();

// How a message about kernel `key` begins.
std::string Named(std::string_view key);

// The errors of a call that this process is not ready for, and of one that did not come from our
// lowering.
ffi::Error Refuse(std::string_view key, const std::string& reason);
ffi::Error Invalid(std::string_view key, const char* reason);

// Refuses a program that was built for other kernel parameters or attributes.
ffi::Error CheckAbi(std::string_view key, int32_t abi);

// Initialize, the last moment at which something may be loaded: sees to it that Kernels() has `key`
// for device `ordinal`. Usually the lowering has loaded the kernel already; a program from
// jax.export or from the persistent compilation cache gets here without it.
//
// No deadlock with the GIL: XLA's threads come here without it, the loader (Python, through ctypes)
// waits for it, and nothing that a holder of the GIL may wait for is held meanwhile: no lock of
// ours, and XLA's Python bindings release the GIL for as long as they wait for an execution.
ffi::Error EnsureLoaded(int32_t ordinal, std::string_view key, int32_t abi);

// Finds a kernel for Execute, which may run while a graph is captured and must not load.
ffi::Error FindLoaded(int32_t ordinal, std::string_view key, const Kernel** kernel);

// What a launch of `key` on device `ordinal` that the driver answered with `result` amounts to.
ffi::Error Launched(std::string_view key, int32_t ordinal, CUresult result);

}  // namespace jax_mla

#endif  // JAX_MLA_LOADING_H_
