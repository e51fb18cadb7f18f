#include "mailbox_table.h"

#include <mutex>

namespace jax_mla {

std::optional<Mailbox> MailboxTable::Find(int32_t ordinal, int32_t number) const {
  std::shared_lock lock(mutex_);
  const auto entry = mailboxes_.find({ordinal, number});
  if (entry == mailboxes_.end()) return std::nullopt;
  return entry->second;
}

void MailboxTable::Add(int32_t ordinal, int32_t number, const Mailbox& mailbox) {
  std::unique_lock lock(mutex_);
  mailboxes_.insert_or_assign({ordinal, number}, mailbox);
}

void MailboxTable::Remove(int32_t ordinal, int32_t number) {
  std::unique_lock lock(mutex_);
  mailboxes_.erase({ordinal, number});
}

}  // namespace jax_mla
