#ifndef JAX_MLA_TESTS_CALL_FRAME_H_
#define JAX_MLA_TESTS_CALL_FRAME_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

// Calls an FFI handler as XLA does: one operand, result or attribute after the other, then Call.
class CallFrame {
 public:
  CallFrame& Operand(XLA_FFI_DataType dtype, std::vector<int64_t> dimensions, uintptr_t pointer);
  CallFrame& Result(XLA_FFI_DataType dtype, std::vector<int64_t> dimensions, uintptr_t pointer);
  CallFrame& Attribute(const std::string& name, std::string value);
  CallFrame& Attribute(const std::string& name, int32_t value);
  CallFrame& Attribute(const std::string& name, float value);

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
  // By name: XLA sorts them.
  std::map<std::string, std::variant<std::string, int32_t, float>> attributes_;
};

// Returns which traits and API version a handler states when XLA registers it.
XLA_FFI_Metadata MetadataOf(XLA_FFI_Handler* handler);

#endif  // JAX_MLA_TESTS_CALL_FRAME_H_
