#include "call_frame.h"

#include <utility>

struct XLA_FFI_Error {
  std::string message;
};

struct XLA_FFI_ExecutionContext {};

namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message};
}

void GetErrorMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error->message.c_str();
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<void*>(CallFrame::kStream);
  return nullptr;
}

XLA_FFI_Error* GetOrdinal(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = CallFrame::kOrdinal;
  return nullptr;
}

// The part of XLA's interface that the handlers use.
XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_GetMessage = GetErrorMessage;
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_Stream_Get = GetStream;
  api.XLA_FFI_DeviceOrdinal_Get = GetOrdinal;
  return api;
}

std::string Take(XLA_FFI_Error* error) {
  if (error == nullptr) return "";
  std::string message = std::move(error->message);
  delete error;
  return message;
}

XLA_FFI_ByteSpan Span(const std::string& text) { return {text.data(), text.size()}; }

}  // namespace

CallFrame& CallFrame::Operand(XLA_FFI_DataType dtype, std::vector<int64_t> dimensions,
                              uintptr_t pointer) {
  operands_.push_back({dtype, std::move(dimensions), pointer});
  return *this;
}

CallFrame& CallFrame::Result(XLA_FFI_DataType dtype, std::vector<int64_t> dimensions,
                             uintptr_t pointer) {
  results_.push_back({dtype, std::move(dimensions), pointer});
  return *this;
}

CallFrame& CallFrame::Attribute(const std::string& name, std::string value) {
  attributes_[name] = std::move(value);
  return *this;
}

CallFrame& CallFrame::Attribute(const std::string& name, int32_t value) {
  attributes_[name] = value;
  return *this;
}

CallFrame& CallFrame::Attribute(const std::string& name, float value) {
  attributes_[name] = value;
  return *this;
}

std::string CallFrame::Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage) {
  const XLA_FFI_Api api = MakeApi();
  XLA_FFI_ExecutionContext context;

  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<void*> pointers;
  buffers.reserve(operands_.size() + results_.size());
  for (auto* list : {&operands_, &results_}) {
    for (Buffer& b : *list) {
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, b.dtype,
                         reinterpret_cast<void*>(b.pointer),
                         static_cast<int64_t>(b.dimensions.size()), b.dimensions.data()});
      pointers.push_back(&buffers.back());
    }
  }
  std::vector<XLA_FFI_ArgType> operand_types(operands_.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> result_types(results_.size(), XLA_FFI_RetType_BUFFER);

  const size_t count = attributes_.size();
  std::vector<XLA_FFI_ByteSpan> names, texts;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<void*> attributes;
  std::vector<XLA_FFI_AttrType> attribute_types;
  names.reserve(count);
  texts.reserve(count);
  scalars.reserve(count);
  for (auto& [name, value] : attributes_) {
    names.push_back(Span(name));
    name_pointers.push_back(&names.back());
    if (const auto* text = std::get_if<std::string>(&value)) {
      texts.push_back(Span(*text));
      attributes.push_back(&texts.back());
      attribute_types.push_back(XLA_FFI_AttrType_STRING);
      continue;
    }
    if (auto* number = std::get_if<int32_t>(&value)) {
      scalars.push_back({XLA_FFI_DataType_S32, number});
    } else {
      scalars.push_back({XLA_FFI_DataType_F32, &std::get<float>(value)});
    }
    attributes.push_back(&scalars.back());
    attribute_types.push_back(XLA_FFI_AttrType_SCALAR);
  }

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands_.size()),
                operand_types.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results_.size()),
                result_types.data(), pointers.data() + operands_.size()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,   nullptr,
                 static_cast<int64_t>(count), attribute_types.data(),
                 name_pointers.data(),        attributes.data()};
  return Take(handler(&frame));
}

XLA_FFI_Metadata MetadataOf(XLA_FFI_Handler* handler) {
  const XLA_FFI_Api api = MakeApi();
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata,
                              nullptr};
  extension.metadata = &metadata;

  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.extension_start = &extension.extension_base;
  Take(handler(&frame));
  return metadata;
}
