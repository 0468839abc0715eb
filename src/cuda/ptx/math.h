// Single instructions of arithmetic and of exchange between the lanes of a warp.
#pragma once

#include "cuda/ptx/barrier.h"

namespace jali::ptx {

JALI_DEVICE float infinity() { return __int_as_float(0x7f800000); }

JALI_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JALI_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JALI_DEVICE float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 2^x to 1e-4, or 0 for x below -126; x is below 128. A NaN stays one. PERF: the units of
/// multiplication, which do this, are eight times as wide as those of exp2_fast.
JALI_DEVICE float exp2_polynomial(float x) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-127.0f));
  constexpr float kRound =
      12582912.0f;  // 1.5 · 2^23: what it is added to is rounded, in the low bits
  const float whole = x + kRound, rest = x - (whole - kRound);
  float y = __fmaf_rn(rest, 0.05517166f, 0.24261116f);
  y = __fmaf_rn(y, rest, 0.69326099f);
  y = __fmaf_rn(y, rest, 0.99992807f);
  return y * __uint_as_float((__float_as_uint(whole) << 23) + 0x3f800000u);
}
/// min(x², 1); 0 of a NaN. PERF: one multiplication.
JALI_DEVICE float square_to_one(float x) {
  float y;
  asm("mul.rn.sat.f32 %0, %1, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// The same of x² + more.
JALI_DEVICE float square_to_one(float x, float more) {
  float y;
  asm("fma.rn.sat.f32 %0, %1, %1, %2;" : "=f"(y) : "f"(x), "f"(more));
  return y;
}
JALI_DEVICE float maximum(float a, float b) {
  float y;
  asm("max.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// Of a NaN and anything, a NaN.
JALI_DEVICE float maximum_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

/// 16-bit numbers. pack: two floats rounded to a pair, `low` in the low half; value: one of them.
struct BF16 {
  static constexpr i32 kDigits = 8;  // binary
  JALI_DEVICE static float value(u16 x) { return __uint_as_float(u32{x} << 16); }
  JALI_DEVICE static u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  /// Of pairs.
  JALI_DEVICE static u32 multiply(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
};
struct FP16 {
  static constexpr i32 kDigits = 11;
  JALI_DEVICE static float value(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  JALI_DEVICE static u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  /// Of pairs.
  JALI_DEVICE static u32 multiply(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
};

JALI_DEVICE float shuffle_xor(float x, i32 lanes) {
  float y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(y) : "f"(x), "r"(lanes));
  return y;
}
/// Of four lanes that have the same rows of accumulators.
JALI_DEVICE float sum_of_quad(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}
JALI_DEVICE u32 shuffle_xor(u32 x, i32 lanes) {
  u32 y;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(y) : "r"(x), "r"(lanes));
  return y;
}
/// `count` ones from bit `first` on, both at least 0; those behind bit 31 fall away.
JALI_DEVICE u32 bit_mask(i32 first, i32 count) {
  u32 mask;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(mask) : "r"(first), "r"(count));
  return mask;
}
/// Any value as words; what pads the last one may be anything.
template <class T>
union Words {
  static constexpr i32 kCount = (static_cast<i32>(sizeof(T)) + 3) / 4;
  T value;
  u32 words[kCount];
  JALI_DEVICE Words() {}
  JALI_DEVICE explicit Words(const T& x) : value(x) {}
};
/// exchange(word) of every word of x.
template <class T, class Exchange>
JALI_DEVICE T by_words(const T& x, Exchange exchange) {
  const Words<T> from(x);
  Words<T> to;
#pragma unroll
  for (i32 n = 0; n < Words<T>::kCount; ++n) to.words[n] = exchange(from.words[n]);
  return to.value;
}
/// Bytes of {a, b}, as prmt.b32 selects them; a selector's top bit asks for copies of the byte's.
JALI_DEVICE u32 permute(u32 a, u32 b, u32 selectors) {
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selectors));
  return y;
}
/// Half a 2 x 2 transpose with the lane `lanes` away: the upper lane gives x, the lower one y.
JALI_DEVICE void exchange(u32& x, u32& y, bool upper, i32 lanes) {
  const u32 other = shuffle_xor(upper ? x : y, lanes);
  x = upper ? other : x;
  y = upper ? y : other;
}
/// A 4 x 4 transpose between the lanes of a quad: word n of lane q and word q of lane n change places.
JALI_DEVICE void transpose_quad(u32 (&w)[4], i32 quad) {
  exchange(w[0], w[1], quad & 1, 1);
  exchange(w[2], w[3], quad & 1, 1);
  exchange(w[0], w[2], quad & 2, 2);
  exchange(w[1], w[3], quad & 2, 2);
}
/// 1 if x without its sign is less than y, as floats are, else 0; or the other way round. y is not a NaN. PERF: one
/// instruction.
template <bool kBelow>
JALI_DEVICE float compare_magnitude(u32 x, u32 y) {
  float one;
  if constexpr (kBelow) {
    asm("{\n.reg .b32 m;\nabs.f32 m, %1;\nset.lt.f32.f32 %0, m, %2;\n}"
        : "=f"(one)
        : "r"(x), "r"(y));
  } else {
    asm("{\n.reg .b32 m;\nabs.f32 m, %1;\nset.geu.f32.f32 %0, m, %2;\n}"
        : "=f"(one)
        : "r"(x), "r"(y));
  }
  return one;
}

/// y - |x|, clamped to [0, 1]; 0 if x is a NaN.
JALI_DEVICE float saturated_difference(float y, u32 x) {
  float z;
  asm("{\n.reg .f32 m;\nmov.b32 m, %2;\nabs.f32 m, m;\nsub.sat.f32 %0, %1, m;\n}"
      : "=f"(z)
      : "f"(y), "r"(x));
  return z;
}

/// Ones in each half of x whose low 15 bits are less than the half of y, which is at most 0x7c00. PERF: one
/// instruction, of half-precision numbers; what is larger than infinity is none, and not below y either.
JALI_DEVICE u32 magnitudes_below(u32 x, u32 y) {
  u32 z;
  asm("{\n.reg .b32 m;\nabs.f16x2 m, %1;\nset.lt.u32.f16x2 %0, m, %2;\n}"
      : "=r"(z)
      : "r"(x), "r"(y));
  return z;
}
/// Lane 0's value for all: the compiler then keeps it in a uniform register.
JALI_DEVICE i32 broadcast(i32 x) { return __shfl_sync(0xffffffffu, x, 0); }

/// True in one lane of a converged warp. PERF: unlike with a comparison of lanes, ptxas knows then that one
/// thread alone goes on, and needs no loop over lanes around each copy by the engine.
JALI_DEVICE bool elect() {
  u32 one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(one)::"memory");
  return one != 0;
}

/// x; what is computed of it is computed where it stands, not once before a loop. PERF: for what is
/// cheaper to compute again than to keep in a register.
JALI_DEVICE i32 opaque(i32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <class X>
JALI_DEVICE X* opaque(X* x) {
  asm volatile("" : "+l"(x));
  return x;
}

/// The lane of a block's threads in one dimension, read where it stands.
JALI_DEVICE i32 lane_id() {
  i32 x;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
  return x;
}
/// gridDim.x, read where it stands.
JALI_DEVICE u32 num_blocks() {
  u32 x;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(x));
  return x;
}

/// What stands before it stays there, for ptxas, too, by an event that never happens: one instruction. A kernel that
/// uses it begins with declare_order(). PERF: a predicate for all, which ptxas would find anew each time else.
JALI_DEVICE void keep_order() { asm volatile("@never pmevent 0;" ::: "memory"); }
JALI_DEVICE void declare_order() {
  asm volatile(".reg .pred never;\nsetp.eq.u32 never, %0, 0;" ::"r"(num_blocks()) : "memory");
}

/// Keeps the work that makes x before the next wait: a store under a condition that never holds.
/// PERF: without it ptxas moves exponentials behind the wait for the tensor cores (-5 %).
JALI_DEVICE void pin(float x, u32 shared) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.gt.f32 p, %0, 0f7f800000;\n@p st.shared.b32 [%1], %1;\n}" ::"f"(x),
      "r"(shared)
      : "memory");
}

/// The same of a word; the condition is that the address were negative.
JALI_DEVICE void pin(u32 x, u32 shared) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %1, 0;\n@p st.shared.b32 [%1], %0;\n}" ::"r"(x),
               "r"(shared)
               : "memory");
}

/// Keeps later loads behind the work that makes x, by a store under a condition that never holds.
/// PERF: ptxas loads for a whole tile at once else, and spills.
JALI_DEVICE void hold_loads(float x, void* anywhere) {
  asm volatile("{\n.reg .pred p;\nsetp.gt.f32 p, %0, 0f7f800000;\n@p st.f32 [%1], %0;\n}" ::"f"(x),
               "l"(anywhere)
               : "memory");
}

}  // namespace jali::ptx
