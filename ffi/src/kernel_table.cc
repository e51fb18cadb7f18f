#include "kernel_table.h"

#include <mutex>

namespace jax_mla {

const Kernel* KernelTable::Find(int32_t ordinal, std::string_view key) const {
  std::shared_lock lock(mutex_);
  const auto device = kernels_.find(ordinal);
  if (device == kernels_.end()) return nullptr;
  const auto entry = device->second.find(key);
  return entry == device->second.end() ? nullptr : &entry->second;
}

void KernelTable::Add(int32_t ordinal, std::string_view key, const Kernel& kernel) {
  std::unique_lock lock(mutex_);
  kernels_[ordinal].try_emplace(std::string(key), kernel);
}

}  // namespace jax_mla
