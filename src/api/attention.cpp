// check → plan → choose → run: the functions of jali.h that compute attention.
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "api/problem.h"
#include "backend/backend.h"
#include "base/error.h"
#include "base/tensor.h"
#include "plan/tiles.h"

namespace jali {
namespace {

const Backend& choose(const AttentionProblem& problem) {
  const Backend* best = nullptr;
  double cost = std::numeric_limits<double>::infinity();
  for (const Backend* backend : all_backends()) {
    if (backend->device() != problem.device) continue;
    const Fit fit = backend->fits(problem);
    if (fit.ok && fit.cost < cost) {
      best = backend;
      cost = fit.cost;
    }
  }
  if (best) return *best;
  std::string reasons;
  for (const Backend* backend : all_backends()) {
    reasons += std::string("\n  ") + backend->name() + ": " + backend->fits(problem).reason;
  }
  unsupported("no backend can run this attention:", reasons);
}

void clear(const TensorView& t, int dim = 0, i64 at = 0) {
  if (dim == t.rank) {
    std::memset(data_of<char>(t) + at * dtype_bytes(t.dtype), 0, dtype_bytes(t.dtype));
    return;
  }
  for (i64 n = 0; n < t.shape[dim]; ++n) clear(t, dim + 1, at + n * t.stride[dim]);
}

}  // namespace

void attention_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                       const Mask& mask, const AttentionOptions& options, const TensorView& out,
                       const TensorView& lse) {
  const CheckedProblem call(q, k, v, mask, options);
  const HeadView to = call.output_view("out", out, call.problem().Dv);
  const HeadView to_lse = call.lse_view("lse", lse);
  choose(call.problem()).forward(call.problem(), to, to_lse);
}

void attention_backward(const TensorView& q, const TensorView& k, const TensorView& v,
                        const TensorView& out, const TensorView& lse, const TensorView& dout,
                        const TensorView& dlse, const Mask& mask, const AttentionOptions& options,
                        const AttentionGrads& grads) {
  const CheckedProblem call(q, k, v, mask, options, true);
  const i32 Dv = call.problem().Dv;
  if (!lse.given()) value_error("attention_backward needs the forward's lse");
  const BackwardViews views = call.grad_views(grads);
  // A padded bias may be longer than the longest sequence, and without any cell there is nothing to
  // sum: no backend visits such elements.
  if (call.problem().device == DeviceType::kCPU) {
    const bool nothing = call.problem().B == 0 || call.problem().Lk == 0;
    if ((nothing || call.problem().varlen) && views.dbias.given()) clear(grads.dbias);
    if (nothing && views.dkey_bias.given()) clear(grads.dkey_bias);
    if (nothing && views.dsinks.given()) clear(grads.dsinks);
  }
  choose(call.problem())
      .backward(call.problem(), call.output_view("out", out, Dv), call.lse_view("lse", lse),
                call.output_view("dout", dout, Dv), call.lse_view("dlse", dlse), views);
}

std::vector<BuiltModule> prebuild(const TensorView& q, const TensorView& k, const TensorView& v,
                                  const Mask& mask, const AttentionOptions& options, bool backward,
                                  const AttentionGrads& grads, const std::string& arch) {
  const CheckedProblem call(q, k, v, mask, options, backward);
  const BackwardViews views = call.bias_grad_views(grads);
  std::vector<BuiltModule> made;
  for (const Backend* backend : all_backends()) {
    if (backend->device() != call.problem().device) continue;
    for (BuiltModule& module : backend->prebuild(call.problem(), backward, views, arch)) {
      made.push_back(std::move(module));
    }
  }
  return made;
}

Explanation explain(const Mask& mask, const Shape& shape, std::int64_t D, std::int64_t Dv,
                    DType dtype, DeviceType device, int device_index) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  BoundMask bound(mask, shape);
  bound.summarize();
  AttentionProblem problem;
  problem.dtype = dtype;
  problem.B = static_cast<i32>(shape.B);
  problem.Hq = static_cast<i32>(shape.Hq);
  problem.Hkv = static_cast<i32>(shape.Hkv);
  problem.Lq = bound.longest_rows();
  problem.Lk = bound.longest_keys();
  problem.D = static_cast<i32>(D);
  problem.Dv = static_cast<i32>(Dv);
  problem.varlen = shape.cu_seqlens_q.given();
  problem.mask = &bound;
  problem.device = device;
  problem.device_index = device_index;
  if (device == DeviceType::kCUDA) problem.forced_source = forced_source();
  if (device == DeviceType::kCUDA && !problem.forces_map()) {
    problem.documents = take_documents(bound, false);
  }
  const Backend& backend = choose(problem);
  const TileShape tile = backend.forward_tile(problem);

  Explanation e;
  e.backend = backend.name();
  const TileSource source = backend.forward_source(problem);
  e.source = source_name(source);
  e.tile_rows = tile.rows;
  e.tile_keys = tile.keys;
  e.plan_bytes = bound.summary_bytes();
  MaskCursor cursor(bound);
  for (i32 b = 0; b < (bound.varies_by_batch() ? bound.num_batches() : 1); ++b) {
    for (i32 h = 0; h < bound.num_mask_heads(); ++h) {
      cursor.set_frame(b, h * (bound.num_heads() / bound.num_mask_heads()));
      e.plan_bytes += static_cast<i64>(key_spans(cursor, tile.rows).size() * sizeof(Span));
    }
  }
  e.plan_seconds = std::chrono::duration<double>(Clock::now() - start).count();
  const TileCounts counts = count_tiles(bound, tile.rows, tile.keys);
  // Of the whole sequences, also where tiles of documents are counted.
  const i64 tiles = shape.B * shape.Hq * ceil_div<i64>(problem.Lq, tile.rows) *
                    ceil_div<i64>(problem.Lk, tile.keys);
  e.num_empty = problem.documents ? max_of<i64>(tiles - counts.num_partial - counts.num_full, 0)
                                  : counts.num_empty;
  e.num_partial = counts.num_partial;
  e.num_full = counts.num_full;
  e.num_visible = counts.num_visible;
  // All are visited: what is visible of a tile is found out in it.
  if (source == TileSource::kDense && !bound.trivial()) {
    e.num_partial += e.num_empty + e.num_full;
    e.num_empty = e.num_full = 0;
  }
  return e;
}

}  // namespace jali
