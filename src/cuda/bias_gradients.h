// The gradients of biases and sinks on the host: what a kernel is compiled for, the memory of the
// sums, and the launches before and after the main kernel.
#pragma once

#include <string>

#include "cuda/call.h"
#include "cuda/kernel/backward_sums.h"

namespace jali::cuda {

BiasGradients bias_gradients(const AttentionProblem& problem, const BackwardViews& grads);
/// As a C++ expression.
std::string text_of(const BiasGradients& wanted);
/// Whether the order of the additions to every cell is the same every time.
bool cells_in_order(const AttentionProblem& problem, const BackwardViews& grads);
/// The kernels that finish the gradients, for q's type as a C++ expression.
std::string bias_gradient_kernels(const std::string& type);

class BiasGradientSums {
 public:
  /// Allocates the sums and tells the kernels' arguments of them, which must be complete else.
  BiasGradientSums(Call& call, const BackwardViews& grads, BackwardArgs& a);
  /// Clears what the main kernel adds to or does not visit.
  void begin(const KernelText& module) const;
  void finish(const KernelText& module) const;

 private:
  TokenGradient token_gradient(const TokenSums& sums, const HeadView& to, i32 num_b,
                               i32 num_l) const;
  void sum(const KernelText& module, const TokenGradient& gradient) const;
  /// Whether the main kernel stores a gradient for every cell.
  bool visits_all() const;
  void write_cells(const KernelText& module, const float* sums) const;

  Call& call_;
  const AttentionProblem& p_;
  const BackwardViews& grads_;
  const BiasGradients wanted_;
  const BackwardArgs& a_;
};

}  // namespace jali::cuda
