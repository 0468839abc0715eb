// Interval arithmetic: what a value can be while rows and keys run over a block. Sound, never
// sampled: the true values always lie inside. In the subset that kernels compile too.
#pragma once

#include "mask/predicate/ops.h"

namespace jali::predicate {

constexpr i64 kMaxInt = 0x7fffffffffffffffll;
constexpr i64 kMinInt = -kMaxInt - 1;

/// Inclusive; bools are 0 and 1. Integers that may wrap are unbounded.
struct Interval {
  i64 lo, hi;
  JALI_HD bool one() const { return lo == hi; }
  JALI_HD bool has(i64 x) const { return lo <= x && x <= hi; }
};
JALI_HD constexpr Interval unbounded() { return {kMinInt, kMaxInt}; }
JALI_HD constexpr Interval maybe() { return {0, 1}; }
JALI_HD Interval point(i64 x) { return {x, x}; }
JALI_HD Interval truth(bool surely, bool possibly) { return {surely, possibly}; }
JALI_HD Interval hull(Interval a, Interval b) { return {min_of(a.lo, b.lo), max_of(a.hi, b.hi)}; }
/// Of two true statements about one value.
JALI_HD Interval meet(Interval a, Interval b) { return {max_of(a.lo, b.lo), min_of(a.hi, b.hi)}; }

// Each tells whether the exact result fits.
JALI_HD bool add_fits(i64 a, i64 b, i64& out) {
  out = add(a, b);
  return ((a ^ out) & (b ^ out)) >= 0;
}
JALI_HD bool sub_fits(i64 a, i64 b, i64& out) {
  out = sub(a, b);
  return ((a ^ b) & (a ^ out)) >= 0;
}
JALI_HD bool mul_fits(i64 a, i64 b, i64& out) {
  out = mul(a, b);
  if (a == static_cast<i32>(a) && b == static_cast<i32>(b)) return true;
  if (a == 0 || b == 0) return true;
  if ((a == -1 && b == kMinInt) || (b == -1 && a == kMinInt)) return false;
  return out / b == a;
}

JALI_HD Interval negate(Interval a) {
  return a.lo == kMinInt ? unbounded() : Interval{-a.hi, -a.lo};
}
JALI_HD Interval add(Interval a, Interval b) {
  Interval x;
  return add_fits(a.lo, b.lo, x.lo) && add_fits(a.hi, b.hi, x.hi) ? x : unbounded();
}
JALI_HD Interval sub(Interval a, Interval b) {
  if (b.lo == kMinInt) return unbounded();
  return add(a, negate(b));
}
JALI_HD Interval mul(Interval a, Interval b) {
  i64 p, q, r, s;
  if (!mul_fits(a.lo, b.lo, p) || !mul_fits(a.lo, b.hi, q) || !mul_fits(a.hi, b.lo, r) ||
      !mul_fits(a.hi, b.hi, s)) {
    return unbounded();
  }
  return {min_of(min_of(p, q), min_of(r, s)), max_of(max_of(p, q), max_of(r, s))};
}
JALI_HD Interval absolute(Interval a) {
  if (a.lo >= 0) return a;
  if (a.lo == kMinInt) return unbounded();
  return a.hi <= 0 ? negate(a) : Interval{0, max_of(-a.lo, a.hi)};
}
JALI_HD Interval minimum(Interval a, Interval b) {
  return {min_of(a.lo, b.lo), min_of(a.hi, b.hi)};
}
JALI_HD Interval maximum(Interval a, Interval b) {
  return {max_of(a.lo, b.lo), max_of(a.hi, b.hi)};
}
/// Of a divisor that keeps one sign: monotone in both, so the corners bound it.
JALI_HD Interval quotient_by_signed(Interval a, Interval b) {
  if (a.lo == kMinInt && b.has(-1)) return unbounded();
  const i64 p = quotient(a.lo, b.lo), q = quotient(a.lo, b.hi);
  const i64 r = quotient(a.hi, b.lo), s = quotient(a.hi, b.hi);
  return {min_of(min_of(p, q), min_of(r, s)), max_of(max_of(p, q), max_of(r, s))};
}
JALI_HD Interval quotient(Interval a, Interval b) {
  if (!b.has(0)) return quotient_by_signed(a, b);
  Interval x = point(0);
  if (b.lo < 0) x = hull(x, quotient_by_signed(a, {b.lo, -1}));
  if (b.hi > 0) x = hull(x, quotient_by_signed(a, {1, b.hi}));
  return x;
}
JALI_HD Interval remainder(Interval a, Interval b) {
  // Within one period of one divisor it is a shift.
  if (b.one() && b.lo != 0 && b.lo != -1 && quotient(a.lo, b.lo) == quotient(a.hi, b.lo)) {
    return {remainder(a.lo, b.lo), remainder(a.hi, b.lo)};
  }
  if (b.lo > 0 && a.lo >= 0 && a.hi < b.lo) return a;
  Interval x = {b.lo < 0 ? min_of<i64>(b.lo + 1, 0) : 0, b.hi > 0 ? b.hi - 1 : 0};
  if (b.lo >= 0 && a.lo >= 0) x.hi = min_of(x.hi, a.hi);
  return x;
}
JALI_HD Interval shift_left(Interval a, Interval n) {
  Interval x = point(0);
  const Interval in = meet(n, {0, 62});
  if (n.has(63)) return unbounded();
  if (in.lo > in.hi) return x;
  const Interval y = mul(a, {i64{1} << in.lo, i64{1} << in.hi});
  return n.lo >= 0 && n.hi <= 62 ? y : hull(x, y);
}
JALI_HD Interval shift_right(Interval a, Interval n) {
  const bool outside = n.lo < 0 || n.hi > 63;
  const i64 low = outside ? 63 : n.lo, high = outside ? 63 : n.hi;
  Interval x = hull({a.lo >> low, a.hi >> low}, {a.lo >> high, a.hi >> high});
  const Interval in = meet(n, {0, 63});
  return outside && in.lo <= in.hi
             ? hull(x, {min_of(a.lo, a.lo >> in.lo), max_of(a.hi >> in.lo, x.hi)})
             : x;
}

/// All numbers with as many bits as x (x >= 0).
JALI_HD i64 ones(i64 x) {
  for (int n = 1; n < 64; n *= 2) x |= x >> n;
  return x;
}
/// What any bitwise combination can reach: the numbers of as many bits.
JALI_HD Interval same_bits(Interval a, Interval b) {
  const Interval x = hull(a, b);
  const i64 top = ones(max_of(x.hi < 0 ? ~x.hi : x.hi, x.lo < 0 ? ~x.lo : x.lo));
  return {x.lo < 0 ? ~top : 0, top};
}
JALI_HD Interval bit_not(Interval a) { return {~a.hi, ~a.lo}; }
JALI_HD Interval bit_and(Interval a, Interval b) {
  if (a.one() && b.one()) return point(a.lo & b.lo);
  Interval x = same_bits(a, b);
  if (a.lo >= 0) x = {0, min_of(x.hi, a.hi)};
  if (b.lo >= 0) x = {0, min_of(x.hi, b.hi)};
  // x & (2^k - 1) is x mod 2^k.
  if (b.one() && b.lo >= 0 && b.lo < kMaxInt && (b.lo & (b.lo + 1)) == 0) {
    return meet(x, remainder(a, point(b.lo + 1)));
  }
  if (a.one() && a.lo >= 0 && a.lo < kMaxInt && (a.lo & (a.lo + 1)) == 0) {
    return meet(x, remainder(b, point(a.lo + 1)));
  }
  return x;
}
JALI_HD Interval bit_or(Interval a, Interval b) {
  if (a.one() && b.one()) return point(a.lo | b.lo);
  Interval x = same_bits(a, b);
  if (a.lo >= 0 && b.lo >= 0) x.lo = max_of(a.lo, b.lo);
  return x;
}
JALI_HD Interval bit_xor(Interval a, Interval b) {
  if (a.one() && b.one()) return point(a.lo ^ b.lo);
  return same_bits(a, b);
}

// Three-valued truth.
JALI_HD Interval both(Interval a, Interval b) { return {a.lo & b.lo, a.hi & b.hi}; }
JALI_HD Interval either(Interval a, Interval b) { return {a.lo | b.lo, a.hi | b.hi}; }
JALI_HD Interval invert(Interval a) { return {1 - a.hi, 1 - a.lo}; }
JALI_HD Interval less(Interval a, Interval b) { return truth(a.hi < b.lo, a.lo < b.hi); }
JALI_HD Interval less_equal(Interval a, Interval b) { return truth(a.hi <= b.lo, a.lo <= b.hi); }
JALI_HD Interval equal(Interval a, Interval b) {
  return truth(a.one() && b.one() && a.lo == b.lo, a.lo <= b.hi && b.lo <= a.hi);
}
JALI_HD Interval differ(Interval a, Interval b) { return invert(equal(a, b)); }
JALI_HD Interval nonzero(Interval a) { return differ(a, point(0)); }
JALI_HD Interval choose(Interval c, Interval a, Interval b) {
  return c.one() ? (c.lo ? a : b) : hull(a, b);
}

/// Floats: every value lies in [lo, hi] or, if `nan`, is NaN. Rounding is monotone, so rounded
/// bounds bound the rounded results.
struct FloatInterval {
  float lo, hi;
  i32 nan;
};
JALI_HD float infinity() {
#if defined(__CUDACC_RTC__)
  return __int_as_float(0x7f800000);
#else
  return __builtin_inff();
#endif
}
JALI_HD FloatInterval any_float() { return {-infinity(), infinity(), 1}; }
JALI_HD FloatInterval float_point(float x) { return x == x ? FloatInterval{x, x, 0} : any_float(); }
JALI_HD FloatInterval hull(FloatInterval a, FloatInterval b) {
  return {min_of(a.lo, b.lo), max_of(a.hi, b.hi), a.nan | b.nan};
}
/// To collect the values of a block: start with nothing, widen by each, settle what all were NaN.
JALI_HD constexpr Interval nothing() { return {kMaxInt, kMinInt}; }
JALI_HD FloatInterval no_float() { return {infinity(), -infinity(), 0}; }
JALI_HD Interval widen(Interval a, i64 x) { return {min_of(a.lo, x), max_of(a.hi, x)}; }
JALI_HD FloatInterval widen(FloatInterval a, float x) {
  return {x < a.lo ? x : a.lo, x > a.hi ? x : a.hi, a.nan | (x != x)};
}
JALI_HD FloatInterval settled(FloatInterval a) { return a.lo <= a.hi ? a : any_float(); }
JALI_HD bool endless(FloatInterval a) { return a.lo == -infinity() || a.hi == infinity(); }
JALI_HD FloatInterval negate(FloatInterval a) { return {-a.hi, -a.lo, a.nan}; }
JALI_HD FloatInterval add(FloatInterval a, FloatInterval b) {
  if (endless(a) && endless(b)) return any_float();  // inf - inf
  return {add(a.lo, b.lo), add(a.hi, b.hi), a.nan | b.nan};
}
JALI_HD FloatInterval sub(FloatInterval a, FloatInterval b) { return add(a, negate(b)); }
JALI_HD FloatInterval mul(FloatInterval a, FloatInterval b) {
  if (endless(a) || endless(b)) return any_float();  // 0 * inf
  const float p = mul(a.lo, b.lo), q = mul(a.lo, b.hi), r = mul(a.hi, b.lo), s = mul(a.hi, b.hi);
  return {min_of(min_of(p, q), min_of(r, s)), max_of(max_of(p, q), max_of(r, s)), a.nan | b.nan};
}
JALI_HD FloatInterval absolute(FloatInterval a) {
  if (a.lo >= 0) return a;
  return {a.hi <= 0 ? -a.hi : 0.0f, max_of(-a.lo, a.hi), a.nan};
}
JALI_HD FloatInterval minimum(FloatInterval a, FloatInterval b) {
  return {min_of(a.lo, b.lo), min_of(a.hi, b.hi), a.nan | b.nan};
}
JALI_HD FloatInterval maximum(FloatInterval a, FloatInterval b) {
  return {max_of(a.lo, b.lo), max_of(a.hi, b.hi), a.nan | b.nan};
}
JALI_HD FloatInterval choose(Interval c, FloatInterval a, FloatInterval b) {
  return c.one() ? (c.lo ? a : b) : hull(a, b);
}
JALI_HD Interval less(FloatInterval a, FloatInterval b) {
  return truth(a.hi < b.lo && !(a.nan | b.nan), a.lo < b.hi);
}
JALI_HD Interval less_equal(FloatInterval a, FloatInterval b) {
  return truth(a.hi <= b.lo && !(a.nan | b.nan), a.lo <= b.hi);
}
JALI_HD Interval equal(FloatInterval a, FloatInterval b) {
  const bool one = a.lo == a.hi && b.lo == b.hi && a.lo == b.lo && !(a.nan | b.nan);
  return truth(one, a.lo <= b.hi && b.lo <= a.hi);
}
JALI_HD Interval differ(FloatInterval a, FloatInterval b) { return invert(equal(a, b)); }
JALI_HD Interval nonzero(FloatInterval a) { return differ(a, float_point(0)); }
JALI_HD Interval int_of(FloatInterval a) {
  const Interval x = {to_int<i64>(a.lo), to_int<i64>(a.hi)};
  return a.nan ? hull(x, point(0)) : x;
}
JALI_HD FloatInterval float_of(Interval a) {
  return {static_cast<float>(a.lo), static_cast<float>(a.hi), 0};
}

/// A value that is row * i + key * j + rest, kept exact, so that what cancels does cancel.
struct Affine {
  i32 known;
  i64 row, key, rest;
};
JALI_HD Affine not_affine() { return {0, 0, 0, 0}; }
JALI_HD Affine add(Affine a, Affine b) {
  Affine x = {a.known & b.known, 0, 0, 0};
  if (!(add_fits(a.row, b.row, x.row) && add_fits(a.key, b.key, x.key) &&
        add_fits(a.rest, b.rest, x.rest))) {
    x.known = 0;
  }
  return x;
}
JALI_HD Affine sub(Affine a, Affine b) {
  Affine x = {a.known & b.known, 0, 0, 0};
  if (!(sub_fits(a.row, b.row, x.row) && sub_fits(a.key, b.key, x.key) &&
        sub_fits(a.rest, b.rest, x.rest))) {
    x.known = 0;
  }
  return x;
}
/// Whether both change with the row, or with the key: only then does it matter that their sum or
/// difference is known exactly.
JALI_HD bool share(Affine a, Affine b) {
  return a.known && b.known && ((a.row && b.row) || (a.key && b.key));
}
JALI_HD Affine scale(Affine a, i64 factor) {
  Affine x = {a.known, 0, 0, 0};
  if (!(mul_fits(a.row, factor, x.row) && mul_fits(a.key, factor, x.key) &&
        mul_fits(a.rest, factor, x.rest))) {
    x.known = 0;
  }
  return x;
}
JALI_HD Interval range_of(Affine a, Interval rows, Interval keys) {
  return add(add(mul(rows, point(a.row)), mul(keys, point(a.key))), point(a.rest));
}

}  // namespace jali::predicate
