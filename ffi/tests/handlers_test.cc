// The handlers, called as XLA calls them, in front of a driver that records the launch.

#include <cstring>
#include <vector>

#include "call_frame.h"
#include "fake_driver.h"
#include "library.h"

namespace {

constexpr int32_t kAbi = 2;
constexpr float kEps = 1e-6f;
constexpr uintptr_t kCache = 0xC0000;

FakeLaunches* driver = nullptr;
const Library* library = nullptr;

constexpr auto kBf16 = XLA_FFI_DataType_BF16, kE4m3 = XLA_FFI_DataType_F8E4M3FN,
               kF32 = XLA_FFI_DataType_F32, kS32 = XLA_FFI_DataType_S32, kU8 = XLA_FFI_DataType_U8;

// What a test changes in a call that is right otherwise.
struct Changes {
  int64_t batch = 5, heads = 2, columns = 3648, pages = 70000, row = 576;
  uintptr_t qkv = 0x10000, cache = kCache, cache_out = kCache;
  std::string kernel = "tiled_c8_t4";
  XLA_FFI_DataType q_dtype = kE4m3, cache_dtype = kE4m3;
  int32_t style = 0;
  bool has_rope = false, has_latent = false, has_more = false;
  std::vector<int64_t> table = {9, 64};
  int64_t positions = 5, latent_columns = 1536;
};

CallFrame QAbsorb(const Changes& c) {
  CallFrame frame;
  frame.Operand(kBf16, {c.batch, c.columns}, c.qkv)
      .Operand(kBf16, {1536}, 0x20000)
      .Operand(kBf16, {512}, 0x30000)
      .Operand(kBf16, {c.heads * 192, 1536}, 0x40000)
      .Operand(kBf16, {c.heads, 128, 512}, 0x50000)
      .Operand(c.cache_dtype, {c.pages, 70000, c.row}, c.cache)
      .Operand(kS32, {c.batch}, 0x60004)
      .Operand(kF32, {}, 0x70004)
      .Operand(kF32, {}, 0x80004);
  if (c.has_rope) frame.Operand(kF32, c.table, 0xA0000).Operand(kS32, {c.positions}, 0xB0004);
  if (c.has_more) frame.Operand(kS32, {c.positions}, 0xB0004);
  frame.Result(c.q_dtype, {c.batch, c.heads, 576}, 0x90000)
      .Result(c.cache_dtype, {c.pages, 70000, c.row}, c.cache_out);
  if (c.has_latent) frame.Result(kBf16, {c.batch, c.latent_columns}, 0xD0000);
  return frame.Attribute("kernel", c.kernel)
      .Attribute("abi", kAbi)
      .Attribute("eps", kEps)
      .Attribute("style", c.style);
}

std::string Execute(const Changes& changes) {
  return QAbsorb(changes).Call(library->execute, XLA_FFI_ExecutionStage_EXECUTE);
}

std::string Initialize(const std::string& kernel, int32_t abi = kAbi) {
  return CallFrame()
      .Attribute("kernel", kernel)
      .Attribute("abi", abi)
      .Attribute("eps", kEps)
      .Attribute("style", 0)
      .Call(library->initialize, XLA_FFI_ExecutionStage_INITIALIZE);
}

int loads = 0;

void Load(int32_t ordinal, const char* key, char* message, size_t message_bytes) {
  ++loads;
  if (std::strcmp(key, "broken") == 0)
    std::snprintf(message, message_bytes, "cubin 'broken' is truncated");
  void* function = reinterpret_cast<void*>(0xF00);
  if (std::strcmp(key, "tiled_c8_t4") == 0) {
    library->add_kernel(ordinal, key, function, 256, 8, 4, 65536, 1, false);
  } else if (std::strcmp(key, "fp8") == 0) {
    library->add_kernel(ordinal, key, function, 256, 8, 4, 65536, 1, true);
  } else if (std::strcmp(key, "bf16") == 0) {
    library->add_kernel(ordinal, key, function, 256, 8, 4, 65536, 2, true);
  }
}

void HandlerMayBeRecordedAndIsBuiltForTheOldestJaxlib() {
  const XLA_FFI_Metadata metadata = MetadataOf(library->execute);
  CHECK(metadata.traits == XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
  CHECK(metadata.api_version.major_version == 0);
  CHECK(metadata.api_version.minor_version == 3);
}

void InitializeSaysWhyAKernelIsMissing() {
  CheckContains(Initialize("tiled_c8_t4"), "import jax_mla");
  library->set_loader(Load);
  CheckContains(Initialize("tiled_c8_t4", kAbi + 1),
                "kernel interface 3, the installed jax_mla has 2");
  CheckContains(Initialize("broken"), "'broken': cubin 'broken' is truncated");
  CheckContains(Initialize("silent"), "device 3 was interrupted");
}

void ExecuteNeverLoads() {
  loads = 0;
  CheckContains(Execute({}), "'tiled_c8_t4': it was not loaded on device 3");
  CHECK(loads == 0);
}

void InitializeLoadsOnce() {
  loads = 0;
  CHECK(Initialize("tiled_c8_t4") == "");
  CHECK(Initialize("tiled_c8_t4") == "");
  CHECK(loads == 1);
}

void LaunchFollowsThePlanOfTheKernel() {
  driver->count = 0;
  CHECK(Execute({}) == "");
  CHECK(driver->count == 1);
  CHECK(driver->function == reinterpret_cast<CUfunction>(0xF00));
  const CUlaunchConfig& config = driver->config;
  CHECK(config.gridDimX == 8 && config.gridDimY == 2 &&
        config.gridDimZ == 2);  // ceil(5 / 4) token blocks
  CHECK(config.blockDimX == 256 && config.blockDimY == 1 && config.blockDimZ == 1);
  CHECK(config.sharedMemBytes == 65536);
  CHECK(config.hStream == reinterpret_cast<CUstream>(CallFrame::kStream));
  CHECK(config.numAttrs == 1);
  CHECK(driver->attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
  const auto& cluster = driver->attribute.value.clusterDim;
  CHECK(cluster.x == 8 && cluster.y == 1 && cluster.z == 1);
  CHECK(driver->extra == nullptr);
  CHECK(Execute({.batch = 8}) == "");
  CHECK(driver->config.gridDimZ == 2);  // no token block without a token
}

void ParametersComeInTheOrderOfTheCubins() {
  CHECK(Execute({}) == "");
  uint32_t eps_bits;
  std::memcpy(&eps_bits, &kEps, sizeof(eps_bits));
  const uint64_t expected[kPlainParameterCount] = {0x10000, 0x20000, 0x30000, 0x40000,
                                                   0x50000, kCache,  0x60004, 0x70004,
                                                   0x80004, 0x90000, 3648,    70000ull * 70000ull,
                                                   5,       eps_bits};
  for (int i = 0; i < kPlainParameterCount; ++i) CHECK(driver->parameters[i] == expected[i]);
  for (int i = kPlainParameterCount; i < kParameterCount; ++i) CHECK(driver->parameters[i] == 0);
}

// The parameters after those of a plain call.
void CheckOptions(const Changes& call, const uint64_t (&expected)[6]) {
  CHECK(Execute(call) == "");
  for (int i = 0; i < 6; ++i) CHECK(driver->parameters[kPlainParameterCount + i] == expected[i]);
}

void OptionsFollowTheParametersOfAPlainCall() {
  CHECK(Initialize("fp8") == "" && Initialize("bf16") == "");
  CheckOptions({.kernel = "fp8"}, {0, 0, 0, 0, 0, 0});
  CheckOptions({.kernel = "fp8", .style = 2, .has_rope = true}, {0xA0000, 0xB0004, 0, 9, 2, 0});
  CheckOptions({.kernel = "fp8", .has_latent = true}, {0, 0, 0xD0000, 0, 0, 0});
  CheckOptions({.kernel = "bf16", .q_dtype = kBf16}, {0, 0, 0, 0, 0, 0});
  CheckOptions({.kernel = "bf16", .q_dtype = kBf16, .cache_dtype = kBf16}, {0, 0, 0, 0, 0, 1});
  CheckOptions({.row = 656,
                .kernel = "bf16",
                .q_dtype = kBf16,
                .cache_dtype = kU8,
                .style = 1,
                .has_rope = true,
                .has_latent = true},
               {0xA0000, 0xB0004, 0xD0000, 9, 1, 2});
}

void WhatAKernelWasNotCompiledForIsRefused() {
  driver->count = 0;
  CheckContains(Execute({.q_dtype = kBf16}), "'tiled_c8_t4': it writes queries of another dtype");
  CheckContains(Execute({.kernel = "bf16"}), "it writes queries of another dtype");
  CheckContains(Execute({.kernel = "fp8", .cache_dtype = kBf16}), "e4m3 cache rows only");
  CheckContains(Execute({.style = 1, .has_rope = true}), "neither rotates");
  CheckContains(Execute({.has_latent = true}), "neither rotates");
  CHECK(driver->count == 0);
}

void OptionsThatWouldLeaveABufferAreRefused() {
  driver->count = 0;
  const Changes rotated = {.kernel = "fp8", .style = 1, .has_rope = true};
  const auto with = [&rotated](auto change) {
    Changes changed = rotated;
    change(changed);
    return Execute(changed);
  };
  CheckContains(with([](Changes& c) { c.style = 3; }), "style must be 0, 1 or 2");
  CheckContains(with([](Changes& c) { c.style = 0; }), "must come with a style");
  CheckContains(with([](Changes& c) { c.has_rope = false; }), "must come with a style");
  CheckContains(with([](Changes& c) { c.table = {0, 64}; }), "at least one row");
  CheckContains(with([](Changes& c) { c.table = {9, 32}; }), "[positions, 64]");
  CheckContains(with([](Changes& c) { c.positions = 4; }), "positions must be [batch]");
  CheckContains(Execute({.kernel = "fp8", .has_latent = true, .latent_columns = 1024}),
                "q_latent must be [batch, 1536]");
  CheckContains(Execute({.row = 656, .kernel = "bf16", .q_dtype = kBf16}), "cache must be");
  CheckContains(Execute({.has_more = true}), "9 or 11 operands");
  CheckContains(with([](Changes& c) { c.has_more = true; }), "9 or 11 operands");
  CheckContains(Execute({.kernel = "bf16", .q_dtype = kBf16, .cache_dtype = kU8}), "656] uint8");
  CHECK(driver->count == 0);
}

void NoTokenLaunchesNothing() {
  driver->count = 0;
  CHECK(Execute({.batch = 0}) == "");
  CHECK(driver->count == 0);
}

void ACacheWithoutPagesNeedsNoMemory() {
  for (const uintptr_t cache_out : {uintptr_t{0}, uintptr_t{0xD0000}}) {
    driver->count = 0;
    CHECK(Execute({.pages = 0, .cache = 0, .cache_out = cache_out}) == "");
    CHECK(driver->count == 1);           // queries are still produced
    CHECK(driver->parameters[11] == 0);  // rows: no slot names one
  }
}

void WhatWouldLeaveABufferIsRefused() {
  driver->count = 0;
  CheckContains(Execute({.columns = 2104}), "at least 2112 columns");
  CheckContains(Execute({.columns = 2113}), "multiple of 8");
  CheckContains(Execute({.row = 512}), "cache must be [pages, page size, 576]");
  CheckContains(Execute({.qkv = 0x10002}), "multiple of 16 bytes");
  CheckContains(Execute({.cache_out = kCache + 0x1000}), "must alias the cache operand");
  CHECK(driver->count == 0);
}

void DriverErrorsAreNamed() {
  driver->result = CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  const std::string message = Execute({});
  CheckContains(
      message,
      "'tiled_c8_t4': cuLaunchKernelEx returned CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES on device 3");
  CheckContains(message, "python -m jax_mla");
  driver->result = static_cast<CUresult>(12345);
  CheckContains(Execute({}), "CUDA driver error 12345");
  driver->result = CUDA_SUCCESS;
}

}  // namespace

int main(int, char** arguments) {
  const Library opened(arguments[1]);
  library = &opened;
  void* libcuda = dlopen("libcuda.so.1", RTLD_NOW);
  const auto launches = reinterpret_cast<FakeLaunches* (*)()>(dlsym(libcuda, "fake_launches"));
  CHECK(launches != nullptr);
  driver = launches();

  HandlerMayBeRecordedAndIsBuiltForTheOldestJaxlib();
  InitializeSaysWhyAKernelIsMissing();
  ExecuteNeverLoads();
  InitializeLoadsOnce();
  LaunchFollowsThePlanOfTheKernel();
  ParametersComeInTheOrderOfTheCubins();
  OptionsFollowTheParametersOfAPlainCall();
  WhatAKernelWasNotCompiledForIsRefused();
  OptionsThatWouldLeaveABufferAreRefused();
  NoTokenLaunchesNothing();
  ACacheWithoutPagesNeedsNoMemory();
  WhatWouldLeaveABufferIsRefused();
  DriverErrorsAreNamed();
}
