// Launches the forward kernel of fwd_sm90.cuh.
#include "cuda/variant/fwd_sm90.cuh"

#include <cmath>

#include "base/error.h"
#include "cuda/kernel/work_order.h"
#include "cuda/score_arguments.h"
#include "cuda/variant.h"

namespace jali::cuda {
namespace {

constexpr i32 kMaxHeadDim = 256;

i32 rounded(i32 dim) { return ceil_div(dim, 16) * 16; }

MaskKind kind_of(const AttentionProblem& p) {
  if (p.mask->trivial()) return MaskKind::kNone;
  i32 row_bytes = 0;
  bool mapped = p.forces_map();
  for (const auto& leaf : p.mask->leaves()) {
    if (leaf->device_light_row_bytes() == 0) return MaskKind::kHeavy;
    row_bytes += leaf->device_light_row_bytes();
    mapped |= leaf->device_mapped() && !p.forced_source;
    // With the map come the stored blocks.
    mapped |= leaf->rows_read_tables() || leaf->cols_read_tables();
  }
  if (row_bytes > kLightRowBytes) return MaskKind::kHeavy;
  return mapped ? MaskKind::kMapped : MaskKind::kLight;
}
Reach reach_of(const BoundMask& mask, bool mapped, bool cut) {
  if (cut) return Reach::kNear;
  if (mask.trivial()) return Reach::kAll;
  if (!mapped) return Reach::kFar;
  bool anywhere = false;
  for (const auto& leaf : mask.leaves()) anywhere |= leaf->device_anywhere();
  return anywhere ? Reach::kAnywhere : Reach::kNear;
}
const char* text_of(MaskKind kind) {
  constexpr const char* kTexts[] = {"MaskKind::kNone", "MaskKind::kLight", "MaskKind::kMapped",
                                    "MaskKind::kHeavy"};
  return kTexts[static_cast<i32>(kind)];
}

/// Weights of half precision have no room for softcap's without maxima. Those of caps up to 56 are within 2^81,
/// which leaves room for 2^20 of them times values up to 2^26.
ScoreOptions options_of(const AttentionProblem& p) {
  ScoreOptions options = score_options(p);
  options.bounded = options.softcap && !options.alibi && !options.loads() && p.softcap <= 56 &&
                    p.dtype == DType::kBF16;
  return options;
}

/// Of ScoreArgs, what a polynomial in place of tanh needs: for products up to 1 without sign, arguments of tanh are up to
/// kMostOfTanh. Beyond 1 products go on as a line: sums of weights below `most_sum` have none above it; and those above
/// `least_sum` do not change by weights below it, of which a thread has 48 at most, by more than 2^-10.
void set_tanh(ScoreArgs& a, double scale, double softcap) {
  const double end_product = kMostOfTanh * softcap / std::fmax(std::fabs(scale), 0x1p-60);
  const i32 exponent = clamp_to(std::ilogb(end_product), -60, 60);
  a.q_factor = static_cast<float>(std::ldexp(1.0, -exponent));
  a.q_factors = bf16_pair(a.q_factor);
  a.scale = static_cast<float>(scale / a.q_factor);
  double terms[2];
  terms_of_tanh(a.scale / softcap, terms);
  const double unit = softcap * kLog2E;
  for (i32 n = 0; n < 2; ++n) a.tanh_terms[n] = static_cast<float>(unit * terms[n]);
  const double end = unit * std::fabs(terms[0] + terms[1]);
  a.most_sum = static_cast<float>(std::exp2(end));
  a.least_sum = static_cast<float>(std::exp2(11 - end));
}

class ForwardSm90 final : public ForwardVariant {
 public:
  Fit fits(const AttentionProblem& p, const DeviceInfo& device) const override {
    Fit fit;
    fit.reason = sm90_refusal(p, device);
    if (!fit.reason.empty()) return fit;
    if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) {
      fit.reason =
          "GPU kernels take bfloat16 and float16; convert q, k and v, or move them to the "
          "CPU, which takes float32 and float64 too";
    } else if (p.D > kMaxHeadDim || p.Dv > kMaxHeadDim) {
      fit.reason = "the kernels for sm_90a take head dims up to 256";
    } else if (p.D % 8 || p.Dv % 8) {
      fit.reason =
          "the kernels for sm_90a take head dims that are multiples of 8; pad q, k and v "
          "with zeros";
    } else {
      fit.reason = map_refusal(p, has_map(kind_of(p)));
      fit.ok = fit.reason.empty();
      fit.cost = 1;
    }
    return fit;
  }

  TileShape tile(const AttentionProblem& p) const override {
    const ForwardShape shape = shape_of(p);
    return {shape.rows(), shape.keys};
  }

  TileSource source(const AttentionProblem& p) const override {
    const MaskKind kind = kind_of(p);
    if (kind == MaskKind::kNone) return TileSource::kDense;
    return p.forced_source.value_or(has_map(kind) ? TileSource::kStored : TileSource::kInline);
  }

  std::vector<KernelText> texts(const AttentionProblem& p) const override {
    const ForwardShape shape = shape_of(p);
    std::vector<KernelText> all = {text(p)};
    if (has_map(kind_of(p))) all.push_back(map_text(shape.rows(), shape.keys, false));
    return all;
  }

  static KernelText text(const AttentionProblem& p) {
    const std::string dims = std::to_string(rounded(p.D)) + ", " + std::to_string(rounded(p.Dv));
    const char *const type = p.dtype == DType::kBF16 ? "ptx::BF16" : "ptx::FP16", *const kind =
                                                                                      text_of(
                                                                                          kind_of(
                                                                                              p));
    const ScoreOptions options = options_of(p);
    std::string key;
    key.reserve(256);
    key.append("fwd_sm90 ").append(type).append(", ").append(dims).append(", ");
    key.append(text_of(options)).append(", ").append(kind);
    return {std::move(key),
            [=] {
              return R"(
#include "cuda/variant/fwd_sm90.cuh"
namespace jali::cuda {
constexpr ScoreOptions kOptions = )" +
                     text_of(options) + R"(;
extern "C" __global__ void __launch_bounds__(forward_shape()" +
                     dims + ", kOptions, " + kind + R"().threads(), 1)
    forward(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,
            const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap out,
            const __grid_constant__ ForwardArgs a, const __grid_constant__ M mask) {
  Forward<)" + std::string(type) +
                     ", " + dims + ", M, kOptions, " + kind + R"(>::run(q, k, v, out, a, mask);
}
}  // namespace jali::cuda
)";
            },
            options == ScoreOptions{} && p.D > 64 && kind_of(p) <= MaskKind::kLight, 1};
  }

  void run(Call& call, const HeadView& out, const HeadView& lse) const override {
    const AttentionProblem& p = call.problem();
    const i32 kD = rounded(p.D), kDv = rounded(p.Dv);
    const ForwardShape shape = shape_of(p);
    const int shared = shape.shared_bytes(kD, kDv);
    const Kernel& kernel = call.kernel(text(p), "forward", shared, [&] { return texts(p); });
    const i32 batches = p.varlen ? 1 : p.B;
    const i64 rows = p.varlen ? p.Tq : p.Lq, keys = p.varlen ? p.Tk : p.Lk;
    const TensorMap q = call.tensor_map("q", p.q, p.D, rows, 64);
    const TensorMap k = call.tensor_map("k", p.k, p.D, keys, shape.keys);
    const TensorMap v = call.tensor_map("v", p.v, p.Dv, keys, shape.v_keys());
    const TensorMap to_out = call.tensor_map("out", out, p.Dv, rows, 16);

    ForwardArgs a;
    a.seq = call.sequences();
    a.scores = score_arguments(call);
    if (options_of(p).bounded) set_tanh(a.scores, p.scale, p.softcap);
    a.D = p.D;
    a.Dv = p.Dv;
    a.q = p.q.data;
    a.k = p.k.data;
    a.q_strides = strides_of(p.q);
    a.k_strides = strides_of(p.k);
    a.tiles_per_head = num_tiles(p, true, shape.rows());
    a.heads = batches * p.Hq;
    a.num_tiles = a.tiles_per_head * a.heads;
    a.num_blocks = min_of(a.num_tiles, call.device().num_sms);
    const bool mapped = has_map(kind_of(p));
    a.section = forward_section(a.heads, a.seq.group, a.tiles_per_head, 2 * keys * (p.D + p.Dv),
                                reach_of(*p.mask, mapped, p.cut()));
    const i32 last = heads_by_length(a.heads, a.tiles_per_head, call.device().num_sms);
    a.last = min_of(ceil_div(max_of(last, a.section), a.seq.group) * a.seq.group, a.heads);
    if (mapped) a.map = call.tile_map(shape.rows(), shape.keys, false);
    a.counter = call.counters(2);
    a.out = out.data;
    a.out_stride_b = out.stride_b;
    a.out_stride_h = out.stride_h;
    a.out_stride_l = out.stride_l;
    place_lse(call, lse, a);

    void* const mask = call.mask_parameters();
    call.launch(kernel, a.num_blocks, shape.threads(), shared, {&q, &k, &v, &to_out, &a, mask});
  }

 private:
  static ForwardShape shape_of(const AttentionProblem& p) {
    return forward_shape(rounded(p.D), rounded(p.Dv), options_of(p), kind_of(p));
  }

  /// The kernel always writes the LSE.
  static void place_lse(Call& call, const HeadView& lse, ForwardArgs& a) {
    if (lse.given()) {
      a.lse = static_cast<float*>(lse.data);
      a.lse_stride_b = lse.stride_b;
      a.lse_stride_h = lse.stride_h;
      a.lse_stride_l = lse.stride_l;
      return;
    }
    const AttentionProblem& p = call.problem();
    const i64 rows = p.varlen ? p.Tq : p.Lq;
    a.lse_stride_l = 1;
    a.lse_stride_h = rows;
    a.lse_stride_b = p.varlen ? 0 : rows * p.Hq;
    a.lse = static_cast<float*>(
        call.allocate(rows * p.Hq * (p.varlen ? 1 : p.B) * static_cast<i64>(sizeof(float))));
  }
};

}  // namespace

const ForwardVariant& fwd_sm90() {
  static const ForwardSm90 variant;
  return variant;
}

}  // namespace jali::cuda
