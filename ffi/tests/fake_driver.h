#ifndef JAX_MLA_TESTS_FAKE_DRIVER_H_
#define JAX_MLA_TESTS_FAKE_DRIVER_H_

#include <cuda.h>

#include <cstdint>

constexpr int kPlainParameterCount = 14;
constexpr int kParameterCount = 20;
constexpr int kExchangeParameterCount = 6;

// What the stand-in for the driver saw, and what its next launch returns.
struct FakeLaunches {
  int count;
  CUlaunchConfig config;        // of the last launch
  CUlaunchAttribute attribute;  // its first, if there is one
  CUfunction function;
  void** extra;
  uint64_t parameters[kParameterCount];  // zero-extended
  CUresult result;
};

extern "C" FakeLaunches* fake_launches();

#endif  // JAX_MLA_TESTS_FAKE_DRIVER_H_
