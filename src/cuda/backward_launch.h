// What the backward variants for sm_90a share on the host: checks, scratch memory, launches.
#pragma once

#include "cuda/kernel/backward.h"
#include "cuda/variant.h"

namespace jali::cuda {

/// A variant names its kernel; the rest is the same for all.
class BackwardSm90Launch : public BackwardVariant {
 public:
  Fit fits(const AttentionProblem& problem, const BackwardViews& grads,
           const DeviceInfo& device) const override;
  std::vector<KernelText> texts(const AttentionProblem& problem,
                                const BackwardViews& grads) const override;
  void run(Call& call, const HeadView& out, const HeadView& lse, const HeadView& dout,
           const HeadView& dlse, const BackwardViews& grads) const override;

 private:
  KernelText text(const AttentionProblem& problem, const BackwardViews& grads) const;
  /// The struct template in src/cuda/variant/<file>.cuh.
  virtual const char* kernel() const = 0;
  virtual const char* file() const = 0;
  /// Of the kernel's head dims, multiples of 16.
  virtual bool fits_dims(i32 D, i32 Dv) const = 0;
  /// Whether it also has the registers for these, at dims that fit.
  virtual bool fits_options(i32 D, i32 Dv, const ScoreOptions& options, const BiasGradients& wanted,
                            bool deterministic) const = 0;
  virtual BackwardTile tile(i32 D, i32 Dv, const ScoreOptions& options,
                            bool deterministic) const = 0;
  /// Whether the kernel multiplies K by LowScores::k_factors.
  virtual bool scales_keys(const ScoreOptions&, DType) const { return false; }
  /// Whether the kernel tells by differences of floats what dropout keeps, where ScoreOptions::saturates.
  virtual bool tells_by_differences(i32, i32, const ScoreOptions&, bool) const { return false; }
  /// Relative to others that fit, too.
  virtual double cost() const = 0;
};

}  // namespace jali::cuda
