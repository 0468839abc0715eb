// The specification of attention in fp64: one row after the other, every key in turn. Knows neither
// plan nor tile classes, only which cells the mask's leaves call visible. Slow on purpose.
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/tensor.h"
#include "mask/bound.h"

namespace jali {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Where an element stands; dims of size 1 broadcast.
i64 offset_of(const TensorView& t, std::initializer_list<i64> index) {
  i64 at = 0;
  int dim = 0;
  for (i64 i : index) {
    if (t.shape[dim] > 1) at += i * t.stride[dim];
    ++dim;
  }
  return at;
}

double half_to_double(u16 x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  double size = std::ldexp(fraction, -24);  // subnormal
  if (exponent > 0) size = std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) size = fraction ? std::numeric_limits<double>::quiet_NaN() : kInfinity;
  return x & 0x8000 ? -size : size;
}

double load(const TensorView& t, i64 at) {
  switch (t.dtype) {
    case DType::kF64:
      return data_of<const double>(t)[at];
    case DType::kF32:
      return data_of<const float>(t)[at];
    case DType::kF16:
      return half_to_double(data_of<const u16>(t)[at]);
    case DType::kBF16: {
      const u32 bits = static_cast<u32>(data_of<const u16>(t)[at]) << 16;
      float x;
      std::memcpy(&x, &bits, sizeof x);
      return x;
    }
    default:
      type_error("attention_truth: dtype ", dtype_name(t.dtype),
                 "; expected a floating-point type");
  }
}

double& element(const TensorView& t, i64 at) { return data_of<double>(t)[at]; }

void set_zero(const TensorView& t) {
  i64 index[TensorView::kMaxRank] = {};
  for (i64 n = t.num_elements(); n > 0; --n) {
    i64 at = 0;
    for (int d = 0; d < t.rank; ++d) at += index[d] * t.stride[d];
    element(t, at) = 0;
    for (int d = t.rank - 1; d >= 0 && ++index[d] == t.shape[d]; --d) index[d] = 0;
  }
}

/// Each dim has the wanted size; -1 allows any.
void expect(const char* name, const TensorView& t, std::initializer_list<i64> wanted) {
  bool fits = t.rank == static_cast<int>(wanted.size()) && t.device == DeviceType::kCPU;
  std::string text;
  int dim = 0;
  for (i64 n : wanted) {
    fits = fits && (n < 0 || t.shape[dim] == n);
    text += (dim++ ? ", " : "") + (n < 0 ? std::string("any") : std::to_string(n));
  }
  if (!fits) {
    value_error("attention_truth: ", name, " is ", shape_text(t), "; expected [", text,
                "] in CPU memory");
  }
}

/// fp64 of the shape of `like`.
void expect_result(const char* name, const TensorView& t, const TensorView& like) {
  bool fits = t.rank == like.rank && t.dtype == DType::kF64 && t.device == DeviceType::kCPU;
  for (int d = 0; fits && d < t.rank; ++d) fits = t.shape[d] == like.shape[d];
  if (!fits) {
    value_error("attention_truth: ", name, " is ", dtype_name(t.dtype), " ", shape_text(t),
                "; expected float64 ", shape_text(like), " in CPU memory");
  }
}

/// The 15-bit dropout number of a cell. Blocks of 1024 rows and 8192 keys have 16 calls of Philox4x32-7, by the pairs of
/// rows and of keys in each 8 that they are for. Such a pair of keys has a word of a row, bilinear in constants of the
/// keys, E of 16 and S of their 128 keys, and of the row, F of 16 and R of its 64 rows.
u32 dropout_number(u64 seed, u32 b, u32 h, u32 i, u32 j) {
  u32 x[4] = {j / 8192 * 4 + j % 8 / 2, i / 1024 * 4 + i % 8 / 2, h, b};
  u32 key[2] = {static_cast<u32>(seed), static_cast<u32>(seed >> 32)};
  for (int round = 0; round < 7; ++round) {
    const u64 even = u64{0xD2511F53} * x[0], odd = u64{0xCD9E8D57} * x[2];
    const u32 next[4] = {static_cast<u32>(odd >> 32) ^ x[1] ^ key[0], static_cast<u32>(odd),
                         static_cast<u32>(even >> 32) ^ x[3] ^ key[1], static_cast<u32>(even)};
    std::memcpy(x, next, sizeof x);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  auto mix = [](u32 n) {  // with words of the fraction of pi
    const u32 y = (n + 1) * 0x9216D5D9, z = (y ^ y >> 15) * 0x8979FB1B;
    return z ^ z >> 16;
  };
  auto constant = [&](u32 n) { return mix(n) / 16 * 16 + n; };
  auto of_block = [&](u32 n) { return mix(16 + n) / 1024 * 1024 + 16 * n; };
  const u32 E = constant(j / 8 % 16), S = of_block(j / 128 % 64);
  const u32 F = constant(i / 8 % 8 * 2 + i % 2), R = of_block(i / 64 % 16);
  const u32 word = x[0] * (E + S) * (F + R) + x[1] * (E + S) + x[2] * (F + R) + x[3] +
                   E * (S / 1024) + F * (R / 1024);
  return word >> (j % 2 * 16) & 0x7fff;
}

/// The cells of row i: the mask's expression over what each leaf calls visible.
std::vector<bool> visible_keys(const BoundMask& mask, const Frame& f, i32 i) {
  using Op = BoundMask::Node::Op;
  const i32 num_words = ceil_div(f.num_keys, 64);
  std::vector<std::vector<u64>> cells;  // of each node
  for (const BoundMask::Node& node : mask.nodes()) {
    std::vector<u64> own(num_words);
    if (node.op == Op::kLeaf) {
      mask.leaves()[node.leaf]->fill(f, i, i + 1, 0, f.num_keys, own.data(), num_words);
    }
    for (i32 w = 0; w < num_words; ++w) {
      if (node.op == Op::kAnd) own[w] = cells[node.first][w] & cells[node.second][w];
      if (node.op == Op::kOr) own[w] = cells[node.first][w] | cells[node.second][w];
      if (node.op == Op::kNot) own[w] = ~cells[node.first][w];
    }
    cells.push_back(own);
  }
  std::vector<bool> visible(f.num_keys, true);
  for (i32 j = 0; j < f.num_keys && !mask.trivial(); ++j) {
    visible[j] = cells.back()[j / 64] >> (j % 64) & 1;
  }
  return visible;
}

class Truth {
 public:
  Truth(const TensorView& q, const TensorView& k, const TensorView& v, const Mask& mask,
        const AttentionOptions& options)
      : q_(q), k_(k), v_(v), o_(options), mask_(mask, shape()) {}

  void run(const TensorView& out, const TensorView& lse, const TensorView& dout,
           const TensorView& dlse, const AttentionGrads& grads) {
    check_results(out, lse, dout, dlse, grads);
    const TensorView* all[] = {&grads.dq,    &grads.dk,        &grads.dv,
                               &grads.dbias, &grads.dkey_bias, &grads.dsinks};
    for (const TensorView* grad : all) {
      if (grad->given()) set_zero(*grad);
    }
    for (i32 b = 0; b < mask_.num_batches(); ++b) {
      for (i32 h = 0; h < Hq_; ++h) {
        f_ = mask_.frame(b, h);
        for (i32 i = 0; i < f_.num_rows; ++i) {
          forward_row(i, out, lse);
          if (grads.dq.given()) backward_row(i, dout, dlse, grads);
        }
      }
    }
  }

 private:
  Shape shape() {
    const i64 any = -1;
    varlen_ ? expect("q", q_, {any, any, any}) : expect("q", q_, {any, any, any, any});
    Hq_ = q_.shape[1];
    D_ = q_.size(-1);
    varlen_ ? expect("k", k_, {any, any, D_}) : expect("k", k_, {q_.shape[0], any, any, D_});
    const i64 Hkv = k_.shape[1], Lk = k_.size(varlen_ ? 0 : 2);
    varlen_ ? expect("v", v_, {Lk, Hkv, any}) : expect("v", v_, {q_.shape[0], Hkv, Lk, any});
    Dv_ = v_.size(-1);
    if (o_.bias.given()) expect("bias", o_.bias, {any, any, any, any});
    if (o_.key_bias.given()) {
      varlen_ ? expect("key_bias", o_.key_bias, {any, Lk})
              : expect("key_bias", o_.key_bias, {any, any, Lk});
    }
    if (o_.alibi_slopes.given()) expect("alibi_slopes", o_.alibi_slopes, {Hq_});
    if (o_.sinks.given()) expect("sinks", o_.sinks, {Hq_});
    if (!(o_.dropout_p >= 0 && o_.dropout_p <= 1)) {
      value_error("attention_truth: dropout_p = ", o_.dropout_p, "; expected 0 to 1");
    }
    scale_ = std::isnan(o_.scale) ? 1 / std::sqrt(static_cast<double>(D_)) : o_.scale;

    Shape s;
    s.B = varlen_ ? o_.cu_seqlens_q.num_elements() - 1 : q_.shape[0];
    s.Hq = Hq_;
    s.Hkv = Hkv;
    s.Lq = varlen_ ? 0 : q_.shape[2];
    s.Lk = varlen_ ? 0 : Lk;
    s.Tq = varlen_ ? q_.shape[0] : 0;
    s.Tk = varlen_ ? Lk : 0;
    s.q_offset = o_.q_offset;
    s.cu_seqlens_q = o_.cu_seqlens_q;
    s.cu_seqlens_k = o_.cu_seqlens_k;
    return s;
  }

  void check_results(const TensorView& out, const TensorView& lse, const TensorView& dout,
                     const TensorView& dlse, const AttentionGrads& grads) const {
    auto expect_out = [&](const char* name, const TensorView& t) {
      varlen_ ? expect(name, t, {q_.shape[0], Hq_, Dv_})
              : expect(name, t, {q_.shape[0], Hq_, q_.shape[2], Dv_});
    };
    auto expect_lse = [&](const char* name, const TensorView& t) {
      varlen_ ? expect(name, t, {Hq_, q_.shape[0]})
              : expect(name, t, {q_.shape[0], Hq_, q_.shape[2]});
    };
    expect_out("out", out);
    expect_result("out", out, out);
    if (lse.given()) {
      expect_lse("lse", lse);
      expect_result("lse", lse, lse);
    }
    if (!grads.dq.given()) return;
    expect_out("dout", dout);
    if (dlse.given()) expect_lse("dlse", dlse);
    expect_result("dq", grads.dq, q_);
    expect_result("dk", grads.dk, k_);
    expect_result("dv", grads.dv, v_);
    if (grads.dbias.given()) expect_result("dbias", grads.dbias, o_.bias);
    if (grads.dkey_bias.given()) expect_result("dkey_bias", grads.dkey_bias, o_.key_bias);
    if (grads.dsinks.given()) expect_result("dsinks", grads.dsinks, o_.sinks);
  }

  // Offsets at the current sequence and query head; `heads`: how many the tensor has.
  i64 head(i64 heads) const { return f_.h / (Hq_ / heads); }
  i64 at_token(const TensorView& t, i64 start, i64 l, i64 d) const {
    return varlen_ ? offset_of(t, {start + l, head(t.shape[1]), d})
                   : offset_of(t, {f_.b, head(t.shape[1]), l, d});
  }
  i64 at_row(const TensorView& t, i64 i, i64 d) const { return at_token(t, f_.q_start, i, d); }
  i64 at_key(const TensorView& t, i64 j, i64 d) const { return at_token(t, f_.k_start, j, d); }
  i64 at_lse(const TensorView& t, i64 i) const {
    return varlen_ ? offset_of(t, {f_.h, f_.q_start + i}) : offset_of(t, {f_.b, f_.h, i});
  }
  i64 at_bias(const TensorView& t, i64 i, i64 j) const {
    return offset_of(t, {f_.b, head(t.shape[1]), i, j});
  }
  i64 at_key_bias(const TensorView& t, i64 j) const {
    return varlen_ ? offset_of(t, {head(t.shape[0]), f_.k_start + j})
                   : offset_of(t, {f_.b, head(t.shape[1]), j});
  }

  double kept(i32 i, i32 j) const { return o_.dropout_p > 0 ? dropout_factor(i, j) : 1; }
  /// 0 for a dropped cell, else one over the rate at which cells are kept.
  double dropout_factor(i32 i, i32 j) const {
    const long dropped = std::lround(o_.dropout_p * 32768), rest = 32768 - dropped;  // of 32768
    const u64 seed = static_cast<u64>(o_.seed);
    const u32 random = dropout_number(seed, f_.b, f_.h, i, j);
    // The rarer ones have the small numbers.
    const bool kept = dropped <= rest ? random >= dropped : random < rest;
    return kept ? 32768.0 / static_cast<double>(rest) : 0;
  }

  /// Leaves the row's weights and what the backward needs of them in keys_.
  void forward_row(i32 i, const TensorView& out, const TensorView& lse) {
    const std::vector<bool> visible = visible_keys(mask_, f_, i);
    const double sink = o_.sinks.given() ? load(o_.sinks, offset_of(o_.sinks, {f_.h})) : -kInfinity;
    double highest = sink;
    bool any = sink != -kInfinity;  // true for NaN, too
    keys_.clear();
    for (i32 j = 0; j < f_.num_keys; ++j) {
      if (!visible[j]) continue;
      Key key{j};
      double s = 0;
      for (i64 d = 0; d < D_; ++d) s += load(q_, at_row(q_, i, d)) * load(k_, at_key(k_, j, d));
      s *= scale_;
      if (o_.softcap > 0) {
        const double t = std::tanh(s / o_.softcap);
        s = o_.softcap * t;
        key.slope = 1 - t * t;
      }
      if (o_.bias.given()) s += load(o_.bias, at_bias(o_.bias, i, j));
      if (o_.key_bias.given()) s += load(o_.key_bias, at_key_bias(o_.key_bias, j));
      if (o_.alibi_slopes.given()) {
        const double distance = std::abs(static_cast<double>(i) + f_.q_offset - j);
        s -= load(o_.alibi_slopes, offset_of(o_.alibi_slopes, {f_.h})) * distance;
      }
      key.weight = s;
      highest = std::fmax(highest, s);
      any = any || s != -kInfinity;
      keys_.push_back(key);
    }
    if (!any) keys_.clear();
    double sum = any && sink != -kInfinity ? std::exp(sink - highest) : 0;
    for (Key& key : keys_) sum += key.weight = std::exp(key.weight - highest);
    for (Key& key : keys_) {
      key.weight /= sum;
      key.factor = kept(i, key.j);
    }
    sink_weight_ = any && sink != -kInfinity ? std::exp(sink - highest) / sum : 0;
    if (lse.given()) element(lse, at_lse(lse, i)) = any ? highest + std::log(sum) : -kInfinity;
    for (i64 d = 0; d < Dv_; ++d) {
      double& o = element(out, at_row(out, i, d)) = 0;
      for (const Key& key : keys_) o += key.weight * key.factor * load(v_, at_key(v_, key.j, d));
    }
  }

  void backward_row(i32 i, const TensorView& dout, const TensorView& dlse,
                    const AttentionGrads& grads) {
    // dweight of each key, then the softmax: ds = weight (dweight - sum of weight dweight + dlse).
    double sum = 0;
    std::vector<double> dweight;
    for (const Key& key : keys_) {
      double dot = 0;
      for (i64 d = 0; d < Dv_; ++d) {
        const double go = load(dout, at_row(dout, i, d));
        dot += go * load(v_, at_key(v_, key.j, d));
        element(grads.dv, at_key(grads.dv, key.j, d)) += key.weight * key.factor * go;
      }
      dweight.push_back(key.factor * dot);
      sum += key.weight * dweight.back();
    }
    const double rest = (dlse.given() ? load(dlse, at_lse(dlse, i)) : 0) - sum;
    for (std::size_t n = 0; n < keys_.size(); ++n) {
      const i32 j = keys_[n].j;
      const double ds = keys_[n].weight * (dweight[n] + rest);
      if (grads.dbias.given()) element(grads.dbias, at_bias(grads.dbias, i, j)) += ds;
      if (grads.dkey_bias.given()) element(grads.dkey_bias, at_key_bias(grads.dkey_bias, j)) += ds;
      const double dproduct = scale_ * keys_[n].slope * ds;
      for (i64 d = 0; d < D_; ++d) {
        element(grads.dq, at_row(grads.dq, i, d)) += dproduct * load(k_, at_key(k_, j, d));
        element(grads.dk, at_key(grads.dk, j, d)) += dproduct * load(q_, at_row(q_, i, d));
      }
    }
    if (grads.dsinks.given() && sink_weight_ != 0) {
      element(grads.dsinks, offset_of(grads.dsinks, {f_.h})) += sink_weight_ * rest;
    }
  }

  const TensorView &q_, &k_, &v_;
  const AttentionOptions& o_;
  const bool varlen_ = o_.cu_seqlens_q.given();
  i64 Hq_ = 0, D_ = 0, Dv_ = 0;
  double scale_ = 0;
  const BoundMask mask_;  // after what shape() sets

  struct Key {
    i32 j;
    double weight = 0;  // first its score, then its share of the softmax
    double factor = 1;  // of the dropout
    double slope = 1;   // of the softcap
  };
  Frame f_;                 // current sequence and head
  std::vector<Key> keys_;   // visible keys of the current row
  double sink_weight_ = 0;  // of the current row
};

}  // namespace

void attention_truth(const TensorView& q, const TensorView& k, const TensorView& v,
                     const Mask& mask, const AttentionOptions& options, const TensorView& out,
                     const TensorView& lse, const TensorView& dout, const TensorView& dlse,
                     const AttentionGrads& grads) {
  Truth(q, k, v, mask, options).run(out, lse, dout, dlse, grads);
}

}  // namespace jali
