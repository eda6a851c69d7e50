// The fold kernels. This file is compiled once per instruction set, BIREME_ISA naming it.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "dtypes.h"

namespace bireme::BIREME_ISA {
namespace {

constexpr u64 kBlock = 1024;  // elements folded before they are stored: the accumulator stays in L1

struct BF16 {
  std::uint16_t bits;
};
struct F16 {
  _Float16 value;
};
struct Bool {
  u8 value;
};

template <class T>
struct Traits {
  using Acc = T;
  static Acc load(T x) { return x; }
  static T store(Acc x) { return x; }
};
template <>
struct Traits<Bool> {
  using Acc = bool;
  static bool load(Bool x) { return x.value != 0; }
  static Bool store(bool x) { return {static_cast<u8>(x)}; }
};
template <>
struct Traits<F16> {
  using Acc = float;
  static float load(F16 x) { return static_cast<float>(x.value); }
  static F16 store(float x) { return {static_cast<_Float16>(x)}; }
};
template <>
struct Traits<BF16> {
  using Acc = float;
  static float load(BF16 x) { return std::bit_cast<float>(u32{x.bits} << 16); }
  static BF16 store(float x) {  // round to nearest even; a NaN stays a NaN
    const u32 bits = std::bit_cast<u32>(x);
    const u32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u32 quiet = (bits >> 16) | 0x40;
    return {static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded)};
  }
};

template <class A>
using Wrap = std::conditional_t<std::is_integral_v<A> && !std::is_same_v<A, bool>,
                                std::make_unsigned<A>, std::type_identity<A>>::type;

struct Sum {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_same_v<A, bool>)
      return a || b;
    else
      return static_cast<A>(static_cast<Wrap<A>>(a) + static_cast<Wrap<A>>(b));
  }
};
struct Prod {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_same_v<A, bool>)
      return a && b;
    else if constexpr (std::is_integral_v<A>)  // through 64 bits: 16-bit factors must not overflow
                                               // int
      return static_cast<A>(static_cast<u64>(a) * static_cast<u64>(b));
    else
      return a * b;
  }
};
struct Min {
  template <class A>
  static A apply(A a, A b) {
    return (b < a) | (b != b) ? b : a;
  }
};
struct Max {
  template <class A>
  static A apply(A a, A b) {
    return (b > a) | (b != b) ? b : a;
  }
};

// Copies past the cache, for results that nobody reads soon. The caller fences.
void stream_out(void* dst, const void* src, u64 bytes) {
#if defined(__AVX2__)
  u8* to = static_cast<u8*>(dst);
  const u8* from = static_cast<const u8*>(src);
  const u64 head = std::min<u64>(-reinterpret_cast<std::uintptr_t>(to) & 63, bytes);
  std::memcpy(to, from, head);
  u64 at = head;
  for (; at + 64 <= bytes; at += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at),
                        _mm512_loadu_si512(reinterpret_cast<const void*>(from + at)));
#else
    for (u64 half = at; half < at + 64; half += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + half),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half)));
#endif
  }
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(dst, src, bytes);
#endif
}

template <class T, class F, bool kAverage>
void fold(void* const* dsts, u32 dst_count, const void* const* srcs, u32 src_count, u64 count,
          bool stream) {
  using A = typename Traits<T>::Acc;
  alignas(64) A acc[kBlock];
  alignas(64) T out[kBlock];
  for (u64 at = 0; at < count; at += kBlock) {
    const u64 n = count - at < kBlock ? count - at : kBlock;
    const T* first = static_cast<const T*>(srcs[0]) + at;
    if (src_count == 1) {
      for (u64 i = 0; i < n; ++i) acc[i] = Traits<T>::load(first[i]);
    } else {
      const T* next = static_cast<const T*>(srcs[1]) + at;
      for (u64 i = 0; i < n; ++i)
        acc[i] = F::apply(Traits<T>::load(first[i]), Traits<T>::load(next[i]));
    }
    for (u32 r = 2; r < src_count; ++r) {
      const T* next = static_cast<const T*>(srcs[r]) + at;
      for (u64 i = 0; i < n; ++i) acc[i] = F::apply(acc[i], Traits<T>::load(next[i]));
    }
    if constexpr (kAverage) {
      const A divisor = static_cast<A>(src_count);
      for (u64 i = 0; i < n; ++i) acc[i] = acc[i] / divisor;
    }
    const void* result = acc;
    if constexpr (!std::is_same_v<T, A>) {
      for (u64 i = 0; i < n; ++i) out[i] = Traits<T>::store(acc[i]);
      result = out;
    }
    for (u32 d = 0; d < dst_count; ++d) {
      T* to = static_cast<T*>(dsts[d]) + at;
      stream ? stream_out(to, result, n * sizeof(T)) : (void)std::memcpy(to, result, n * sizeof(T));
    }
  }
#if defined(__x86_64__)
  if (stream) _mm_sfence();
#endif
}

using Fold = void (*)(void* const*, u32, const void* const*, u32, u64, bool);

template <class T>
Fold pick(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return fold<T, Sum, false>;
    case Reduction::prod:
      return fold<T, Prod, false>;
    case Reduction::min:
      return fold<T, Min, false>;
    case Reduction::max:
      return fold<T, Max, false>;
    case Reduction::avg:
      if constexpr (std::is_floating_point_v<typename Traits<T>::Acc>) return fold<T, Sum, true>;
      return nullptr;
    default:
      return nullptr;
  }
}

}  // namespace

Fold pick_fold(DType dtype, Reduction reduction) {
  switch (dtype) {
    case DType::b1:
      return pick<Bool>(reduction);
    case DType::i8:
      return pick<std::int8_t>(reduction);
    case DType::i16:
      return pick<std::int16_t>(reduction);
    case DType::i32:
      return pick<std::int32_t>(reduction);
    case DType::i64:
      return pick<std::int64_t>(reduction);
    case DType::u8:
      return pick<std::uint8_t>(reduction);
    case DType::u16:
      return pick<std::uint16_t>(reduction);
    case DType::u32:
      return pick<std::uint32_t>(reduction);
    case DType::u64:
      return pick<std::uint64_t>(reduction);
    case DType::f16:
      return pick<F16>(reduction);
    case DType::bf16:
      return pick<BF16>(reduction);
    case DType::f32:
      return pick<float>(reduction);
    case DType::f64:
      return pick<double>(reduction);
    default:
      return nullptr;
  }
}

}  // namespace bireme::BIREME_ISA
