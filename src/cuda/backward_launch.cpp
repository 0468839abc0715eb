#include "cuda/backward_launch.h"

#include <cmath>

#include "cuda/bias_gradients.h"
#include "cuda/score_arguments.h"

namespace jali::cuda {
namespace {

/// What the kernels are compiled for; they have no loads of pairs of floats. PERF: nor, beside turns, of
/// eights where the gradient is wanted: that would spill.
ScoreOptions backward_options(const AttentionProblem& p, const BackwardViews& grads) {
  ScoreOptions options = score_options(p);
  options.bias_pairs &= options.bias == BiasType::kHalf;
  options.bias_eights &= !(p.deterministic && grads.dbias.given());
  return options;
}

/// Whether the key at which the middle row stands may be seen by more than a quarter of the rows; so if the mask's tables
/// decide, which nobody has read.
bool seen_by_many(const AttentionProblem& p, i64 rows, i64 keys) {
  if (!p.mask->numbers_alone() || keys < 1) return true;
  const Frame f = frame_of(p, rows, keys);
  const i32 key = clamp_to(f.q_offset + f.num_rows / 2, 0, f.num_keys - 1);
  MaskCursor cursor(*p.mask, f);
  cursor.set_cols(key, key + 1);
  const Span seen = cursor.row_span();
  return 4 * i64{seen.end - seen.begin} > rows;
}

/// As many KV heads as have q, dout and the sum of dq of their query heads in a part of the L2 cache. cut: sequences are
/// packed.
/// PERF: D128, 256 heads of 1K tokens: 770 us with 2 to 8 heads, 890 with 64; no matter at 16K. But of causal and
/// prefix masks four heads of up to 16 MB (us, H200, 16 heads, of 1 and 4): D128 16K 4490, 4410, 8K 1157, 1146, D96 16K
/// 3850, 3810, D64 4900, 4875; windows of 32K by two heads 1.03, short documents by four 1.06 of the time.
/// Deterministic, without a mask, each key tile of a head waits for those before it, so that more heads are worked on at
/// once: at most 8 key tiles of each, but fewer heads where L2 holds little of one. Under a mask they come to row tiles
/// when their turns are there (BackwardTiles::kDown), far apart: two heads of up to 32 MB.
/// PERF (us, H200): of at most 16, 11, 8, 5 key tiles of a head at once 16 heads of 16K, D128, take 9600, 9560, 9375,
/// 9470, of 8K 2490, 2475, 2455, 2435. Of 1, 2, 4, 16 heads 16K causal 4710, 4580, 4820, 5840; D64 5120, 4990, 5020, 6290;
/// 12 causal documents of 32K 4210, 4130, 4480; 2 x 8K 587, 592, 675, 688; 8 groups of 4 heads of 16K, causal, of 1, 2, 4,
/// 8 groups 10650, 11080, 11930, 13240. Key tiles up and rows down, all causal ones waited for the first to pass: 4940,
/// 5380, 4790, 705, 10490.
i32 section(const AttentionProblem& p, bool cut, i64 rows, i64 keys, i32 heads, i32 clusters) {
  constexpr i64 kBytes = 8 << 20, kSeveral = 64 << 20, kBehindOthers = 144 << 20;
  const i64 per_query_head = max_of<i64>(2 * rows * (3 * p.D + p.Dv), 1);
  const i64 per_head = per_query_head * (p.Hq / p.Hkv);
  i64 least = 1;
  if (p.deterministic && p.mask->trivial()) {
    least = ceil_div(clusters, 8);
    least = clamp_to<i64>(kBehindOthers / per_query_head, min_of<i64>(4, least), least);
  } else if (p.deterministic) {
    if (2 * per_head <= kSeveral && seen_by_many(p, rows, keys)) least = 2;
  } else if (!cut && 4 * per_head > kBytes && 4 * per_head <= kSeveral && p.mask->numbers_alone() &&
             !p.mask->trivial() && seen_by_many(p, rows, keys)) {
    least = 4;
  }
  const i64 all = max_of(heads, 1);
  i64 wanted = min_of(max_of(kBytes / per_head, least), all);
  // All sections alike, or the last one's key tiles wait for more. PERF: 32 heads of 8K, 12 causal documents, before
  // they had tiles of their own: 865 us by 8, else 899.
  if (p.deterministic) wanted = ceil_div(all, ceil_div(all, wanted));
  return static_cast<i32>(wanted);
}

/// Whether loaders look up what is active; those of even masks find out as they go, but turns need maps.
bool has_maps(const AttentionProblem& p) {
  if (p.mask->trivial()) return false;
  bool even = !p.deterministic && !p.forces_map();
  for (const auto& leaf : p.mask->leaves()) even &= leaf->device_even();
  return !even;
}

/// Whether finders, if there are any, ask by runs alone (tile/cell_finder.h).
bool asks_by_runs(const BoundMask& mask) {
  bool runs = true;
  for (const auto& leaf : mask.leaves()) {
    runs &= leaf->device_even() || (leaf->rows_read_tables() && leaf->cols_read_tables());
  }
  return runs;
}

/// Weights of scores below the polynomial's other end are less than 2^-10 together, of so many keys.
void set_low_scores(BackwardArgs& a, double scale, double softcap, i64 keys) {
  const double end_product = kMostOfTanh * softcap / scale;
  const i32 exponent = std::ilogb(end_product);
  if (exponent < -60 || exponent > 60) return;  // K as it is, and no score is low
  const double k_factor = std::ldexp(1.0, -1 - exponent);
  const double end = end_product * k_factor;  // of products, from 0.5 to 1
  double terms[2];
  terms_of_tanh(kMostOfTanh, terms);
  LowScores& low = a.low;
  low.k_factors = bf16_pair(k_factor);
  low.above = static_cast<float>(1 - end * end);
  const double rise = terms[1] / (end * end * end);
  low.terms[0] = static_cast<float>(terms[0] / end - rise * low.above);
  low.terms[1] = static_cast<float>(rise);
  const double score = softcap * kLog2E * (terms[0] + terms[1]);
  low.least = static_cast<float>(-score);
  low.most = static_cast<float>(score - 10 - std::log2(static_cast<double>(max_of<i64>(keys, 1))));
  a.scores.scale = a.dq_scale = static_cast<float>(scale / k_factor);
}

void set_first_and_last(BackwardArgs& a, i32 blocks) {
  const WorkOrder order = a.row_order();
  // Of KV heads: as far as the first key tiles of all blocks reach, and the last ones.
  const i32 heads = blocks / max_of(a.key_tiles, 1) + 1;
  a.first_parts = order.before(ceil_div(heads, a.section));
  a.last_parts = min_of(max_of(heads + 1, a.last), a.heads) * order.per_head;
}

}  // namespace

Fit BackwardSm90Launch::fits(const AttentionProblem& p, const BackwardViews& grads,
                             const DeviceInfo& device) const {
  Fit fit;
  fit.reason = sm90_refusal(p, device);
  if (!fit.reason.empty()) return fit;
  if (!fits_dims(kernel_dim(p.D), kernel_dim(p.Dv))) {
    fit.reason = std::string(file()) + " takes other head dims, the largest 256";
  } else if (!fits_options(kernel_dim(p.D), kernel_dim(p.Dv), backward_options(p, grads),
                           bias_gradients(p, grads), p.deterministic)) {
    fit.reason = std::string(file()) + " leaves such options to another kernel";
  } else if (p.deterministic && !cells_in_order(p, grads)) {
    fit.reason =
        "a deterministic backward on a GPU cannot sum the gradient of a bias over rows and keys "
        "that several sequences or KV heads share; expand the bias to [B, Hkv or Hq, Lq, Lk], or "
        "call with deterministic=False";
  } else {
    fit.reason = map_refusal(p, has_maps(p));
    fit.ok = fit.reason.empty();
    fit.cost = cost();
  }
  return fit;
}

std::vector<KernelText> BackwardSm90Launch::texts(const AttentionProblem& p,
                                                  const BackwardViews& grads) const {
  const BackwardTile tile =
      this->tile(kernel_dim(p.D), kernel_dim(p.Dv), backward_options(p, grads), p.deterministic);
  std::vector<KernelText> all = {text(p, grads)};
  if (has_maps(p)) {
    all.push_back(map_text(tile.rows, tile.keys, true));
    if (p.deterministic) all.push_back(map_text(tile.rows, tile.keys, false));
  }
  return all;
}

KernelText BackwardSm90Launch::text(const AttentionProblem& p, const BackwardViews& grads) const {
  const char* const type = p.dtype == DType::kBF16 ? "ptx::BF16" : "ptx::FP16";
  ScoreOptions options = backward_options(p, grads);
  const BiasGradients wanted = bias_gradients(p, grads);
  const i32 D = kernel_dim(p.D), Dv = kernel_dim(p.Dv);
  options.saturates = options.dropout && saturates(DropoutRule(dropout_threshold(p.dropout_p))) &&
                      tells_by_differences(D, Dv, options, p.deterministic);
  const bool deterministic = p.deterministic, forces_map = p.forces_map();
  auto instance = [=, this] {
    std::string text;
    text.reserve(256);
    text.append(kernel()).append("<").append(type).append(", ").append(std::to_string(D));
    text.append(", ").append(std::to_string(Dv)).append(deterministic ? ", M, true" : ", M, false");
    text.append(", ").append(text_of(options)).append(", ").append(text_of(wanted));
    text.append(forces_map ? ", true>" : ">");
    return text;
  };
  const bool finishes = wanted.per_tile() || wanted.rows || options.sinks;
  const i32 cluster = tile(D, Dv, options, deterministic).blocks;
  return {instance(),
          [=, this] {
            const std::string sums = finishes ? bias_gradient_kernels(type) : "";
            return std::string("#include \"cuda/tile/backward_sums.h\"\n#include \"cuda/variant/") +
                   file() + R"(.cuh"
namespace jali::cuda {
using Kernel = )" + instance() +
                   R"(;
extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1))" +
                   (cluster > 1 ? " __cluster_dims__(" + std::to_string(cluster) + ", 1, 1)" : "") +
                   R"(
    backward(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,
             const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap o,
             const __grid_constant__ BackwardArgs a, const __grid_constant__ M mask) {
  Kernel::run(q, k, v, o, a, mask);
}
)" + sums + "}  // namespace jali::cuda\n";
          },
          // NOTE: turns at D 64 would spill.
          asks_by_runs(*p.mask) && p.D <= 128 && p.Dv <= 128 &&
              (p.D > 64 || (has_maps(p) && !p.deterministic)) && options == ScoreOptions{} &&
              wanted == BiasGradients{},
          2};
}

void BackwardSm90Launch::run(Call& call, const HeadView& out, const HeadView& lse,
                             const HeadView& dout, const HeadView& dlse,
                             const BackwardViews& grads) const {
  const AttentionProblem& p = call.problem();
  const i32 D = kernel_dim(p.D), Dv = kernel_dim(p.Dv);
  const ScoreOptions options = backward_options(p, grads);
  const BackwardTile tile = this->tile(D, Dv, options, p.deterministic);
  const KernelText module = text(p, grads);
  const Kernel& main =
      call.kernel(module, "backward", tile.shared_bytes, [&] { return texts(p, grads); });
  const i32 batches = p.varlen ? 1 : p.B;
  const i64 rows = p.varlen ? p.Tq : p.Lq, keys = p.varlen ? p.Tk : p.Lk;
  const TensorMap q = call.tensor_map("q", p.q, p.D, rows, tile.rows);
  const i32 box_keys = tile.keys / tile.blocks;
  const TensorMap k = call.tensor_map("k", p.k, p.D, keys, box_keys);
  const TensorMap v = call.tensor_map("v", p.v, p.Dv, keys, box_keys);
  const TensorMap o = call.tensor_map("dout", dout, p.Dv, rows, tile.rows);
  call.row_strides("out", out, rows);
  call.row_strides("dq", grads.dq, rows);
  call.row_strides("dk", grads.dk, keys);
  call.row_strides("dv", grads.dv, keys);

  BackwardArgs a;
  a.seq = call.sequences();
  a.D = p.D;
  a.Dv = p.Dv;
  a.row_tiles_of_sequence = num_tiles(p, true, tile.rows);
  a.row_tiles = a.row_tiles_of_sequence * batches;
  a.row_parts = a.row_tiles_of_sequence * a.seq.group * (tile.rows / kBackwardPartRows);
  a.key_tiles = num_tiles(p, false, tile.keys);
  a.heads = batches * p.Hkv;
  const i32 most_clusters = call.device().num_sms / tile.blocks;
  a.section = section(p, p.cut(), rows, keys, a.heads, most_clusters);
  a.last = heads_by_length(a.heads, a.key_tiles, most_clusters);
  a.scale = static_cast<float>(p.scale);
  a.scale_log2 = static_cast<float>(p.scale) * kLog2E;
  a.lse_factor = adjusts_products(options) ? -kLog2E : static_cast<float>(-1 / p.scale);
  a.scores = score_arguments(call);
  a.dq_scale = a.scale;
  if (scales_keys(options, p.dtype)) set_low_scores(a, p.scale, p.softcap, keys);
  if (a.scores.keep_scale > 0) {  // 1 without dropout, 0 where everything is dropped
    a.ds_scale = a.scores.keep_scale;
    a.delta_scale = 1 / a.ds_scale;
    a.scale *= a.ds_scale;
    a.dq_scale *= a.ds_scale;
  }
  const bool maps = has_maps(p);
  const bool even = !maps && !p.mask->trivial();
  a.falling = even || (maps && p.deterministic);
  // More heads beside each other, so that no long key tile is left to the end.
  // PERF (us): 12 causal documents, 2 x 8K, sorted 2 heads 591, 3 585, 4 586, 5 587, 8 617, not sorted 4 586, 8 598;
  // 32K 3940, 3980, 3990, 4050, 4150; 4090, 4050.
  if (even && p.cut()) a.last = min_of(max_of(a.last, a.seq.sorted() ? 3 : 4), a.heads);
  if (maps) {
    a.key_map = call.tile_map(tile.rows, tile.keys, true, p.deterministic);
    if (p.deterministic) {
      // NOTE: a tile in one of the maps alone would be a turn that never comes, or one that two take.
      a.row_map = call.tile_map(tile.rows, tile.keys, false, true);
      a.key_map.long_lines = a.key_map.by_length = nullptr;  // NOTE: turns are in order
      // PERF: the first ones of these heads would keep others waiting, if few are as long: Longformer 2050 us, without
      // last heads 1420 (which it does not get: tables decide).
      if (!seen_by_many(p, rows, keys)) a.last = 0;
    }
  }
  const i64 row_tiles = i64{a.row_tiles} * p.Hq;
  // Blocks without key tiles of their own still care for row tiles.
  const i64 useful = max_of<i64>(a.key_order().total(), ceil_div<i64>(row_tiles, tile.blocks));
  const i64 clusters = min_of<i64>(useful, most_clusters);
  const i64 blocks = clusters * tile.blocks;
  set_first_and_last(a, static_cast<i32>(clusters));
  constexpr i32 kTaken = 6;
  const i32 sections = ceil_div(a.heads, a.section);
  a.num_counters = kTaken + 2 * sections;
  a.taken = call.counters(a.num_counters);
  a.prepared = a.taken + kTaken;
  a.added = a.prepared + sections;
  auto floats = [&](i64 count) {
    return static_cast<float*>(call.allocate(count * static_cast<i64>(sizeof(float))));
  };
  const i64 statistic = row_tiles * (tile.rows / 64) * (kStatisticBytes / 4);  // or a float a row
  a.neg_lse = floats(statistic);
  a.neg_delta = floats(statistic);
  a.dq_sum = floats(row_tiles * tile.dq_floats);
  const i64 turns_bytes = row_tiles * tile.blocks * static_cast<i64>(sizeof(i32));
  if (p.deterministic) {
    a.turns = static_cast<i32*>(call.allocate(turns_bytes));
  }
  a.out = out.data;
  a.dout = dout.data;
  a.lse = static_cast<const float*>(lse.data);
  a.dlse = static_cast<const float*>(dlse.data);
  a.dq = grads.dq.data;
  a.dk = grads.dk.data;
  a.dv = grads.dv.data;
  a.out_strides = strides_of(out);
  a.dout_strides = strides_of(dout);
  a.lse_strides = strides_of(lse);
  a.dlse_strides = strides_of(dlse);
  a.dq_strides = strides_of(grads.dq);
  a.dk_strides = strides_of(grads.dk);
  a.dv_strides = strides_of(grads.dv);

  const BiasGradientSums sums(call, grads, a);
  void* const mask = call.mask_parameters();
  sums.begin(module);
  if (blocks > 0) {
    if (p.deterministic) call.clear(a.turns, turns_bytes);
    call.launch(main, blocks, main.threads, tile.shared_bytes, {&q, &k, &v, &o, &a, mask});
  }
  sums.finish(module);
}

}  // namespace jali::cuda
