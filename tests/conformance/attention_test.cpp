// Attention through random trees of all leaves, in every layout of their tables, against the truth:
// what the plan skips and takes as full must not change a number.
#include <cmath>

#include "check.h"
#include "mask/leaf_generators.h"

using namespace jali;
using namespace random_mask;

namespace {

constexpr int kCases = 400, kD = 5, kDv = 3;

struct Array {
  std::vector<double> data;
  TensorView view;
  Array(std::vector<int> shape, Rng* rng, double fill = 0) {
    std::size_t size = 1;
    for (int n : shape) size *= n;
    data.assign(size, fill);
    for (double& x : data) {
      if (rng) x = rng->in(-1000, 1000) / 500.0;
    }
    view = TensorView(data.data(), DType::kF64, {});
    view.rank = static_cast<int>(shape.size());
    std::int64_t stride = 1;
    for (int d = view.rank - 1; d >= 0; --d) {
      view.shape[d] = shape[d];
      view.stride[d] = stride;
      stride *= shape[d];
    }
  }
  Array(const Array&) = delete;
};

struct Results {
  Array out, lse, dq, dk, dv;
  AttentionGrads grads() const { return {dq.view, dk.view, dv.view, {}, {}, {}}; }
};

bool compare(const char* what, const Array& got, const Array& want) {
  for (std::size_t n = 0; n < want.data.size(); ++n) {
    const double x = got.data[n], y = want.data[n];
    if (x != y && !(std::abs(x - y) <= 1e-11 * (1 + std::abs(y)))) {
      return check::report(false, __FILE__, __LINE__,
                           std::string(what) + "[" + std::to_string(n) + "] is " + check::show(x) +
                               ", the truth " + check::show(y));
    }
  }
  return CHECK_EQ(got.data.size(), want.data.size());
}

bool check_case(unsigned seed) {
  Rng rng(seed);
  Problem p;
  draw_problem(rng, p);
  Generator generator(rng, p);
  const Sample sample = random_tree(generator, rng.in(0, 3));
  const int tq = p.varlen ? p.tq : p.lq[0], tk = p.varlen ? p.tk : p.lk[0];
  auto tensor = [&](int heads, int length, int width) {
    return p.varlen ? std::vector<int>{length, heads, width}
                    : std::vector<int>{p.B, heads, length, width};
  };
  const std::vector<int> lse =
      p.varlen ? std::vector<int>{p.Hq, tq} : std::vector<int>{p.B, p.Hq, tq};
  const Array q(tensor(p.Hq, tq, kD), &rng), k(tensor(p.Hkv, tk, kD), &rng);
  const Array v(tensor(p.Hkv, tk, kDv), &rng), dout(tensor(p.Hq, tq, kDv), &rng);
  AttentionOptions options;
  options.q_offset = p.shape.q_offset;
  options.cu_seqlens_q = p.shape.cu_seqlens_q;
  options.cu_seqlens_k = p.shape.cu_seqlens_k;
  if (rng.one_in(3)) options.dropout_p = 0.25;
  const Array sinks({p.Hq}, &rng);
  if (rng.one_in(3)) options.sinks = sinks.view;

  // Everything is written, but for tokens behind the last sequence.
  const double poison = p.varlen ? 0 : NAN;
  auto blank = [&](const std::vector<int>& shape) { return Array(shape, nullptr, poison); };
  auto results = [&]() -> Results {
    return {blank(tensor(p.Hq, tq, kDv)), blank(lse), blank(tensor(p.Hq, tq, kD)),
            blank(tensor(p.Hkv, tk, kD)), blank(tensor(p.Hkv, tk, kDv))};
  };
  const Results got = results(), want = results();
  attention_forward(q.view, k.view, v.view, sample.mask, options, got.out.view, got.lse.view);
  attention_backward(q.view, k.view, v.view, got.out.view, got.lse.view, dout.view, {}, sample.mask,
                     options, got.grads());
  attention_truth(q.view, k.view, v.view, sample.mask, options, want.out.view, want.lse.view,
                  dout.view, {}, want.grads());
  const bool same = compare("out", got.out, want.out) && compare("lse", got.lse, want.lse) &&
                    compare("dq", got.dq, want.dq) && compare("dk", got.dk, want.dk) &&
                    compare("dv", got.dv, want.dv);
  if (!same) std::printf("seed %u: %s\n", seed, sample.text.c_str());
  return same;
}

}  // namespace

TEST(random_masks_against_the_truth) {
  for (int n = 0; n < kCases; ++n) {
    if (!check_case(90000 + n)) return;
  }
}
