#ifndef JAX_MLA_TESTS_LIBRARY_H_
#define JAX_MLA_TESTS_LIBRARY_H_

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "xla/ffi/api/c_api.h"

// Ends the test, naming the line, unless `condition` holds.
#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)

// Ends the test unless `text` contains `part`.
inline void CheckContains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return;
  std::fprintf(stderr, "expected a text with '%s', got '%s'\n", part.c_str(), text.c_str());
  std::exit(1);
}

// The library's exported symbols.
struct Library {
  using Loader = void (*)(int32_t ordinal, const char* key, char* message, size_t message_bytes);

  explicit Library(const char* path) : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) std::fprintf(stderr, "%s\n", dlerror());
    CHECK(handle_ != nullptr);
    Find("JaxMlaQAbsorb", execute);
    Find("JaxMlaQAbsorbInitialize", initialize);
    Find("JaxMlaExchange", exchange);
    Find("JaxMlaExchangeInitialize", initialize_exchange);
    Find("jax_mla_set_loader", set_loader);
    Find("jax_mla_add_kernel", add_kernel);
    Find("jax_mla_add_mailbox", add_mailbox);
    Find("jax_mla_remove_mailbox", remove_mailbox);
  }

  XLA_FFI_Handler *execute, *initialize, *exchange, *initialize_exchange;
  void (*set_loader)(Loader);
  void (*add_kernel)(int32_t ordinal, const char* key, void* function, uint32_t block,
                     uint32_t cluster, uint32_t tokens, uint32_t shared_memory, uint32_t q_bytes,
                     bool has_options);
  void (*add_mailbox)(int32_t ordinal, int32_t number, void* control, const uint32_t* report,
                      uint64_t half_bytes, uint32_t ranks);
  void (*remove_mailbox)(int32_t ordinal, int32_t number);

 private:
  template <typename Function>
  void Find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    CHECK(function != nullptr);
  }

  void* handle_;
};

#endif  // JAX_MLA_TESTS_LIBRARY_H_
