// Attention over packed documents from C++: three documents in one sequence, each token sees the
// earlier tokens of its own document. Forward, then the gradients of a loss sum(out * weight).
#include <jali/jali.h>

#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t kB = 1, kH = 4, kL = 1024, kD = 64;

std::vector<float> random_floats(std::size_t n, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& value : x) value = normal(generator);
  return x;
}

jali::TensorView view(std::vector<float>& x) {
  return {x.data(), jali::DType::kF32, {kB, kH, kL, kD}};
}

}  // namespace

int main() {
  std::mt19937 generator(0);
  const std::size_t n = kB * kH * kL * kD;
  std::vector<float> q = random_floats(n, generator), k = random_floats(n, generator),
                     v = random_floats(n, generator), weight = random_floats(n, generator);

  // Documents of 300, 500 and 224 tokens. A mask keeps a view of the ids, not a copy.
  std::vector<std::int32_t> ids(kL);
  for (std::int64_t j = 0; j < kL; ++j) ids[j] = j < 300 ? 0 : (j < 800 ? 1 : 2);
  jali::Mask mask = jali::causal() & jali::document({ids.data(), jali::DType::kI32, {kB, kL}});

  jali::Shape shape;
  shape.B = kB;
  shape.Hq = shape.Hkv = kH;
  shape.Lq = shape.Lk = kL;
  jali::Explanation plan = jali::explain(mask, shape, kD, kD, jali::DType::kF32);
  std::printf("tiles of %lld x %lld: %lld full, %lld partial, %lld skipped\n",
              static_cast<long long>(plan.tile_rows), static_cast<long long>(plan.tile_keys),
              static_cast<long long>(plan.num_full), static_cast<long long>(plan.num_partial),
              static_cast<long long>(plan.num_empty));

  std::vector<float> out(n), lse(kB * kH * kL);
  jali::TensorView lse_view(lse.data(), jali::DType::kF32, {kB, kH, kL});
  jali::AttentionOptions options;  // scale 1 / sqrt(D), no dropout, no bias, all cores
  jali::attention_forward(view(q), view(k), view(v), mask, options, view(out), lse_view);

  std::vector<float> dq(n), dk(n), dv(n);
  jali::AttentionGrads grads;
  grads.dq = view(dq);
  grads.dk = view(dk);
  grads.dv = view(dv);
  jali::attention_backward(view(q), view(k), view(v), view(out), lse_view, view(weight), {}, mask,
                           options, grads);

  // The first token of a document sees itself alone: its output is its own value.
  std::printf("out[0, 0, 300, 0] = %.6f, v[0, 0, 300, 0] = %.6f\n", out[300 * kD], v[300 * kD]);
  std::printf("dq[0, 0, 1, 0] = %.6f\n", dq[kD]);
}
