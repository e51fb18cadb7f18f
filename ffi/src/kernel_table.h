#ifndef JAX_MLA_KERNEL_TABLE_H_
#define JAX_MLA_KERNEL_TABLE_H_

#include <cuda.h>

#include <cstdint>
#include <map>
#include <shared_mutex>
#include <string>
#include <string_view>

namespace jax_mla {

// A loaded kernel and how to launch it, as its manifest entry says.
struct Kernel {
  CUfunction function;     // belongs to the primary context of one device
  uint32_t block;          // threads a CTA
  uint32_t cluster;        // CTAs a cluster, all of one head
  uint32_t tokens;         // tokens a cluster handles
  uint32_t shared_memory;  // dynamic bytes a CTA
  uint32_t q_bytes;        // of a query value: 1 for e4m3, 2 for bf16
  bool has_options;        // whether its parameters go on after eps
};

// The kernels that are loaded, by device and key. Entries are never changed or removed, so that
// what Find returns stays valid without the lock. Thread-safe; nothing is called while the lock is
// held.
class KernelTable {
 public:
  // Returns null when the kernel is not loaded on that device.
  const Kernel* Find(int32_t ordinal, std::string_view key) const;

  // Does nothing when the key is there already.
  void Add(int32_t ordinal, std::string_view key, const Kernel& kernel);

 private:
  mutable std::shared_mutex mutex_;
  std::map<int32_t, std::map<std::string, Kernel, std::less<>>> kernels_;
};

}  // namespace jax_mla

#endif  // JAX_MLA_KERNEL_TABLE_H_
