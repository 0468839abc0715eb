// What a kernel variant is: it says whether and at what cost it runs a problem on a GPU, and runs it.
// src/cuda/variant/fwd_<name>.cpp (bwd_<name>.cpp) defines the function fwd_<name>(), beside the
// device code in <name>.cuh; the build lists them, nobody else names them.
#pragma once

#include "cuda/call.h"

namespace jali::cuda {

/// Why no kernel for sm_90a runs a problem, whatever its dims and options; empty: one may.
inline std::string sm90_refusal(const AttentionProblem& problem, const DeviceInfo& device) {
  if (device.major != 9) {
    return "the kernels for sm_90a need a Hopper GPU (H100, H200), this is " + device.name;
  }
  if (problem.Hq > kMostHeads) {
    return "the kernels for sm_90a take up to 2^20 query heads; move some to the batch";
  }
  return "";
}

/// The same where JALI_FORCE asks for tiles that are classified as they come, but a kernel needs a map.
inline std::string map_refusal(const AttentionProblem& problem, bool needs_map) {
  if (!needs_map || problem.forced_source != TileSource::kInline) return "";
  return "JALI_FORCE=inline asks for tiles that are classified as they come, but those of this "
         "mask "
         "or call are looked up in a map; unset it";
}

/// What kernels are compiled for in place of a head dim.
inline i32 kernel_dim(i32 dim) { return ceil_div(dim, 16) * 16; }

/// A sequence of so many rows and keys, as far as numbers say: for masks of numbers_alone().
inline Frame frame_of(const AttentionProblem& problem, i64 rows, i64 keys) {
  Frame f;
  f.num_rows = static_cast<i32>(min_of<i64>(rows, kFar));
  f.num_keys = static_cast<i32>(min_of<i64>(keys, kFar));
  const IntParam& offset = problem.mask->shape().q_offset;
  const bool given = offset.tag == IntParam::Tag::kNumber;
  f.q_offset = given ? static_cast<i32>(offset.number) : f.num_keys - f.num_rows;
  return f;
}

class ForwardVariant {
 public:
  virtual ~ForwardVariant() = default;
  virtual Fit fits(const AttentionProblem& problem, const DeviceInfo& device) const = 0;
  virtual TileShape tile(const AttentionProblem& problem) const = 0;
  virtual TileSource source(const AttentionProblem& problem) const = 0;
  /// All modules that run() may need, the attention kernel's first.
  virtual std::vector<KernelText> texts(const AttentionProblem& problem) const = 0;
  /// And those that it may need for problems of other lengths, and for masks of other widths.
  virtual std::vector<KernelText> texts_of_any_length(const AttentionProblem& problem) const = 0;
  /// lse may be absent.
  virtual void run(Call& call, const HeadView& out, const HeadView& lse) const = 0;
};

class BackwardVariant {
 public:
  virtual ~BackwardVariant() = default;
  virtual Fit fits(const AttentionProblem& problem, const BackwardViews& grads,
                   const DeviceInfo& device) const = 0;
  virtual std::vector<KernelText> texts(const AttentionProblem& problem,
                                        const BackwardViews& grads) const = 0;
  virtual void run(Call& call, const HeadView& out, const HeadView& lse, const HeadView& dout,
                   const HeadView& dlse, const BackwardViews& grads) const = 0;
};

}  // namespace jali::cuda
