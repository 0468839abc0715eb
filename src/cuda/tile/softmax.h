// The online softmax of a warpgroup's 64 x N tile of scores; a thread holds two rows of it.
#pragma once

#include "cuda/ptx/wgmma.h"

namespace jali::tile {

/// Running state of a thread's two rows (e = 0, 1), equal in the four lanes that share a row; `sum`
/// is each lane's own part.
struct RowState {
  float max[2];  // of the raw scores, or up to kSlack less; -infinity while nothing was seen
  float sum[2];

  /// Whether a row of the warp has seen nothing.
  JALI_DEVICE bool any_new() const {
    return __any_sync(0xffffffffu, (max[0] == -ptx::infinity()) | (max[1] == -ptx::infinity()));
  }
  /// Forgets all if the rows begin.
  JALI_DEVICE void begin_if(bool condition) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      if (condition) max[e] = -ptx::infinity();
      if (condition) sum[e] = 0;
    }
  }
};

/// Weights may be up to 2^slack times too large until their row ends: the maximum follows only when it
/// is that far behind, so that sums and outputs are seldom rescaled (as FlashAttention-4 does).
constexpr float kSlack = 8;

/// Takes the maximum of row e's scores into the state. `shift` is what exp2(s · scale - shift)
/// subtracts, `rescale` what earlier sums and outputs are multiplied by, mostly 1. kHides: a row may have
/// seen nothing; it gets shift 0, so that no infinities are subtracted. kAdds: `added` belongs to every
/// score of its row.
template <i32 e, bool kHides, bool kAdds, i32 kScores>
JALI_DEVICE void take_maximum(const float (&s)[kScores], const float (&added)[2], float scale,
                              float slack, RowState& state, float (&shift)[2],
                              float (&rescale)[2]) {
  using namespace ptx;
  float even = maximum(s[2 * e], s[2 * e + 1]), odd = maximum(s[4 + 2 * e], s[5 + 2 * e]);
#pragma unroll
  for (i32 j = 2; j < kScores / 4; ++j) {  // two chains: half the latency
    const float pair = maximum(s[4 * j + 2 * e], s[4 * j + 2 * e + 1]);
    if (j & 1) {
      odd = maximum(odd, pair);
    } else {
      even = maximum(even, pair);
    }
  }
  float top = maximum(even, odd);
  if constexpr (kAdds) top += added[e];
  top = maximum(top, state.max[e]);
  top = maximum(top, shuffle_xor(top, 1));
  top = maximum(top, shuffle_xor(top, 2));
  const bool keeps = (top - state.max[e]) * scale <= slack;
  if (keeps) top = state.max[e];
  shift[e] = (kHides && top == -infinity() ? 0.0f : top) * scale;
  rescale[e] = keeps ? 1.0f : exp2_fast(__fmaf_rn(state.max[e], scale, -shift[e]));
  if constexpr (kAdds) shift[e] = __fmaf_rn(-added[e], scale, shift[e]);
  state.max[e] = top;
}

/// Where maxima are not looked for, what a lane's sum of a row's weights may be: at most kMost, or weights, and
/// outputs, come too near the end of their numbers; at most kRoom, or maxima are raised.
template <class T>
constexpr float kMost = 0x1p64f;
template <>
inline constexpr float kMost<ptx::FP16> = 0x1p15f;
constexpr float kRoom = 0x1p10f;
/// The slack of maxima that are taken there: by these, sums are within kRoom.
constexpr float kSmallSlack = 4;

/// Scores of row e to weights exp2(s · scale - shift), for blocks [kBegin, kEnd) of 8 columns; adds
/// them. kPolynomials: so many of eight come from polynomials.
template <i32 e, i32 kBegin, i32 kEnd, i32 kPolynomials, i32 kScores>
JALI_DEVICE void exponentials(float (&s)[kScores], float scale, const float (&shift)[2],
                              float (&total)[4]) {
#pragma unroll
  for (i32 j = kBegin; j < kEnd; ++j) {
#pragma unroll
    for (i32 x = 0; x < 2; ++x) {
      float& at = s[4 * j + 2 * e + x];
      at = __fmaf_rn(at, scale, -shift[e]);
      at = (2 * j + x) * kPolynomials % 8 + kPolynomials >= 8 ? ptx::exp2_polynomial(at)
                                                              : ptx::exp2_fast(at);
      total[2 * e + x] += at;
    }
  }
}

/// What is computed for a cell comes so many cells before its exponential; what needs that, so many behind it.
/// PERF: ptxas computes what exponentials take as if an instruction took a cycle each. Beside the tensor cores it takes
/// more, so that their unit idles first, and all else later. In this order it never does.
constexpr i32 kAhead = 4, kBehind = 4;

/// prepare(n) of each cell, and kAhead cells behind it exponential(n), which goes on for kMore cells; ptxas may mix
/// kTogether of them.
template <i32 kCells, i32 kTogether, i32 kMore, class Prepare, class Exponential>
JALI_DEVICE void in_order(Prepare prepare, Exponential exponential) {
#pragma unroll
  for (i32 n = 0; n < kAhead; ++n) prepare(n);
#pragma unroll
  for (i32 n = 0; n < kCells + kMore; ++n) {
    if (n % kTogether == 0) ptx::keep_order();
    if (n + kAhead < kCells) prepare(n + kAhead);
    exponential(n);
  }
}

/// Cells of two rows, the first row's first: scores to weights exp2(argument(e, score)), and their sums. Beside
/// exponential n beside(n), for n up to all cells and kBehind more; between the rows finish(), which may wait.
template <i32 kTogether, i32 kScores, class Argument, class Beside, class Finish>
JALI_DEVICE void weigh_in_order(float (&s)[kScores], float (&total)[4], Argument argument,
                                Beside beside, Finish finish) {
  constexpr i32 kOfRow = kScores / 2;
  auto cell = [&](i32 n) -> float& { return s[n % kOfRow / 2 * 4 + 2 * (n / kOfRow) + n % 2]; };
  in_order<kScores, kTogether, kBehind>(
      [&](i32 n) {
        if (n == kOfRow + kAhead) finish();  // all exponentials of the first row are before it
        cell(n) = argument(n / kOfRow, cell(n));
      },
      [&](i32 n) {
        if (n < kScores) cell(n) = ptx::exp2_fast(cell(n));
        if (n >= kBehind) {
          const i32 last = n - kBehind;
          total[last / kOfRow * 2 + last % 2] += cell(last);
        }
        beside(n);
      });
}

JALI_DEVICE void add_sums(RowState& state, const float (&rescale)[2], const float (&total)[4]) {
#pragma unroll
  for (i32 e = 0; e < 2; ++e) {
    const float sum = total[2 * e] + total[2 * e + 1];
    state.sum[e] = __fmaf_rn(state.sum[e], rescale[e], sum);
  }
}

}  // namespace jali::tile
