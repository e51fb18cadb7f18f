#include "operands.h"

#include <initializer_list>
#include <limits>

namespace jax_mla {
namespace {

// jax_mla/geometry.py has the same geometry.
constexpr int64_t kQRank = 1536, kKvRank = 512, kNope = 128, kHeadRows = 192, kRow = 576;
constexpr int64_t kQkvColumns = 2112, kRope = 64, kScaledRow = 656;
constexpr int64_t kAlignment =
    16;  // bytes: every global access but slots and scales may be a 16-byte one
constexpr int64_t kAny = -1;

bool HasShape(const ffi::AnyBuffer::Dimensions& dimensions,
              std::initializer_list<int64_t> expected) {
  if (dimensions.size() != expected.size()) return false;
  auto actual = dimensions.begin();
  for (int64_t size : expected) {
    if (size != kAny && *actual != size) return false;
    ++actual;
  }
  return true;
}

bool IsAligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// How rows of the cache are stored, by the dtype of the cache; the values are the kernels'.
enum CacheFormat : int32_t { kE4m3 = 0, kBf16 = 1, kFp8DsMla = 2, kUnknown = -1 };

CacheFormat FormatOf(const ffi::AnyBuffer& cache) {
  switch (cache.element_type()) {
    case ffi::F8E4M3FN:
      return kE4m3;
    case ffi::BF16:
      return kBf16;
    case ffi::U8:
      return kFp8DsMla;
    default:
      return kUnknown;
  }
}

// Returns which fact about the sizes of a plain call does not hold, or null.
const char* SizeViolation(const Operands& o) {
  const int64_t batch = o.qkv.dimensions()[0], columns = o.qkv.dimensions()[1];
  const int64_t heads = o.w_uk.dimensions()[0];
  if (columns < kQkvColumns || columns % 8 != 0) {
    return "qkv must have at least 2112 columns and a multiple of 8";
  }
  if (batch > std::numeric_limits<int32_t>::max()) return "qkv has too many rows";
  if (!HasShape(o.q_norm.dimensions(), {kQRank})) return "q_norm must be [1536]";
  if (!HasShape(o.kv_norm.dimensions(), {kKvRank})) return "kv_norm must be [512]";
  if (!HasShape(o.w_qb.dimensions(), {heads * kHeadRows, kQRank}))
    return "w_qb must be [heads * 192, 1536]";
  if (!HasShape(o.w_uk.dimensions(), {heads, kNope, kKvRank}))
    return "w_uk must be [heads, 128, 512]";
  if (!HasShape(o.slots.dimensions(), {batch})) return "slots must be [batch]";
  if (!HasShape(o.q.dimensions(), {batch, heads, kRow})) return "q must be [batch, heads, 576]";
  const CacheFormat format = FormatOf(o.cache);
  const int64_t row = format == kFp8DsMla ? kScaledRow : kRow;
  if (format == kUnknown || !HasShape(o.cache.dimensions(), {kAny, kAny, row})) {
    return "cache must be [pages, page size, 576] float8_e4m3fn or bfloat16, or [pages, page size, "
           "656] uint8";
  }
  // A cache without pages has no memory: XLA may give it any pointer, also two different ones.
  if (o.cache.element_count() != 0 && o.cache.untyped_data() != o.cache_out.untyped_data()) {
    return "the cache result must alias the cache operand, but XLA gave it another buffer";
  }
  return nullptr;
}

// The same for what a call may have beside.
const char* OptionViolation(const Operands& o, int32_t style) {
  const int64_t batch = o.qkv.dimensions()[0];
  if (style < 0 || style > 2) return "style must be 0, 1 or 2";
  if (o.cos_sin.has_value() != (style != 0)) return "cos_sin and positions must come with a style";
  if (o.cos_sin) {
    const auto table = o.cos_sin->dimensions();
    if (o.cos_sin->element_type() != ffi::F32 || !HasShape(table, {kAny, kRope}) || table[0] < 1 ||
        table[0] > std::numeric_limits<int32_t>::max()) {
      return "cos_sin must be [positions, 64] float32 with at least one row";
    }
    if (o.positions->element_type() != ffi::S32 || !HasShape(o.positions->dimensions(), {batch}))
      return "positions must be [batch] int32";
  }
  if (o.q_latent && (o.q_latent->element_type() != ffi::BF16 ||
                     !HasShape(o.q_latent->dimensions(), {batch, kQRank}))) {
    return "q_latent must be [batch, 1536] bfloat16";
  }
  return nullptr;
}

const char* AlignmentViolation(const Operands& o) {
  for (const void* pointer :
       {o.qkv.untyped_data(), o.q_norm.untyped_data(), o.kv_norm.untyped_data(),
        o.w_qb.untyped_data(), o.w_uk.untyped_data(), o.cache.untyped_data(), o.q.untyped_data(),
        o.cos_sin ? o.cos_sin->untyped_data() : nullptr,
        o.q_latent ? o.q_latent->untyped_data() : nullptr}) {
    if (!IsAligned(pointer, kAlignment)) return "a buffer does not start at a multiple of 16 bytes";
  }
  for (const void* pointer :
       {o.slots.untyped_data(), o.q_scale.untyped_data(), o.k_scale.untyped_data(),
        o.positions ? o.positions->untyped_data() : nullptr}) {
    if (!IsAligned(pointer, 4))
      return "slots, positions or a scale does not start at a multiple of 4 bytes";
  }
  return nullptr;
}

}  // namespace

const char* Violation(const Operands& o, int32_t style) {
  if (const char* violation = SizeViolation(o)) return violation;
  if (const char* violation = OptionViolation(o, style)) return violation;
  return AlignmentViolation(o);
}

const char* MismatchWith(const Kernel& kernel, const Operands& o, int32_t style) {
  const auto q_dtype = kernel.q_bytes == 1 ? ffi::F8E4M3FN : ffi::BF16;
  if (o.q.element_type() != q_dtype) return "it writes queries of another dtype";
  if (kernel.q_bytes == 1 && FormatOf(o.cache) != kE4m3) return "it writes e4m3 cache rows only";
  if (!kernel.has_options && (style != 0 || o.q_latent)) {
    return "it neither rotates nor returns the query latent";
  }
  return nullptr;
}

Parameters ParametersOf(const Operands& o, float eps, int32_t style) {
  Parameters p = {};
  p.qkv = o.qkv.untyped_data();
  p.q_norm = o.q_norm.untyped_data();
  p.kv_norm = o.kv_norm.untyped_data();
  p.w_qb = o.w_qb.untyped_data();
  p.w_uk = o.w_uk.untyped_data();
  p.cache = o.cache.untyped_data();
  p.slots = o.slots.untyped_data();
  p.q_scale = o.q_scale.untyped_data();
  p.k_scale = o.k_scale.untyped_data();
  p.q = o.q.untyped_data();
  p.qkv_stride = o.qkv.dimensions()[1];
  p.cache_rows = o.cache.dimensions()[0] * o.cache.dimensions()[1];
  p.batch = static_cast<int32_t>(o.qkv.dimensions()[0]);
  p.eps = eps;
  p.style = style;
  p.cache_format = FormatOf(o.cache);
  if (o.cos_sin) {
    p.cos_sin = o.cos_sin->untyped_data();
    p.positions = o.positions->untyped_data();
    p.table_rows = static_cast<int32_t>(o.cos_sin->dimensions()[0]);
  }
  if (o.q_latent) p.q_latent = o.q_latent->untyped_data();
  return p;
}

}  // namespace jax_mla
