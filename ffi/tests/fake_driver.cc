// Stands in for libcuda.so.1 and records the last launch.

#include "fake_driver.h"

#include <cuda.h>

#include <cstring>

namespace {

constexpr size_t kSizes[kParameterCount] = {8, 8, 8, 8, 8, 8, 8, 8, 8, 8,
                                            8, 8, 4, 4, 8, 8, 8, 4, 4, 4};
constexpr size_t kExchangeSizes[kExchangeParameterCount] = {8, 8, 8, 4, 4, 4};

FakeLaunches launches = {};

}  // namespace

extern "C" {

FakeLaunches* fake_launches() { return &launches; }

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  ++launches.count;
  launches.config = *config;
  // Only the kernels of q_absorb have clusters.
  const bool is_exchange = config->numAttrs == 0;
  if (!is_exchange) launches.attribute = config->attrs[0];
  launches.function = function;
  launches.extra = extra;
  const size_t* sizes = is_exchange ? kExchangeSizes : kSizes;
  for (int i = 0; i < (is_exchange ? kExchangeParameterCount : kParameterCount); ++i) {
    launches.parameters[i] = 0;
    std::memcpy(&launches.parameters[i], parameters[i], sizes[i]);
  }
  return launches.result;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  if (error != CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES) return CUDA_ERROR_INVALID_VALUE;
  *name = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
  return CUDA_SUCCESS;
}

}  // extern "C"
