// What a kernel needs to evaluate a predicate, here (i // n == j // n and ids[j] >= 0) or
// (weight[i] * 0.5 < 1 and (i - j) % step == 0), as one cell and over a block by intervals.
#include "mask/leaf.h"
#include "mask/predicate/interval.h"

using namespace jali;
using namespace jali::predicate;

struct Predicate {
  i32 n;
  i64 step;
  TableOf<i32, 1> ids;
  TableOf<float, 1> weight;

  JALI_HD bool visible(i32 i, i32 j) const {
    const bool chunk = quotient(i, n) == quotient(j, n) && ids.at(i64(j)) >= 0;
    const bool strided =
        mul(weight.at(i64(i)), 0.5f) < 1.0f && remainder(sub(i64(i), i64(j)), step) == 0;
    return chunk || strided;
  }
  JALI_HD Tile classify(Interval i, Interval j, Interval id, FloatInterval w) const {
    const Interval chunk =
        both(equal(quotient(i, point(n)), quotient(j, point(n))), less_equal(point(0), id));
    const Affine distance = add(Affine{1, 1, 0, 0}, scale(Affine{1, 0, 1, 0}, -1));
    const Interval strided =
        both(less(mul(w, float_point(0.5f)), float_point(1.0f)),
             equal(remainder(range_of(distance, i, j), point(step)), point(0)));
    const Interval result = either(chunk, strided);
    return tile_of(result.hi == 0, result.lo == 1);
  }
};

extern "C" __global__ void probe(const __grid_constant__ Predicate mask, Interval id,
                                 FloatInterval w, u8* cells, u8* classes) {
  const i32 i = blockIdx.x, j = threadIdx.x;
  cells[i * blockDim.x + j] = mask.visible(i, j);
  classes[i * blockDim.x + j] =
      static_cast<u8>(mask.classify({64 * i, 64 * i + 63}, {64 * j, 64 * j + 63}, id, w));
}
