// The XLA FFI handlers of the gather of queries through mailboxes, and the C functions through
// which Python hands over mailboxes.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "driver.h"
#include "launch.h"
#include "loading.h"
#include "mailbox_table.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mla {
namespace {

constexpr int64_t kWordBytes = 16;
// All CTAs must run at once: fewer than the SMs of any supported GPU, with most of them left over.
constexpr int64_t kMostCtas = 32;
// What a report says of a mailbox that is closed (jax_mla/mailbox_layout.py).
constexpr uint32_t kClosed = 0xFFFFFFFF;

MailboxTable& Mailboxes() {
  // Never destroyed: an XLA thread may still launch while the process exits.
  static MailboxTable* const table = new MailboxTable();
  return *table;
}

ffi::Error FindMailbox(std::string_view key, int32_t ordinal, int32_t number, Mailbox* mailbox) {
  const auto found = Mailboxes().Find(ordinal, number);
  // Written by the device at any time. Zero while the mailbox is open.
  const uint32_t report = found ? *static_cast<const volatile uint32_t*>(found->report) : kClosed;
  if (report == kClosed) {
    return Refuse(key, "mailbox " + std::to_string(number) + " is not open on device " +
                           std::to_string(ordinal) +
                           ". Keep the DcpMailbox open while programs that were traced with it run,"
                           " on the devices of its mesh.");
  }
  if (report != 0) {
    return Refuse(key, "an earlier call on device " + std::to_string(ordinal) +
                           " gave up waiting for rank " + std::to_string(report - 1) +
                           " of mailbox " + std::to_string(number) +
                           ". Find out why that rank is behind, then call reset() of the DcpMailbox"
                           " in every process.");
  }
  *mailbox = *found;
  return ffi::Error::Success();
}

ffi::Error InitializeExchangeImpl(int32_t ordinal, std::string_view key, int32_t abi,
                                  int32_t number) {
  if (ffi::Error error = EnsureLoaded(ordinal, key, abi); error.failure()) return error;
  Mailbox mailbox;
  return FindMailbox(key, ordinal, number, &mailbox);
}

// NaN in both halves of a word of 4 bytes, of the queries' dtype; 0 for a dtype that none have.
uint32_t NanWord(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F8E4M3FN:
      return 0x7F7F7F7F;
    case ffi::BF16:
      return 0x7FFF7FFF;
    default:
      return 0;
  }
}

// Returns which fact about the sizes of a call does not hold, or null.
const char* ExchangeViolation(const ffi::AnyBuffer& q, const ffi::AnyBuffer& out,
                              const Mailbox& mailbox) {
  const auto own = q.dimensions(), all = out.dimensions();
  if (NanWord(q.element_type()) == 0 || q.element_type() != out.element_type()) {
    return "queries must be float8_e4m3fn or bfloat16, and the result too";
  }
  if (own.size() != 3 || all.size() != 3 || all[0] != own[0] ||
      all[1] != own[1] * static_cast<int64_t>(mailbox.ranks) || all[2] != own[2]) {
    return "the result must have the heads of all ranks of the mailbox, [batch, ranks * heads,"
           " columns]";
  }
  if (q.size_bytes() % (own[0] * kWordBytes) != 0)
    return "a token's queries must be whole words of 16 bytes";
  if (out.size_bytes() > mailbox.half_bytes)
    return "the mailbox is too small for the gathered queries";
  if (out.size_bytes() / kWordBytes > std::numeric_limits<int32_t>::max())
    return "the result is too large";
  for (const void* pointer : {q.untyped_data(), out.untyped_data()}) {
    if (reinterpret_cast<uintptr_t>(pointer) % kWordBytes != 0)
      return "a buffer does not start at a multiple of 16 bytes";
  }
  return nullptr;
}

// Execute: may run while a graph is captured, so it only looks up, checks and launches.
ffi::Error ExchangeImpl(CUstream stream, int32_t ordinal, ffi::AnyBuffer q,
                        ffi::Result<ffi::AnyBuffer> out, std::string_view key, int32_t abi,
                        int32_t number) {
  if (ffi::Error error = CheckAbi(key, abi); error.failure()) return error;
  if (q.element_count() == 0 && out->element_count() == 0)
    return ffi::Error::Success();  // no token
  Mailbox mailbox;
  if (ffi::Error error = FindMailbox(key, ordinal, number, &mailbox); error.failure()) return error;
  if (const char* violation = ExchangeViolation(q, *out, mailbox)) return Invalid(key, violation);
  const Kernel* kernel;
  if (ffi::Error error = FindLoaded(ordinal, key, &kernel); error.failure()) return error;

  const int64_t batch = q.dimensions()[0];
  ExchangeParameters p = {};
  p.q = q.untyped_data();
  p.out = out->untyped_data();
  p.control = mailbox.control;
  p.batch = static_cast<int32_t>(batch);
  p.words = static_cast<int32_t>(q.size_bytes() / (batch * kWordBytes));
  p.replacement = NanWord(q.element_type());
  const int64_t words = static_cast<int64_t>(out->size_bytes()) / kWordBytes;
  const int64_t ctas = std::min<int64_t>(kMostCtas, (words + kernel->block - 1) / kernel->block);
  return Launched(key, ordinal,
                  LaunchExchange(OpenDriver(), *kernel, p, static_cast<uint32_t>(ctas), stream));
}

}  // namespace
}  // namespace jax_mla

extern "C" {

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMlaExchangeInitialize, jax_mla::InitializeExchangeImpl,
                              xla::ffi::Ffi::BindInitialize()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Attr<std::string_view>("kernel")
                                  .Attr<int32_t>("abi")
                                  .Attr<int32_t>("mailbox"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JaxMlaExchange, jax_mla::ExchangeImpl,
    xla::ffi::Ffi::Bind()
        .Ctx<xla::ffi::PlatformStream<CUstream>>()
        .Ctx<xla::ffi::DeviceOrdinal>()
        .Arg<xla::ffi::AnyBuffer>()        // q   [B, H, 576] e4m3 or bf16, this rank's
        .Ret<xla::ffi::AnyBuffer>()        // out [B, ranks * H, 576]
        .Attr<std::string_view>("kernel")  // key in the manifest
        .Attr<int32_t>("abi")              // jax_mla/variants.py
        .Attr<int32_t>("mailbox"),         // its number
    {xla::ffi::Traits::kCmdBufferCompatible});

// `control` is a device address of device `ordinal`; the rest is described at Mailbox.
void jax_mla_add_mailbox(int32_t ordinal, int32_t number, void* control, const uint32_t* report,
                         uint64_t half_bytes, uint32_t ranks) {
  jax_mla::Mailboxes().Add(ordinal, number, {control, report, half_bytes, ranks});
}

void jax_mla_remove_mailbox(int32_t ordinal, int32_t number) {
  jax_mla::Mailboxes().Remove(ordinal, number);
}

}  // extern "C"
