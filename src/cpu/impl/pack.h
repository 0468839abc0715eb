// Between the user's memory (any dtype, any strides) and tiles of the compute type.
#pragma once

#include "cpu/impl/vec.h"
#include "cpu/kernels.h"

namespace jali::JALI_ISA {

using cpu::kTileKeys;
using cpu::Rows;

/// The bits of one element in memory.
template <DType>
struct Stored;
template <>
struct Stored<DType::kF64> {
  using type = double;
};
template <>
struct Stored<DType::kF32> {
  using type = float;
};
template <>
struct Stored<DType::kBF16> {
  using type = u16;
};
template <>
struct Stored<DType::kF16> {
  using type = u16;
};

/// kLanes<T> elements as vectors of u32 bit patterns.
using F32 = Vec<float>;
using U32 = Vec<u32>;
using U16Half = VecOf<u16, kVecBytes / 2>;  // as many elements as F32

JALI_INLINE U32 widen(const u16* p) {
  return __builtin_convertvector(*reinterpret_cast<const U16Half::unaligned*>(p), U32);
}
JALI_INLINE U32 select(U32 mask, U32 a, U32 b) { return (a & mask) | (b & ~mask); }
JALI_INLINE U32 mask_of(IVec<float> comparison) { return reinterpret_cast<U32>(comparison); }

JALI_INLINE F32 from_f16(U32 h) {
  const U32 sign = (h & 0x8000) << 16, rest = (h & 0x7fff) << 13;
  // Rebiasing the exponent by a product also normalises subnormal numbers.
  F32 x = reinterpret_cast<F32>(rest) * 0x1p112f;
  const U32 special = mask_of(rest >= 0x0f800000);  // inf and NaN keep the highest exponent
  return reinterpret_cast<F32>(sign | select(special, rest | 0x7f800000, reinterpret_cast<U32>(x)));
}
JALI_INLINE U32 to_bf16(F32 x) {
  const U32 bits = reinterpret_cast<U32>(x);
  const U32 nan = mask_of(x != x);
  return select(nan, (bits >> 16) | 0x40, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
JALI_INLINE U32 to_f16(F32 x) {
  const U32 bits = reinterpret_cast<U32>(x);
  const U32 sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  // Subnormal results: adding 1/2 rounds to multiples of 2^-24, the smallest half.
  const F32 shifted = reinterpret_cast<F32>(size) + 0.5f;
  const U32 small = reinterpret_cast<U32>(shifted) - 0x3f000000;
  const U32 normal = (size + 0xfff + ((size >> 13) & 1) - (112u << 23)) >> 13;
  U32 h = select(mask_of(size < 0x38800000), small, normal);
  h = select(mask_of(size >= 0x477ff000), U32{} + 0x7c00, h);  // rounds to infinity
  h = select(mask_of(size > 0x7f800000), U32{} + 0x7e00, h);   // NaN
  return h | sign;
}

/// kLanes<T> consecutive elements.
template <class T, DType kType>
JALI_INLINE Vec<T> load_as(const typename Stored<kType>::type* p) {
  if constexpr (sizeof(T) == 8 && kType == DType::kF32) {
    using Half = VecOf<float, kVecBytes / 2>;
    return __builtin_convertvector(*reinterpret_cast<const typename Half::unaligned*>(p), Vec<T>);
  } else if constexpr (kType == DType::kBF16) {
    return reinterpret_cast<F32>(widen(p) << 16);
  } else if constexpr (kType == DType::kF16) {
    return from_f16(widen(p));
  } else {
    return load(reinterpret_cast<const T*>(p));
  }
}
template <class T, DType kType>
JALI_INLINE void store_as(typename Stored<kType>::type* p, Vec<T> x) {
  if constexpr (sizeof(T) == 8 && kType == DType::kF32) {
    using Half = VecOf<float, kVecBytes / 2>;
    *reinterpret_cast<typename Half::unaligned*>(p) =
        __builtin_convertvector(x, typename Half::type);
  } else if constexpr (kType == DType::kBF16 || kType == DType::kF16) {
    U32 bits;
    if constexpr (kType == DType::kBF16) {
      bits = to_bf16(x);
    } else {
      bits = to_f16(x);
    }
    *reinterpret_cast<U16Half::unaligned*>(p) = __builtin_convertvector(bits, U16Half::type);
  } else {
    store(reinterpret_cast<T*>(p), x);
  }
}

/// Up to kLanes<T> elements at any stride, zero behind them.
template <class T, DType kType>
JALI_INLINE Vec<T> load_some(const typename Stored<kType>::type* p, i64 stride, i32 n) {
  if (stride == 1 && n >= kLanes<T>) return load_as<T, kType>(p);
  typename Stored<kType>::type buffer[kLanes<T>] = {};
  for (i32 i = 0; i < n && i < kLanes<T>; ++i) buffer[i] = p[i * stride];
  return load_as<T, kType>(buffer);
}

/// Calls f with the dtype as a constant. T = double meets fp64 and fp32, T = float all but fp64.
template <class T, class F>
JALI_INLINE void with_dtype(DType dtype, F f) {
  if constexpr (sizeof(T) == 8) {
    if (dtype == DType::kF32) {
      f.template operator()<DType::kF32>();
    } else {
      f.template operator()<DType::kF64>();
    }
  } else {
    if (dtype == DType::kBF16) {
      f.template operator()<DType::kBF16>();
    } else if (dtype == DType::kF16) {
      f.template operator()<DType::kF16>();
    } else {
      f.template operator()<DType::kF32>();
    }
  }
}

template <class T>
static void pack(const Rows& src, i32 rows, i32 width, T* dst, i64 ld) {
  with_dtype<T>(src.dtype, [&]<DType kType>() {
    using S = typename Stored<kType>::type;
    for (i32 r = 0; r < rows; ++r) {
      const S* from = static_cast<const S*>(src.data) + r * src.stride;
      for (i32 d = 0; d < width; d += kLanes<T>) {
        store(dst + r * ld + d,
              load_some<T, kType>(from + d * src.stride_d, src.stride_d, width - d));
      }
    }
  });
}

/// Transposes a square of vectors: swaps off-diagonal blocks of halving size.
template <class T>
JALI_INLINE void transpose(Vec<T> (&x)[kLanes<T>]) {
  IVec<T> low, high;
#pragma GCC unroll 4
  for (int half = kLanes<T> / 2; half >= 1; half /= 2) {
#pragma GCC unroll 16
    for (int c = 0; c < kLanes<T>; ++c) {
      low[c] = (c & half) ? kLanes<T> + c - half : c;
      high[c] = (c & half) ? kLanes<T> + c : c + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) {
      if (i & half) continue;
      const Vec<T> a = x[i], b = x[i + half];
      x[i] = __builtin_shuffle(a, b, low);
      x[i + half] = __builtin_shuffle(a, b, high);
    }
  }
}

template <class T>
static void pack_transposed(const Rows& src, i32 rows, i32 width, T factor, T* dst) {
  with_dtype<T>(src.dtype, [&]<DType kType>() {
    using S = typename Stored<kType>::type;
    for (i32 r = 0; r < kTileKeys; r += kLanes<T>) {
      for (i32 d = 0; d < width; d += kLanes<T>) {
        Vec<T> square[kLanes<T>];
        for (i32 i = 0; i < kLanes<T>; ++i) {
          const S* from = static_cast<const S*>(src.data) + (r + i) * src.stride + d * src.stride_d;
          square[i] =
              r + i < rows ? factor * load_some<T, kType>(from, src.stride_d, width - d) : Vec<T>{};
        }
        transpose<T>(square);
        for (i32 i = 0; i < kLanes<T> && d + i < width; ++i) {
          store(dst + (d + i) * kTileKeys + r, square[i]);
        }
      }
    }
  });
}

template <class T>
static void unpack(const T* src, i64 ld, i32 rows, i32 width, const T* factor, const Rows& dst) {
  with_dtype<T>(dst.dtype, [&]<DType kType>() {
    using S = typename Stored<kType>::type;
    for (i32 r = 0; r < rows; ++r) {
      const T f = factor ? factor[r] : T(1);
      S* to = static_cast<S*>(dst.data) + r * dst.stride;
      for (i32 d = 0; d < width; d += kLanes<T>) {
        const Vec<T> x = f * load(src + r * ld + d);
        if (dst.stride_d == 1 && width - d >= kLanes<T>) {
          store_as<T, kType>(to + d, x);
        } else {
          S buffer[kLanes<T>];
          store_as<T, kType>(buffer, x);
          for (i32 i = 0; i < kLanes<T> && d + i < width; ++i) {
            to[(d + i) * dst.stride_d] = buffer[i];
          }
        }
      }
    }
  });
}

}  // namespace jali::JALI_ISA
