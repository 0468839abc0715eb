#include "cuda/backend.h"

#include <cstdlib>

#include "base/error.h"
#include "cuda/describe.h"
#include "cuda/variant.h"
#include "variant_list.h"

namespace jali {
namespace cuda {

#define JALI_DECLARE(name) const ForwardVariant& name();
JALI_FOR_EACH_fwd_VARIANT(JALI_DECLARE)
#undef JALI_DECLARE
#define JALI_DECLARE(name) const BackwardVariant& name();
JALI_FOR_EACH_bwd_VARIANT(JALI_DECLARE)
#undef JALI_DECLARE

namespace {

/// The cheapest variant that fits, or null and the reasons why none does.
template <class Variant>
struct Choice {
  const Variant* best = nullptr;
  Fit fit;

  template <class... Arguments>
  void consider(const Variant& variant, const Arguments&... arguments) {
    const Fit offered = variant.fits(arguments...);
    if (offered.ok && (!best || offered.cost < fit.cost)) {
      best = &variant;
      fit = offered;
    } else if (!best) {
      fit.reason += (fit.reason.empty() ? "" : "; ") + offered.reason;
    }
  }
};

Choice<ForwardVariant> choose_forward(const AttentionProblem& problem, const DeviceInfo& device) {
  Choice<ForwardVariant> choice;
#define JALI_CONSIDER(name) choice.consider(name(), problem, device);
  JALI_FOR_EACH_fwd_VARIANT(JALI_CONSIDER)
#undef JALI_CONSIDER
  return choice;
}

Choice<BackwardVariant> choose_backward(const AttentionProblem& problem, const BackwardViews& grads,
                                        const DeviceInfo& device) {
  Choice<BackwardVariant> choice;
#define JALI_CONSIDER(name) choice.consider(name(), problem, grads, device);
  JALI_FOR_EACH_bwd_VARIANT(JALI_CONSIDER)
#undef JALI_CONSIDER
  return choice;
}

class CudaBackend final : public Backend {
 public:
  const char* name() const override { return "cuda"; }
  DeviceType device() const override { return DeviceType::kCUDA; }
  std::string describe() const override { return cuda::describe(); }

  Fit fits(const AttentionProblem& problem) const override {
    Fit fit;
    if (problem.device != DeviceType::kCUDA) {
      fit.reason = "q, k and v are not on a GPU";
    } else if (const char* missing = Driver::missing()) {
      fit.reason = missing;
    } else {
      fit = choose_forward(problem, device_info(problem.device_index)).fit;
    }
    return fit;
  }

  TileShape forward_tile(const AttentionProblem& problem) const override {
    return choose_forward(problem, device_info(problem.device_index)).best->tile(problem);
  }

  TileSource forward_source(const AttentionProblem& problem) const override {
    return choose_forward(problem, device_info(problem.device_index)).best->source(problem);
  }

  void forward(const AttentionProblem& problem, const HeadView& out,
               const HeadView& lse) const override {
    if (problem.B == 0 || problem.Lq == 0) return;
    Call call(problem);
    // Which gradients of a bias are wanted, for which a backward is compiled, is not known yet.
    if (problem.expect_backward && !problem.bias.given() && !problem.key_bias.given()) {
      call.expect([&] {
        const BackwardViews none;
        const BackwardVariant* next = choose_backward(problem, none, call.device()).best;
        return next ? next->texts(problem, none) : std::vector<KernelText>();
      });
    }
    choose_forward(problem, call.device()).best->run(call, out, lse);
  }

  void backward(const AttentionProblem& problem, const HeadView& out, const HeadView& lse,
                const HeadView& dout, const HeadView& dlse,
                const BackwardViews& grads) const override {
    if (problem.B == 0) return;
    const DeviceInfo& device = device_info(problem.device_index);
    const Choice<BackwardVariant> choice = choose_backward(problem, grads, device);
    if (!choice.best) unsupported("no GPU kernel can run this backward: ", choice.fit.reason);
    Call call(problem);
    choice.best->run(call, out, lse, dout, dlse, grads);
  }

  std::vector<BuiltModule> prebuild(const AttentionProblem& problem, bool backward,
                                    const BackwardViews& grads,
                                    const std::string& arch) const override {
    DeviceInfo device;
    device.name = arch;
    device.major = arch.rfind("sm_", 0) == 0 ? std::atoi(arch.c_str() + 3) / 10 : 0;
    const DeviceMask mask(*problem.mask);
    std::vector<KernelText> texts;
    const Choice<ForwardVariant> forward = choose_forward(problem, device);
    if (!forward.best) unsupported("no GPU kernel can run this forward: ", forward.fit.reason);
    texts = forward.best->texts_of_any_length(problem);
    if (backward) {
      const Choice<BackwardVariant> choice = choose_backward(problem, grads, device);
      if (!choice.best) unsupported("no GPU kernel can run this backward: ", choice.fit.reason);
      for (KernelText& text : choice.best->texts(problem, grads)) {
        texts.push_back(std::move(text));
      }
    }
    const std::vector<Source> sources = sources_of(texts, mask, problem.cut());
    const std::vector<Found> all = find_or_compile_all(sources, arch);
    std::vector<BuiltModule> made;
    for (std::size_t n = 0; n < all.size(); ++n) {
      made.push_back({sources[n].name, all[n].log,
                      static_cast<std::int64_t>(all[n].cubin.size() + all[n].log.size()),
                      all[n].now});
    }
    return made;
  }
};

}  // namespace
}  // namespace cuda

const Backend& cuda_backend() {
  static const cuda::CudaBackend backend;
  return backend;
}

}  // namespace jali
