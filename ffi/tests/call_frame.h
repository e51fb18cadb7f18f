#ifndef JAX_MLA_TESTS_CALL_FRAME_H_
#define JAX_MLA_TESTS_CALL_FRAME_H_

#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

// Calls an FFI handler as XLA does: one operand, result or attribute after the other, then Call.
class CallFrame {
 public:
  CallFrame& Operand(XLA_FFI_DataType dtype, std::vector<int64_t> dimensions, uintptr_t pointer);
  CallFrame& Result(XLA_FFI_DataType dtype, std::vector<int64_t> dimensions, uintptr_t pointer);
  CallFrame& Attributes(std::string kernel, int32_t abi, float eps, int32_t style = 0);

  // Returns the handler's error message, empty on success.
  std::string Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage);

  static constexpr int32_t kOrdinal = 3;
  static constexpr uintptr_t kStream = 0x5757;

 private:
  struct Buffer {
    XLA_FFI_DataType dtype;
    std::vector<int64_t> dimensions;
    uintptr_t pointer;
  };

  std::vector<Buffer> operands_, results_;
  std::string kernel_;
  int32_t abi_ = 0;
  float eps_ = 0;
  int32_t style_ = 0;
};

// Returns which traits and API version a handler states when XLA registers it.
XLA_FFI_Metadata MetadataOf(XLA_FFI_Handler* handler);

#endif  // JAX_MLA_TESTS_CALL_FRAME_H_
