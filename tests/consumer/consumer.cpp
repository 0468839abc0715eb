// A program outside the tree, built against the installed library only: forward and backward
// through causal() & document(ids), against a dense loop and against finite differences.
#include <jali/jali.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kB = 2, kHq = 4, kHkv = 2, kL = 37, kD = 8, kDv = 5;
int num_failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok) ++num_failures;
  std::printf("%s %s\n", ok ? "ok    " : "FAILED", what.c_str());
}

/// A contiguous fp64 array of random numbers.
struct Array {
  std::vector<double> x;
  jali::TensorView view;
  Array(std::initializer_list<std::int64_t> shape, std::mt19937& generator) {
    std::int64_t n = 1;
    for (std::int64_t size : shape) n *= size;
    std::normal_distribution<double> normal;
    x.resize(n);
    for (double& value : x) value = normal(generator);
    view = jali::TensorView(x.data(), jali::DType::kF64, shape);
  }
};

/// softmax over the visible keys times v, one row at a time; returns the largest difference.
double error_against_dense_loop(const Array& q, const Array& k, const Array& v, const Array& out,
                                const std::vector<std::int32_t>& ids) {
  double worst = 0;
  for (std::int64_t b = 0; b < kB; ++b) {
    for (std::int64_t h = 0; h < kHq; ++h) {
      std::int64_t kv = b * kHkv + h / (kHq / kHkv);
      for (std::int64_t i = 0; i < kL; ++i) {
        double sum = 0, row[kDv] = {};
        for (std::int64_t j = 0; j <= i; ++j) {
          if (ids[b * kL + i] != ids[b * kL + j]) continue;
          double s = 0;
          for (std::int64_t d = 0; d < kD; ++d) {
            s += q.x[((b * kHq + h) * kL + i) * kD + d] * k.x[(kv * kL + j) * kD + d];
          }
          double p = std::exp(s / std::sqrt(double(kD)));
          sum += p;
          for (std::int64_t d = 0; d < kDv; ++d) row[d] += p * v.x[(kv * kL + j) * kDv + d];
        }
        for (std::int64_t d = 0; d < kDv; ++d) {
          double got = out.x[((b * kHq + h) * kL + i) * kDv + d];
          worst = std::fmax(worst, std::fabs(got - row[d] / sum));
        }
      }
    }
  }
  return worst;
}

}  // namespace

int main() {
  std::mt19937 generator(1);
  Array q({kB, kHq, kL, kD}, generator), k({kB, kHkv, kL, kD}, generator),
      v({kB, kHkv, kL, kDv}, generator), dout({kB, kHq, kL, kDv}, generator),
      dlse({kB, kHq, kL}, generator);
  Array out({kB, kHq, kL, kDv}, generator), lse({kB, kHq, kL}, generator);
  std::vector<std::int32_t> ids(kB * kL);
  for (std::int64_t t = 0; t < kB * kL; ++t) ids[t] = static_cast<std::int32_t>(t % kL / 11);
  jali::Mask mask = jali::causal() & jali::document({ids.data(), jali::DType::kI32, {kB, kL}});

  jali::AttentionOptions options;
  auto forward = [&] {
    jali::attention_forward(q.view, k.view, v.view, mask, options, out.view, lse.view);
  };
  // sum(out * dout) + sum(lse * dlse), the scalar whose gradients the backward gives.
  auto loss = [&] {
    forward();
    double sum = 0;
    for (std::size_t n = 0; n < out.x.size(); ++n) sum += out.x[n] * dout.x[n];
    for (std::size_t n = 0; n < lse.x.size(); ++n) sum += lse.x[n] * dlse.x[n];
    return sum;
  };

  forward();
  expect(error_against_dense_loop(q, k, v, out, ids) < 1e-12, "forward equals a dense loop");

  Array dq({kB, kHq, kL, kD}, generator), dk({kB, kHkv, kL, kD}, generator),
      dv({kB, kHkv, kL, kDv}, generator);
  jali::AttentionGrads grads;
  grads.dq = dq.view;
  grads.dk = dk.view;
  grads.dv = dv.view;
  jali::attention_backward(q.view, k.view, v.view, out.view, lse.view, dout.view, dlse.view, mask,
                           options, grads);
  struct Pair {
    const char* name;
    Array& input;
    const Array& gradient;
  };
  for (Pair pair : {Pair{"dq", q, dq}, Pair{"dk", k, dk}, Pair{"dv", v, dv}}) {
    double worst = 0;
    for (std::size_t at = 0; at < pair.input.x.size(); at += 23) {
      const double h = 1e-5, kept = pair.input.x[at];
      pair.input.x[at] = kept + h;
      double up = loss();
      pair.input.x[at] = kept - h;
      double down = loss();
      pair.input.x[at] = kept;
      worst = std::fmax(worst, std::fabs((up - down) / (2 * h) - pair.gradient.x[at]));
    }
    expect(worst < 1e-7, std::string(pair.name) + " equals finite differences, off by at most " +
                             std::to_string(worst));
  }

  // A wrong argument is reported as jali::Error, across the library's border.
  std::string message;
  try {
    jali::attention_forward(q.view, v.view, v.view, mask, options, out.view, lse.view);
  } catch (const jali::Error& error) {
    message = error.what();
  }
  expect(!message.empty(), "k with v's head dim is an error: " + message);
  return num_failures ? 1 : 0;
}
