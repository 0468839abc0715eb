// Launches the forward kernel of fwd_sm90.cuh.
#include "cuda/variant/fwd_sm90.cuh"

#include <cmath>

#include "base/env.h"
#include "base/error.h"
#include "cuda/kernel/work_order.h"
#include "cuda/score_arguments.h"
#include "cuda/variant.h"

namespace jali::cuda {
namespace {

constexpr i32 kMaxHeadDim = 256;

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

/// What of a problem a kernel is compiled for, and its shape then.
struct Form {
  i32 kD, kDv;
  ScoreOptions options;
  MaskKind mask;
  bool small;  // tiles, see forward_shape()
  ForwardShape shape;

  explicit Form(const AttentionProblem& p)
      : kD(kernel_dim(p.D)), kDv(kernel_dim(p.Dv)), options(options_of(p)), mask(kind_of(p)) {
    set_small(false);
  }
  void set_small(bool are_small) {
    small = are_small;
    shape = forward_shape(kD, kDv, options, mask, small);
  }
  bool large() const { return shape.rows() > kSmallTile || shape.keys > kSmallTile; }
  static constexpr i32 kSmallTile = 128;
};

/// Whether large tiles would be empty for a good part. Where sequences are cut, pieces count by their mean length.
/// PERF: time of small tiles over that of large ones, D64: 197, 256, 512, 577, 1024 rows, which large ones do not fit, 0.79,
/// 0.79, 0.98, 0.91, 0.97; 384, 768, 1536, which both fit, 1.14, 1.09, 1.07. Windows of 256, 512, 1024, 2048, 4096 keys 0.75,
/// 0.81, 0.90, 0.96, 1.005; 1K, 2K, 4K, 8K causal tokens, of which a row sees half, 0.89, 0.97, 1.01, 1.03. D48: these
/// windows 0.70, 0.76, 0.85, 0.965, 1.00; causal 0.87, 0.94, 0.98, 0.99. A bias of keys: 1024 rows 1.03.
bool large_tiles_waste(const AttentionProblem& p, const ForwardShape& large) {
  constexpr i64 kFewKeys = 2048;
  const i64 pieces = max_of(p.varlen ? p.B : p.documents ? p.documents->length - 1 : 1, 1);
  const i64 rows = (p.varlen ? p.Tq : p.Lq) / pieces, keys = (p.varlen ? p.Tk : p.Lk) / pieces;
  if (large.rows() > Form::kSmallTile) {
    auto taken = [&](i32 tile) {
      return p.cut() ? rows + tile / 2 : ceil_div(rows, i64{tile}) * tile;
    };
    return 11 * taken(Form::kSmallTile) < 10 * taken(large.rows());
  }
  if (!p.mask->numbers_alone() || rows < 1) return keys <= kFewKeys;
  // The row in the middle; of a piece of twice that length, since most of the work is in those that are longer.
  const i32 longer = p.cut() ? 2 : 1;
  const Frame f = frame_of(p, longer * rows, longer * keys);
  MaskCursor cursor(*p.mask, f);
  cursor.set_rows(f.num_rows / 2, f.num_rows / 2 + 1);
  const Span seen = cursor.key_span();
  return seen.end - seen.begin <= kFewKeys;
}
Form form_of(const AttentionProblem& p) {
  Form form(p);
  if (!form.large()) return form;
  const std::string size = forced({"small", "large"});
  if (size.empty() ? large_tiles_waste(p, form.shape) : size == "small") form.set_small(true);
  return form;
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
    const ForwardShape shape = form_of(p).shape;
    return {shape.rows(), shape.keys};
  }

  TileSource source(const AttentionProblem& p) const override {
    const MaskKind kind = kind_of(p);
    if (kind == MaskKind::kNone) return TileSource::kDense;
    return p.forced_source.value_or(has_map(kind) ? TileSource::kStored : TileSource::kInline);
  }

  std::vector<KernelText> texts(const AttentionProblem& p) const override {
    return texts(p, form_of(p));
  }
  std::vector<KernelText> texts_of_any_length(const AttentionProblem& p) const override {
    Form form(p);
    std::vector<KernelText> all = texts(p, form);
    if (form.large()) {
      form.set_small(true);
      all.push_back(text(p, form));
    }
    return all;
  }

  void run(Call& call, const HeadView& out, const HeadView& lse) const override {
    const AttentionProblem& p = call.problem();
    const Form form = form_of(p);
    const ForwardShape& shape = form.shape;
    const int shared = shape.shared_bytes(form.kD, form.kDv);
    const Kernel& kernel =
        call.kernel(text(p, form), "forward", shared, [&] { return texts(p, form); });
    const i32 batches = p.varlen ? 1 : p.B;
    const i64 rows = p.varlen ? p.Tq : p.Lq, keys = p.varlen ? p.Tk : p.Lk;
    const TensorMap q = call.tensor_map("q", p.q, p.D, rows, 64);
    const TensorMap k = call.tensor_map("k", p.k, p.D, keys, shape.keys);
    const TensorMap v = call.tensor_map("v", p.v, p.Dv, keys, shape.v_keys());
    const TensorMap to_out = call.tensor_map("out", out, p.Dv, rows, 16);

    ForwardArgs a;
    a.seq = call.sequences();
    a.scores = score_arguments(call);
    if (form.options.bounded) set_tanh(a.scores, p.scale, p.softcap);
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
    const bool mapped = has_map(form.mask);
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
  static std::vector<KernelText> texts(const AttentionProblem& p, const Form& form) {
    std::vector<KernelText> all = {text(p, form)};
    if (has_map(form.mask)) all.push_back(map_text(form.shape.rows(), form.shape.keys, false));
    return all;
  }
  static KernelText text(const AttentionProblem& p, const Form& form) {
    const std::string dims = std::to_string(form.kD) + ", " + std::to_string(form.kDv);
    const std::string options = text_of(form.options);
    const char* const type = p.dtype == DType::kBF16 ? "ptx::BF16" : "ptx::FP16";
    const char* const mask = text_of(form.mask);
    std::string key;
    key.reserve(256);
    key.append("fwd_sm90 ").append(type).append(", ").append(dims).append(", ");
    key.append(options).append(", ").append(mask).append(form.small ? ", small" : "");
    return {std::move(key),
            [=] {
              return R"(
#include "cuda/variant/fwd_sm90.cuh"
namespace jali::cuda {
constexpr ScoreOptions kOptions = )" +
                     options + R"(;
constexpr ForwardShape kShape = forward_shape()" +
                     dims + ", kOptions, " + mask + (form.small ? ", true" : "") + R"();
extern "C" __global__ void __launch_bounds__(kShape.threads(), 1)
    forward(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,
            const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap out,
            const __grid_constant__ ForwardArgs a, const __grid_constant__ M mask) {
  Forward<)" + std::string(type) +
                     ", " + dims + ", M, kOptions, " + mask +
                     R"(, kShape>::run(q, k, v, out, a, mask);
}
}  // namespace jali::cuda
)";
            },
            form.options == ScoreOptions{} && p.D > 64 && !has_map(form.mask), 1};
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
