// The truth against itself: its gradients against finite differences of its forward for every
// option, and the forward against values that are known without it.
#include <jali/jali.h>

#include <cmath>
#include <random>

#include "base/philox.h"
#include "check.h"
#include "mask/leaf.h"

using namespace jali;

namespace {

struct Array {
  std::vector<double> data;
  TensorView view;
  Array() = default;
  Array(std::initializer_list<i64> shape) : Array(std::vector<i64>(shape)) {}
  explicit Array(const std::vector<i64>& shape) {
    i64 size = 1;
    for (i64 n : shape) size *= n;
    data.assign(static_cast<std::size_t>(std::max<i64>(size, 1)), 0);
    view = TensorView(data.data(), DType::kF64, {});
    view.rank = static_cast<int>(shape.size());
    for (int d = view.rank - 1; d >= 0; --d) {
      view.shape[d] = shape[d];
      view.stride[d] = d + 1 < view.rank ? view.stride[d + 1] * shape[d + 1] : 1;
    }
  }
  Array(const Array&) = delete;
  Array(Array&& other) noexcept : data(std::move(other.data)), view(other.view) {}
  Array& operator=(Array&& other) noexcept {
    data = std::move(other.data);
    view = other.view;
    return *this;
  }
  void randomize(unsigned seed, double size = 1) {
    std::mt19937 state(seed);
    std::normal_distribution<double> normal(0, size);
    for (double& x : data) x = normal(state);
  }
  Array like() const { return Array(std::vector<i64>(view.shape, view.shape + view.rank)); }
};

/// One call with all its tensors; absent ones are empty.
struct Call {
  Array q, k, v, bias, key_bias, sinks, out, lse, dout, dlse;
  std::vector<float> slopes;
  std::vector<i32> cu_q, cu_k;
  Mask mask;
  AttentionOptions options;

  void prepare() {
    auto view_of = [](const Array& a) { return a.data.empty() ? TensorView() : a.view; };
    options.bias = view_of(bias);
    options.key_bias = view_of(key_bias);
    options.sinks = view_of(sinks);
    const TensorView& s = q.view;
    if (s.rank == 4) {
      out = Array({s.shape[0], s.shape[1], s.shape[2], v.view.size(-1)});
      lse = Array({s.shape[0], s.shape[1], s.shape[2]});
    } else {
      out = Array({s.shape[0], s.shape[1], v.view.size(-1)});
      lse = Array({s.shape[1], s.shape[0]});
    }
    dout = out.like();
    dlse = lse.like();
    dout.randomize(91);
    dlse.randomize(92);
  }
  /// What the gradients are gradients of: out . dout + lse . dlse.
  double loss() {
    attention_truth(q.view, k.view, v.view, mask, options, out.view, lse.view, {}, {}, {});
    double sum = 0;
    for (std::size_t n = 0; n < out.data.size(); ++n) sum += out.data[n] * dout.data[n];
    for (std::size_t n = 0; n < lse.data.size(); ++n) {
      if (std::isfinite(lse.data[n])) sum += lse.data[n] * dlse.data[n];
    }
    return sum;
  }
};

void check_gradients(Call& c) {
  c.prepare();
  Array dq = c.q.like(), dk = c.k.like(), dv = c.v.like(), dbias, dkey_bias, dsinks;
  AttentionGrads grads;
  grads.dq = dq.view;
  grads.dk = dk.view;
  grads.dv = dv.view;
  auto add = [](const Array& input, Array& grad, TensorView& view) {
    if (input.data.empty()) return;
    grad = input.like();
    view = grad.view;
  };
  add(c.bias, dbias, grads.dbias);
  add(c.key_bias, dkey_bias, grads.dkey_bias);
  add(c.sinks, dsinks, grads.dsinks);
  attention_truth(c.q.view, c.k.view, c.v.view, c.mask, c.options, c.out.view, c.lse.view,
                  c.dout.view, c.dlse.view, grads);
  auto compare = [&](Array& input, const Array& grad) {
    for (std::size_t n = 0; n < input.data.size(); ++n) {
      const double x = input.data[n], step = 1e-5;
      input.data[n] = x + step;
      const double above = c.loss();
      input.data[n] = x - step;
      const double below = c.loss();
      input.data[n] = x;
      const double slope = (above - below) / (2 * step);
      if (!CHECK_NEAR(grad.data[n], slope, 1e-7 * (1 + std::abs(slope)))) return;
    }
  };
  compare(c.q, dq);
  compare(c.k, dk);
  compare(c.v, dv);
  compare(c.bias, dbias);
  compare(c.key_bias, dkey_bias);
  compare(c.sinks, dsinks);
}

/// B 2, Hq 4, Hkv 2, Lq 5, Lk 7, D 3, Dv 2, causal.
Call small() {
  Call c;
  c.q = Array({2, 4, 5, 3});
  c.k = Array({2, 2, 7, 3});
  c.v = Array({2, 2, 7, 2});
  c.q.randomize(1);
  c.k.randomize(2);
  c.v.randomize(3);
  c.mask = causal();
  return c;
}

}  // namespace

TEST(gradients_of_plain_attention) {
  Call c = small();
  check_gradients(c);
  c.options.scale = -0.7;
  c.mask = Mask();
  check_gradients(c);
  c.mask = window(1, 0, 0) & ~prefix(2);  // rows that see nothing
  check_gradients(c);
}

TEST(gradients_of_every_option) {
  Call c = small();
  c.options.softcap = 0.8;
  check_gradients(c);
  for (auto shape : {std::vector<i64>{2, 4, 5, 7}, {1, 2, 5, 1}, {2, 1, 1, 7}, {1, 1, 1, 1}}) {
    c.bias = Array(shape);
    c.bias.randomize(4);
    check_gradients(c);
  }
  for (auto shape : {std::vector<i64>{2, 4, 7}, {1, 2, 7}, {2, 1, 7}}) {
    c.key_bias = Array(shape);
    c.key_bias.randomize(5);
    check_gradients(c);
  }
  c.sinks = Array({4});
  c.sinks.randomize(6);
  check_gradients(c);
  c.slopes = {0.1f, 0.2f, 0.3f, 0.4f};
  c.options.alibi_slopes = TensorView(c.slopes.data(), DType::kF32, {4});
  check_gradients(c);
  c.options.dropout_p = 0.4;
  c.options.seed = 0x123456789ab;
  check_gradients(c);
  c.mask = window(1, 0, 0) & ~prefix(2);
  check_gradients(c);
}

TEST(gradients_of_packed_sequences) {
  Call c;
  c.q = Array({9, 4, 3});
  c.k = Array({11, 2, 3});
  c.v = Array({11, 2, 2});
  c.key_bias = Array({2, 11});
  c.bias = Array({3, 1, 6, 5});
  for (Array* a : {&c.q, &c.k, &c.v, &c.key_bias, &c.bias}) a->randomize(7);
  c.cu_q = {0, 3, 3, 9};
  c.cu_k = {0, 5, 6, 11};
  c.options.cu_seqlens_q = TensorView(c.cu_q.data(), DType::kI32, {4});
  c.options.cu_seqlens_k = TensorView(c.cu_k.data(), DType::kI32, {4});
  c.mask = causal();
  check_gradients(c);
}

// Packed sequences are the same attention as each sequence alone.
TEST(packed_is_each_sequence_alone) {
  Call c;
  c.q = Array({9, 2, 3});
  c.k = Array({11, 1, 3});
  c.v = Array({11, 1, 2});
  for (Array* a : {&c.q, &c.k, &c.v}) a->randomize(8);
  c.cu_q = {0, 3, 9};
  c.cu_k = {0, 5, 11};
  c.options.cu_seqlens_q = TensorView(c.cu_q.data(), DType::kI32, {3});
  c.options.cu_seqlens_k = TensorView(c.cu_k.data(), DType::kI32, {3});
  c.mask = causal();
  c.prepare();
  c.loss();
  for (int b = 0; b < 2; ++b) {
    const i64 m = c.cu_q[b + 1] - c.cu_q[b], n = c.cu_k[b + 1] - c.cu_k[b];
    auto alone = [](const Array& a, i64 start, i64 length) {
      TensorView t = a.view, out = t;  // [T, H, D] to [1, H, L, D]
      out.rank = 4;
      const i64 shape[] = {1, t.shape[1], length, t.shape[2]};
      const i64 stride[] = {0, t.stride[1], t.stride[0], t.stride[2]};
      for (int d = 0; d < 4; ++d) out.shape[d] = shape[d], out.stride[d] = stride[d];
      out.data = static_cast<double*>(t.data) + start * t.stride[0];
      return out;
    };
    Array out({1, 2, m, 2}), lse({1, 2, m});
    attention_truth(alone(c.q, c.cu_q[b], m), alone(c.k, c.cu_k[b], n), alone(c.v, c.cu_k[b], n),
                    c.mask, {}, out.view, lse.view, {}, {}, {});
    for (i64 h = 0; h < 2; ++h) {
      for (i64 i = 0; i < m; ++i) {
        CHECK_EQ(lse.data[h * m + i], c.lse.data[h * 9 + c.cu_q[b] + i]);
        for (i64 d = 0; d < 2; ++d) {
          CHECK_EQ(out.data[(h * m + i) * 2 + d], c.out.data[((c.cu_q[b] + i) * 2 + h) * 2 + d]);
        }
      }
    }
  }
}

TEST(rows_without_keys) {
  Call c = small();
  c.mask = prefix(0);
  c.prepare();
  c.loss();
  for (double x : c.out.data) CHECK_EQ(x, 0.0);
  for (double x : c.lse.data) CHECK_EQ(x, -INFINITY);
  c.sinks = Array({4});
  c.sinks.randomize(9);
  c.prepare();
  c.loss();
  for (double x : c.out.data) CHECK_EQ(x, 0.0);
  for (int n = 0; n < 2 * 4 * 5; ++n) CHECK_NEAR(c.lse.data[n], c.sinks.data[n / 5 % 4], 1e-15);
}

// Equal scores: the mean of the visible values; a sink of score 0 counts like one more key.
TEST(means_of_equal_scores) {
  Call c = small();
  c.options.scale = 0;
  c.mask = causal(0);
  c.sinks = Array({4});
  c.prepare();
  c.loss();
  for (int i = 0; i < 5; ++i) {
    double sum = 0;
    for (int j = 0; j <= i; ++j) sum += c.v.data[j * 2];
    CHECK_NEAR(c.out.data[i * 2], sum / (i + 2), 1e-15);
    CHECK_NEAR(c.lse.data[i], std::log(i + 2.0), 1e-15);
  }
}

TEST(nan_and_infinity_propagate) {
  Call c = small();
  c.q.data[0] = NAN;
  c.prepare();
  c.loss();
  CHECK(std::isnan(c.out.data[0]) && std::isnan(c.lse.data[0]));
  CHECK(!std::isnan(c.out.data[2]));
  Call low = small();
  low.key_bias = Array({1, 1, 7});
  low.key_bias.data.assign(7, -INFINITY);
  low.prepare();
  low.loss();
  for (double x : low.out.data) CHECK_EQ(x, 0.0);
  for (double x : low.lse.data) CHECK_EQ(x, -INFINITY);
}

// The rates of dropout, its address (a cell keeps its number when the shape grows), its scale.
TEST(dropout_drops_the_stated_share) {
  for (double p : {0.0, 0.1, 0.5, 1.0}) {
    Call c;
    const i64 L = 64, Lk = 100;
    c.q = Array({2, 2, L, 1});
    c.k = Array({2, 1, Lk, 1});
    c.v = Array({2, 1, Lk, Lk});  // one-hot: out shows the weights
    for (i64 b = 0; b < 2; ++b) {
      for (i64 j = 0; j < Lk; ++j) c.v.data[(b * Lk + j) * Lk + j] = 1;
    }
    c.options.dropout_p = p;
    c.options.seed = 5;
    c.prepare();
    c.loss();
    const double rate = 1 - std::round(p * 32768) / 32768;
    long kept = 0;
    for (double x : c.out.data) {
      kept += x != 0;
      if (x != 0) CHECK_NEAR(x, 1 / rate / static_cast<double>(Lk), 1e-15);
    }
    CHECK_NEAR(static_cast<double>(kept) / c.out.data.size(), 1 - p, 0.02);
    // The truth has its own generator; the backends' header must drop the same cells.
    for (u32 n = 0; n < c.out.data.size(); ++n) {
      const u32 j = n % Lk, i = n / Lk % L, h = n / Lk / L % 2, b = n / Lk / L / 2;
      const bool kept = DropoutRule(dropout_threshold(p)).kept(dropout_number(5, b, h, i, j));
      if (!CHECK_EQ(c.out.data[n] != 0, kept)) break;
    }
    std::vector<double> row(c.out.data.begin(), c.out.data.begin() + Lk);
    c.options.seed = 6;
    c.loss();
    const bool same = std::equal(row.begin(), row.end(), c.out.data.begin());
    CHECK_EQ(same, p == 0 || p == 1);
  }
}

TEST(inputs_of_16_bits) {
  for (bool bf16 : {false, true}) {
    // 1, -2.5, a subnormal of the type; read back through v with one key.
    const u16 half[] = {0x3c00, 0xc100, 0x0001}, brain[] = {0x3f80, 0xc020, 0x0001};
    const double values[] = {1, -2.5, bf16 ? std::ldexp(1, -133) : std::ldexp(1, -24)};
    u16 data[3];
    for (int n = 0; n < 3; ++n) data[n] = bf16 ? brain[n] : half[n];
    const TensorView v(data, bf16 ? DType::kBF16 : DType::kF16, {1, 1, 1, 3});
    Array out({1, 1, 1, 3});
    attention_truth(v, v, v, Mask(), {}, out.view, {}, {}, {}, {});
    for (int n = 0; n < 3; ++n) CHECK_EQ(out.data[n], values[n]);
  }
}

TEST(wrong_arguments_are_refused) {
  Call c = small();
  c.prepare();
  Array wrong({2, 4, 5, 5});
  CHECK_THROWS(
      attention_truth(c.q.view, c.k.view, c.v.view, c.mask, c.options, wrong.view, {}, {}, {}, {}),
      Error, "expected [2, 4, 5, 2]");
  CHECK_THROWS(attention_truth(c.q.view, wrong.view, c.v.view, c.mask, c.options, c.out.view, {},
                               {}, {}, {}),
               Error, "k is [2, 4, 5, 5]");
  c.options.dropout_p = 1.5;
  CHECK_THROWS(c.loss(), Error, "dropout_p = 1.5");
}
