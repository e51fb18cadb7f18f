// The handlers, called as XLA calls them, in front of a driver that records the launch.

#include <cstring>

#include "call_frame.h"
#include "fake_driver.h"
#include "library.h"

namespace {

constexpr int32_t kAbi = 1;
constexpr float kEps = 1e-6f;
constexpr uintptr_t kCache = 0xC0000;

FakeLaunches* driver = nullptr;
const Library* library = nullptr;

// What a test changes in a call that is right otherwise.
struct Changes {
  int64_t batch = 5, heads = 2, columns = 3648, pages = 70000, rope_columns = 576;
  uintptr_t qkv = 0x10000, cache = kCache, cache_out = kCache;
  std::string kernel = "tiled_c8_t4";
};

CallFrame QAbsorb(const Changes& c) {
  constexpr auto kBf16 = XLA_FFI_DataType_BF16, kE4m3 = XLA_FFI_DataType_F8E4M3FN,
                 kF32 = XLA_FFI_DataType_F32;
  CallFrame frame;
  frame.Operand(kBf16, {c.batch, c.columns}, c.qkv)
      .Operand(kBf16, {1536}, 0x20000)
      .Operand(kBf16, {512}, 0x30000)
      .Operand(kBf16, {c.heads * 192, 1536}, 0x40000)
      .Operand(kBf16, {c.heads, 128, 512}, 0x50000)
      .Operand(kE4m3, {c.pages, 70000, c.rope_columns}, c.cache)
      .Operand(XLA_FFI_DataType_S32, {c.batch}, 0x60004)
      .Operand(kF32, {}, 0x70004)
      .Operand(kF32, {}, 0x80004)
      .Result(kE4m3, {c.batch, c.heads, 576}, 0x90000)
      .Result(kE4m3, {c.pages, 70000, c.rope_columns}, c.cache_out)
      .Attributes(c.kernel, kAbi, kEps);
  return frame;
}

std::string Execute(const Changes& changes) {
  return QAbsorb(changes).Call(library->execute, XLA_FFI_ExecutionStage_EXECUTE);
}

std::string Initialize(const std::string& kernel, int32_t abi = kAbi) {
  return CallFrame()
      .Attributes(kernel, abi, kEps)
      .Call(library->initialize, XLA_FFI_ExecutionStage_INITIALIZE);
}

int loads = 0;

void Load(int32_t ordinal, const char* key, char* message, size_t message_bytes) {
  ++loads;
  if (std::strcmp(key, "broken") == 0)
    std::snprintf(message, message_bytes, "cubin 'broken' is truncated");
  if (std::strcmp(key, "tiled_c8_t4") == 0) {
    library->add_kernel(ordinal, key, reinterpret_cast<void*>(0xF00), 256, 8, 4, 65536);
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
                "kernel interface 2, the installed jax_mla has 1");
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
  const uint64_t expected[kParameterCount] = {0x10000, 0x20000, 0x30000, 0x40000,
                                              0x50000, kCache,  0x60004, 0x70004,
                                              0x80004, 0x90000, 3648,    70000ull * 70000ull,
                                              5,       eps_bits};
  for (int i = 0; i < kParameterCount; ++i) CHECK(driver->parameters[i] == expected[i]);
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
  CheckContains(Execute({.rope_columns = 512}), "cache must be [pages, page size, 576]");
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
  NoTokenLaunchesNothing();
  ACacheWithoutPagesNeedsNoMemory();
  WhatWouldLeaveABufferIsRefused();
  DriverErrorsAreNamed();
}
