// The backward kernel of bwd_sm90_wide.cuh: tiles of 64 keys.
#include "cuda/variant/bwd_sm90_wide.cuh"

#include "cuda/backward_launch.h"

namespace jali::cuda {
namespace {

class BackwardSm90Wide final : public BackwardSm90Launch {
  const char* kernel() const override { return "BackwardWide"; }
  const char* file() const override { return "bwd_sm90_wide"; }
  bool fits_dims(i32 D, i32 Dv) const override { return backward_wide_fits(D, Dv); }
  bool fits_options(i32, i32, const ScoreOptions&, const BiasGradients&, bool) const override {
    return true;
  }
  BackwardTile tile(i32 D, i32 Dv, const ScoreOptions&, bool) const override {
    return backward_wide_tile(D, Dv);
  }
  double cost() const override { return 2; }
};

}  // namespace

const BackwardVariant& bwd_sm90_wide() {
  static const BackwardSm90Wide variant;
  return variant;
}

}  // namespace jali::cuda
