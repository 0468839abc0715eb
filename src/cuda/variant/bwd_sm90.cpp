// The backward kernel of bwd_sm90.cuh: tiles of 128 keys.
#include "cuda/variant/bwd_sm90.cuh"

#include "cuda/backward_launch.h"

namespace jali::cuda {
namespace {

class BackwardSm90 final : public BackwardSm90Launch {
  const char* kernel() const override { return "Backward"; }
  const char* file() const override { return "bwd_sm90"; }
  bool fits_dims(i32 D, i32 Dv) const override { return backward_fits(D, Dv); }
  bool fits_options(i32, i32, const ScoreOptions& options, const BiasGradients& wanted,
                    bool) const override {
    return backward_fits_options(options, wanted);
  }
  BackwardTile tile(i32 D, i32 Dv, const ScoreOptions& options, bool deterministic) const override {
    return backward_tile(D, Dv, options, deterministic);
  }
  bool scales_keys(const ScoreOptions& options, DType type) const override {
    return backward_scales_keys(options, type == DType::kBF16);
  }
  bool tells_by_differences(i32 D, i32 Dv, const ScoreOptions& options,
                            bool deterministic) const override {
    return backward_tells_by_differences(D, Dv, options, deterministic);
  }
  double cost() const override { return 1; }
};

}  // namespace

const BackwardVariant& bwd_sm90() {
  static const BackwardSm90 variant;
  return variant;
}

}  // namespace jali::cuda
