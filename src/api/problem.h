// The arguments of one attention call, checked and brought into the form that backends take.
#pragma once

#include <jali/jali.h>

#include <memory>
#include <optional>

#include "backend/backend.h"

namespace jali {

/// The documents that a GPU kernel works on one by one, where it may: the mask becomes what is left. None
/// where documents are too short; backward: see CheckedProblem.
std::optional<TokenTable<i32>> take_documents(BoundMask& mask, bool backward);

class CheckedProblem {
 public:
  /// Throws Error on the first wrong argument. Binds and summarises the mask. backward: it is that of a
  /// backward pass, or of a forward pass with one to come.
  CheckedProblem(const TensorView& q, const TensorView& k, const TensorView& v, const Mask& mask,
                 const AttentionOptions& options, bool backward = false);
  CheckedProblem(const CheckedProblem&) = delete;
  CheckedProblem& operator=(const CheckedProblem&) = delete;

  const AttentionProblem& problem() const { return problem_; }
  /// A tensor of q's shape with `width` elements per head: out, dout, dq.
  HeadView output_view(const char* name, const TensorView& t, i32 width) const;
  /// [B, Hq, Lq] (varlen [Hq, Tq]) in fp32, fp64 for fp64 problems; may be absent.
  HeadView lse_view(const char* name, const TensorView& t) const;
  BackwardViews grad_views(const AttentionGrads& grads) const;
  /// Those of bias, key_bias and sinks alone.
  BackwardViews bias_grad_views(const AttentionGrads& grads) const;

 private:
  HeadView tokens_view(const char* name, const TensorView& t, i64 heads, i64 tokens, i64 width,
                       DType dtype) const;
  CellView bias_view(const char* name, const TensorView& t) const;
  HeadView key_bias_view(const char* name, const TensorView& t) const;
  HeadView sinks_view(const char* name, const TensorView& t) const;
  void check_place(const char* name, const TensorView& t) const;
  void check_bias_dtype(const char* name, const TensorView& t) const;
  i32 head_divisor(const char* name, const TensorView& t, i64 heads) const;
  void check_like(const char* name, const TensorView& grad, const TensorView& of) const;

  AttentionProblem problem_;
  std::unique_ptr<BoundMask> mask_;
  TensorView q_, k_, v_;
  const AttentionOptions& options_;
};

}  // namespace jali
