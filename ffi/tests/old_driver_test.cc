// Initialize in front of a driver that cannot launch clusters.

#include "call_frame.h"
#include "library.h"

int main(int, char** arguments) {
  const Library library(arguments[1]);
  const std::string message = CallFrame()
                                  .Attribute("kernel", std::string("small_c8_t1"))
                                  .Attribute("abi", 2)
                                  .Attribute("eps", 1e-6f)
                                  .Attribute("style", 0)
                                  .Call(library.initialize, XLA_FFI_ExecutionStage_INITIALIZE);
  CheckContains(message, "'small_c8_t1': the NVIDIA driver has no cuLaunchKernelEx");
  CheckContains(message, "Install driver 580 or newer");
}
