// The backward kernel of bwd_sm90_pair.cuh: tiles of 128 keys that two blocks share.
#include "cuda/variant/bwd_sm90_pair.cuh"

#include "cuda/backward_launch.h"

namespace jali::cuda {
namespace {

class BackwardSm90Pair final : public BackwardSm90Launch {
  const char* kernel() const override { return "BackwardPair"; }
  const char* file() const override { return "bwd_sm90_pair"; }
  bool fits_dims(i32 D, i32 Dv) const override { return backward_pair_fits(D, Dv); }
  // PERF: softcap beside the gradient of a key bias spills under some masks.
  bool fits_options(i32 D, i32 Dv, const ScoreOptions& options, const BiasGradients& wanted,
                    bool) const override {
    return !(D > 192 && Dv > 192 && options.softcap && wanted.keys);
  }
  BackwardTile tile(i32 D, i32 Dv, const ScoreOptions&, bool) const override {
    return backward_pair_tile(D, Dv);
  }
  double cost() const override { return 1.5; }
};

}  // namespace

const BackwardVariant& bwd_sm90_pair() {
  static const BackwardSm90Pair variant;
  return variant;
}

}  // namespace jali::cuda
