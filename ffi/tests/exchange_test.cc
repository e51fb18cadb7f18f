// The handlers of the gather through mailboxes, called as XLA calls them.

#include <vector>

#include "call_frame.h"
#include "fake_driver.h"
#include "library.h"

namespace {

constexpr int32_t kAbi = 2;
constexpr int32_t kNumber = 5;
constexpr uint32_t kRanks = 4;
constexpr uint64_t kHalfBytes = 8 * 4 * 2 * 576;  // 8 tokens, 4 ranks, 2 heads
constexpr uintptr_t kControl = 0xC0000;

constexpr auto kBf16 = XLA_FFI_DataType_BF16, kE4m3 = XLA_FFI_DataType_F8E4M3FN,
               kU8 = XLA_FFI_DataType_U8;

FakeLaunches* driver = nullptr;
const Library* library = nullptr;
uint32_t report = 0;

// What a test changes in a call that is right otherwise.
struct Changes {
  int64_t batch = 8, heads = 2, all_heads = 8, columns = 576;
  uintptr_t q = 0x10000, out = 0x20000;
  XLA_FFI_DataType dtype = kE4m3, out_dtype = kE4m3;
  int32_t abi = kAbi, mailbox = kNumber;
};

CallFrame Exchange(const Changes& c) {
  return CallFrame()
      .Operand(c.dtype, {c.batch, c.heads, c.columns}, c.q)
      .Result(c.out_dtype, {c.batch, c.all_heads, c.columns}, c.out)
      .Attribute("kernel", std::string("exchange"))
      .Attribute("abi", c.abi)
      .Attribute("mailbox", c.mailbox);
}

std::string Execute(const Changes& changes) {
  return Exchange(changes).Call(library->exchange, XLA_FFI_ExecutionStage_EXECUTE);
}

std::string Initialize(int32_t number = kNumber, int32_t abi = kAbi) {
  return CallFrame()
      .Attribute("kernel", std::string("exchange"))
      .Attribute("abi", abi)
      .Attribute("mailbox", number)
      .Call(library->initialize_exchange, XLA_FFI_ExecutionStage_INITIALIZE);
}

void Load(int32_t ordinal, const char* key, char*, size_t) {
  library->add_kernel(ordinal, key, reinterpret_cast<void*>(0xF00), 256, 1, 1, 0, 1, false);
}

void AddMailbox() {
  library->add_mailbox(CallFrame::kOrdinal, kNumber, reinterpret_cast<void*>(kControl), &report,
                       kHalfBytes, kRanks);
}

void HandlerMayBeRecorded() {
  CHECK(MetadataOf(library->exchange).traits == XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
}

void InitializeLoadsAndNamesWhatIsMissing() {
  CheckContains(Initialize(), "import jax_mla");
  library->set_loader(Load);
  CheckContains(Initialize(kNumber, kAbi + 1), "kernel interface 3");
  CheckContains(Initialize(), "mailbox 5 is not open on device 3");
  AddMailbox();
  CHECK(Initialize() == "");
  CheckContains(Initialize(6), "mailbox 6 is not open on device 3");
}

void ParametersComeInTheOrderOfTheCubin() {
  driver->count = 0;
  CHECK(Execute({}) == "");
  CHECK(driver->count == 1);
  CHECK(driver->function == reinterpret_cast<CUfunction>(0xF00));
  const uint64_t expected[kExchangeParameterCount] = {0x10000, 0x20000,      kControl,
                                                      8,       2 * 576 / 16, 0x7F7F7F7F};
  for (int i = 0; i < kExchangeParameterCount; ++i) CHECK(driver->parameters[i] == expected[i]);
  const CUlaunchConfig& config = driver->config;
  CHECK(config.gridDimX == 9 && config.gridDimY == 1 && config.gridDimZ == 1);  // 2304 words
  CHECK(config.blockDimX == 256 && config.blockDimY == 1 && config.blockDimZ == 1);
  CHECK(config.sharedMemBytes == 0);
  CHECK(config.hStream == reinterpret_cast<CUstream>(CallFrame::kStream));
}

void QueriesOfBf16HaveTheirOwnNan() {
  CHECK(Execute({.batch = 4, .dtype = kBf16, .out_dtype = kBf16}) == "");
  CHECK(driver->parameters[4] == 2 * 1152 / 16);
  CHECK(driver->parameters[5] == 0x7FFF7FFF);
}

void AllCtasOfTheLargestCallRunAtOnce() {
  library->add_mailbox(CallFrame::kOrdinal, 7, reinterpret_cast<void*>(kControl), &report,
                       uint64_t{1} << 40, kRanks);
  CHECK(Execute({.batch = 4096, .heads = 128, .all_heads = 512, .mailbox = 7}) == "");
  CHECK(driver->config.gridDimX == 32);
}

void NoTokenLaunchesNothing() {
  driver->count = 0;
  CHECK(Execute({.batch = 0}) == "");
  CHECK(driver->count == 0);
}

void WhatDoesNotFitTheMailboxIsRefused() {
  driver->count = 0;
  CheckContains(Execute({.batch = 9}), "too small for the gathered queries");
  CheckContains(Execute({.dtype = kBf16, .out_dtype = kBf16}), "too small");
  CheckContains(Execute({.all_heads = 6}), "heads of all ranks");
  CheckContains(Execute({.dtype = kU8, .out_dtype = kU8}), "float8_e4m3fn or bfloat16");
  CheckContains(Execute({.out_dtype = kBf16}), "and the result too");
  CheckContains(Execute({.columns = 572}), "whole words of 16 bytes");
  CheckContains(Execute({.out = 0x20008}), "multiple of 16 bytes");
  CheckContains(Execute({.mailbox = 6}), "mailbox 6 is not open on device 3");
  CheckContains(Execute({.abi = kAbi + 1}), "kernel interface 3");
  CHECK(driver->count == 0);
}

void ARankThatWasWaitedForInVainIsNamed() {
  driver->count = 0;
  report = 3;
  for (const std::string& message : {Execute({}), Initialize()}) {
    CheckContains(message, "device 3 gave up waiting for rank 2 of mailbox 5");
    CheckContains(message, "reset()");
  }
  CHECK(driver->count == 0);
  report = 0;
  CHECK(Execute({}) == "");
}

void AClosedMailboxIsNamed() {
  report = 0xFFFFFFFF;  // between closing it and taking it out of the table
  CheckContains(Execute({}), "mailbox 5 is not open");
  report = 0;
  library->remove_mailbox(CallFrame::kOrdinal, kNumber);
  CheckContains(Execute({}), "mailbox 5 is not open");
}

}  // namespace

int main(int, char** arguments) {
  const Library opened(arguments[1]);
  library = &opened;
  void* libcuda = dlopen("libcuda.so.1", RTLD_NOW);
  driver = reinterpret_cast<FakeLaunches* (*)()>(dlsym(libcuda, "fake_launches"))();

  HandlerMayBeRecorded();
  InitializeLoadsAndNamesWhatIsMissing();
  ParametersComeInTheOrderOfTheCubin();
  QueriesOfBf16HaveTheirOwnNan();
  AllCtasOfTheLargestCallRunAtOnce();
  NoTokenLaunchesNothing();
  WhatDoesNotFitTheMailboxIsRefused();
  ARankThatWasWaitedForInVainIsNamed();
  AClosedMailboxIsNamed();
}
