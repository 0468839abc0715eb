#include "cpu/backend.h"

#include "cpu/call.h"

namespace jali {
namespace {

class CpuBackend : public Backend {
 public:
  const char* name() const override { return "cpu"; }
  DeviceType device() const override { return DeviceType::kCPU; }
  Fit fits(const AttentionProblem& p) const override {
    if (p.device != DeviceType::kCPU) {
      return {false, 0, "the tensors are in GPU memory, it needs CPU memory: move them there"};
    }
    // The rate of one core; only its order of magnitude matters.
    constexpr double kFlops = 1e11;
    return {true, 2.0 * p.B * p.Hq * p.Lq * p.Lk * (p.D + p.Dv) / kFlops, ""};
  }
  TileShape forward_tile(const AttentionProblem&) const override {
    return {cpu::kTileRows, cpu::kTileKeys};
  }
  TileSource forward_source(const AttentionProblem& p) const override {
    return p.mask->trivial() ? TileSource::kDense : TileSource::kInline;
  }
  void forward(const AttentionProblem& p, const HeadView& out, const HeadView& lse) const override {
    p.dtype == DType::kF64 ? cpu::forward<double>(p, out, lse) : cpu::forward<float>(p, out, lse);
  }
  void backward(const AttentionProblem& p, const HeadView& out, const HeadView& lse,
                const HeadView& dout, const HeadView& dlse,
                const BackwardViews& grads) const override {
    p.dtype == DType::kF64 ? cpu::backward<double>(p, out, lse, dout, dlse, grads)
                           : cpu::backward<float>(p, out, lse, dout, dlse, grads);
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace jali
