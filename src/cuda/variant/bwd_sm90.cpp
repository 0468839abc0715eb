// Launches the backward kernels of bwd_sm90.cuh.
#include "cuda/variant/bwd_sm90.cuh"

#include "cuda/score_arguments.h"
#include "cuda/variant.h"

namespace jali::cuda {
namespace {

constexpr i32 kMaxHeadDim = 128;
constexpr int kSmallThreads = 256;  // of prepare and finish

/// The kernel's head dims: multiples of 16; dq is shared out in halves of 64 columns where Dv is wide.
struct Dims {
  i32 D, Dv;
};
Dims dims_of(const AttentionProblem& p) {
  Dims d = {ceil_div(p.D, 16) * 16, ceil_div(p.Dv, 16) * 16};
  if (d.Dv > 64) d.D = max_of(d.D, 80);
  return d;
}

Strides strides_of(const HeadView& view) { return {view.stride_b, view.stride_h, view.stride_l}; }

class BackwardSm90 final : public BackwardVariant {
 public:
  Fit fits(const AttentionProblem& p, const BackwardViews&,
           const DeviceInfo& device) const override {
    const ScoreOptions options = score_options(p);
    Fit fit;
    if (device.major != 9) {
      fit.reason = "the kernels for sm_90a need a Hopper GPU (H100, H200), this is " + device.name;
    } else if (p.D > kMaxHeadDim || p.Dv > kMaxHeadDim) {
      fit.reason = "the backward kernel for sm_90a takes head dims up to 128 so far";
    } else if (options.adjusts() || options.sinks || options.dropout) {
      fit.reason =
          "the backward kernel for sm_90a takes no softcap, bias, ALiBi, sinks, dropout "
          "and no scale below or at zero so far; on the CPU they have gradients";
    } else if (p.deterministic) {
      fit.reason = "the backward kernel for sm_90a has no deterministic mode so far";
    } else {
      fit.ok = true;
      fit.cost = 1;
    }
    return fit;
  }

  KernelText text(const AttentionProblem& p) const override {
    const Dims dims = dims_of(p);
    const std::string instance =
        std::string(p.dtype == DType::kBF16 ? "ptx::BF16, " : "ptx::FP16, ") +
        std::to_string(dims.D) + ", " + std::to_string(dims.Dv) + ", M";
    return {"bwd_sm90 " + instance, [instance] {
              return R"(
#include "cuda/variant/bwd_sm90.cuh"
namespace jali::cuda {
using Kernel = Backward<)" +
                     instance +
                     R"(>;
extern "C" __global__ void __launch_bounds__(384, 1)
    backward(const __grid_constant__ ptx::TensorMap q, const __grid_constant__ ptx::TensorMap k,
             const __grid_constant__ ptx::TensorMap v, const __grid_constant__ ptx::TensorMap o,
             const __grid_constant__ BackwardArgs a, const __grid_constant__ M mask) {
  Kernel::run<40, 232>(q, k, v, o, a, mask);
}
extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ BackwardArgs a) {
  Kernel::Rows::prepare(a);
}
extern "C" __global__ void __launch_bounds__(256) finish(const __grid_constant__ BackwardArgs a) {
  Kernel::Rows::finish(a);
}
}  // namespace jali::cuda
)";
            }};
  }

  void run(Call& call, const HeadView& out, const HeadView& lse, const HeadView& dout,
           const HeadView& dlse, const BackwardViews& grads) const override {
    const AttentionProblem& p = call.problem();
    const Dims dims = dims_of(p);
    const BackwardTile tile = backward_tile(dims.D, dims.Dv);
    const i32 batches = p.varlen ? 1 : p.B;
    const i64 rows = p.varlen ? p.Tq : p.Lq, keys = p.varlen ? p.Tk : p.Lk;
    const TensorMap q = tensor_map("q", p.q, p.D, rows, p.Hq, batches, tile.rows);
    const TensorMap k = tensor_map("k", p.k, p.D, keys, p.Hkv, batches, tile.keys);
    const TensorMap v = tensor_map("v", p.v, p.Dv, keys, p.Hkv, batches, tile.keys);
    const TensorMap o = tensor_map("dout", dout, p.Dv, rows, p.Hq, batches, tile.rows);

    BackwardArgs a;
    a.seq = call.sequences();
    a.D = p.D;
    a.Dv = p.Dv;
    a.row_tiles = tiles(p, p.Tq, p.Lq, tile.rows, p.B);
    a.key_tiles = tiles(p, p.Tk, p.Lk, tile.keys, 1);
    a.heads = batches * p.Hkv;
    a.section = section(p, rows, a.heads);
    a.scale = static_cast<float>(p.scale);
    a.scale_log2 = static_cast<float>(p.scale) * kLog2E;
    a.lse_factor = static_cast<float>(-1 / p.scale);
    a.counter = call.counters(2);
    const i64 row_tiles = i64{a.row_tiles} * p.Hq;
    auto floats = [&](i64 count) {
      return static_cast<float*>(call.allocate(count * static_cast<i64>(sizeof(float))));
    };
    a.neg_lse = floats(row_tiles * tile.rows);
    a.neg_delta = floats(row_tiles * tile.rows);
    a.dq_sum = floats(row_tiles * tile.dq_floats);
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

    const KernelText module = text(p);
    const Kernel& main = call.kernel(module, "backward", tile.shared_bytes);
    const Kernel& prepare = call.kernel(module, "prepare", 0);
    const Kernel& finish = call.kernel(module, "finish", 0);
    void* const mask = call.mask_parameters();
    if (row_tiles > 0) call.launch(prepare, row_tiles, kSmallThreads, 0, {&a});
    const i64 items = i64{a.heads} * a.key_tiles;
    if (items > 0) {
      call.launch(main, min_of<i64>(items, call.device().num_sms), tile.threads, tile.shared_bytes,
                  {&q, &k, &v, &o, &a, mask});
    }
    if (row_tiles > 0) call.launch(finish, row_tiles, kSmallThreads, 0, {&a});
  }

 private:
  static i32 tiles(const AttentionProblem& p, i64 tokens, i32 length, i32 size, i32 batches) {
    return static_cast<i32>(p.varlen ? num_slots(tokens, p.B, size)
                                     : i64{batches} * ceil_div(length, size));
  }

  /// As many KV heads as have the q and dout of their query heads in half of the L2 cache.
  static i32 section(const AttentionProblem& p, i64 rows, i32 heads) {
    constexpr i64 kBytes = 32 << 20;
    const i64 per_head = max_of<i64>(2 * rows * (p.D + p.Dv) * (p.Hq / p.Hkv), 1);
    return static_cast<i32>(clamp_to<i64>(kBytes / per_head, 1, max_of(heads, 1)));
  }
};

}  // namespace

const BackwardVariant& bwd_sm90() {
  static const BackwardSm90 variant;
  return variant;
}

}  // namespace jali::cuda
