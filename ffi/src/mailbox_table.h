#ifndef JAX_MLA_MAILBOX_TABLE_H_
#define JAX_MLA_MAILBOX_TABLE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>
#include <utility>

namespace jax_mla {

// A rank's mailbox.
struct Mailbox {
  void* control;           // device address of the control block (jax_mla/mailbox_layout.py)
  const uint32_t* report;  // host address of a word that the device writes when it gives up
  uint64_t half_bytes;     // gathered queries of one call that it can hold
  uint32_t ranks;          // devices that gather together
};

// The open mailboxes of this process, by device and number. Thread-safe.
class MailboxTable {
 public:
  std::optional<Mailbox> Find(int32_t ordinal, int32_t number) const;
  void Add(int32_t ordinal, int32_t number, const Mailbox& mailbox);
  void Remove(int32_t ordinal, int32_t number);

 private:
  mutable std::shared_mutex mutex_;
  std::map<std::pair<int32_t, int32_t>, Mailbox> mailboxes_;
};

}  // namespace jax_mla

#endif  // JAX_MLA_MAILBOX_TABLE_H_
