// Attention on the CPU, forward and every gradient, against the fp64 truth on random problems; and
// the same bits for any number of threads.
#include <jali/jali.h>

#include <cstring>
#include <limits>
#include <random>

#include "check.h"

using namespace jali;

namespace {

std::mt19937 rng(7);
int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
bool coin() { return draw(0, 1) == 1; }

std::uint16_t bf16_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float float_of(std::uint16_t x) {
  const std::uint32_t bits = std::uint32_t{x} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

/// An array that owns its memory; every element is followed by nothing, so that ASan sees overruns.
struct Array {
  TensorView view;
  std::vector<char> bytes;
  Array() = default;
  Array(DType dtype, std::initializer_list<std::int64_t> shape, double fill = NAN) {
    std::int64_t n = 1;
    for (std::int64_t s : shape) n *= s;
    bytes.resize(n * (dtype == DType::kF64                           ? 8
                      : dtype == DType::kF32 || dtype == DType::kI32 ? 4
                                                                     : 2));
    view = TensorView(bytes.data(), dtype, shape);
    for (std::int64_t i = 0; i < n; ++i) set(i, fill);
  }
  Array(Array&&) = default;  // a moved vector keeps its memory
  Array& operator=(Array&&) = default;
  std::int64_t size() const { return view.rank < 0 ? 0 : view.num_elements(); }
  double get(std::int64_t i) const {
    if (view.dtype == DType::kF64) return reinterpret_cast<const double*>(bytes.data())[i];
    if (view.dtype == DType::kF32) return reinterpret_cast<const float*>(bytes.data())[i];
    return float_of(reinterpret_cast<const std::uint16_t*>(bytes.data())[i]);
  }
  void set(std::int64_t i, double x) {
    if (view.dtype == DType::kF64) reinterpret_cast<double*>(bytes.data())[i] = x;
    if (view.dtype == DType::kF32)
      reinterpret_cast<float*>(bytes.data())[i] = static_cast<float>(x);
    if (view.dtype == DType::kI32) reinterpret_cast<int*>(bytes.data())[i] = static_cast<int>(x);
    if (view.dtype == DType::kBF16) {
      reinterpret_cast<std::uint16_t*>(bytes.data())[i] = bf16_of(static_cast<float>(x));
    }
  }
  void randomize(double spread = 1) {
    std::normal_distribution<double> normal(0, spread);
    for (std::int64_t i = 0; i < size(); ++i) set(i, normal(rng));
  }
};

Array random(DType dtype, std::initializer_list<std::int64_t> shape, double spread = 1) {
  Array a(dtype, shape);
  a.randomize(spread);
  return a;
}
Array zeros_like(const Array& a, DType dtype) {
  Array z;
  if (a.view.rank < 0) return z;
  z.bytes.resize(a.size() * 8);
  z.view = a.view;
  z.view.data = z.bytes.data();
  z.view.dtype = dtype;
  for (std::int64_t i = 0; i < z.size(); ++i) z.set(i, 0);
  return z;
}

struct Problem {
  DType dtype;
  int B, Hq, Hkv, Lq, Lk, D, Dv;
  bool varlen = false;
  Array q, k, v, dout, dlse, bias, key_bias, slopes, sinks, ids, cu_q, cu_k;
  Mask mask;
  AttentionOptions options;
  std::string text;
};

Problem random_problem(DType dtype) {
  Problem p;
  p.dtype = dtype;
  p.B = draw(1, 3);
  p.Hkv = draw(1, 2);
  p.Hq = p.Hkv * draw(1, 3);
  const int lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 128, 130, 200};
  p.Lq = lengths[draw(0, 11)];
  p.Lk = coin() ? p.Lq : lengths[draw(0, 11)];
  const int dims[] = {1, 3, 8, 16, 20, 32, 64, 80};
  p.D = dims[draw(0, 7)];
  p.Dv = coin() ? p.D : dims[draw(0, 7)];
  p.varlen = draw(0, 3) == 0;
  const DType f = coin() ? dtype : DType::kF32;
  std::ostringstream text;
  text << "B" << p.B << " Hq" << p.Hq << " Hkv" << p.Hkv << " Lq" << p.Lq << " Lk" << p.Lk << " D"
       << p.D << " Dv" << p.Dv;
  int tq = p.Lq, tk = p.Lk, maxq = p.Lq, maxk = p.Lk;
  if (p.varlen) {
    p.cu_q = Array(DType::kI32, {p.B + 1}, 0);
    p.cu_k = Array(DType::kI32, {p.B + 1}, 0);
    tq = tk = maxq = maxk = 0;
    text << " varlen";
    for (int b = 0; b < p.B; ++b) {
      const int lq = draw(0, p.Lq), lk = draw(0, p.Lk);
      reinterpret_cast<int*>(p.cu_q.bytes.data())[b + 1] = tq += lq;
      reinterpret_cast<int*>(p.cu_k.bytes.data())[b + 1] = tk += lk;
      maxq = std::max(maxq, lq);
      maxk = std::max(maxk, lk);
      text << " " << lq << "/" << lk;
    }
    p.options.cu_seqlens_q = p.cu_q.view;
    p.options.cu_seqlens_k = p.cu_k.view;
    p.q = random(dtype, {tq, p.Hq, p.D});
    p.k = random(dtype, {tk, p.Hkv, p.D});
    p.v = random(dtype, {tk, p.Hkv, p.Dv});
    p.dout = random(dtype, {tq, p.Hq, p.Dv});
  } else {
    p.q = random(dtype, {p.B, p.Hq, p.Lq, p.D});
    p.k = random(dtype, {p.B, p.Hkv, p.Lk, p.D});
    p.v = random(dtype, {p.B, p.Hkv, p.Lk, p.Dv});
    p.dout = random(dtype, {p.B, p.Hq, p.Lq, p.Dv});
  }
  const DType lse_type = dtype == DType::kF64 ? dtype : DType::kF32;
  if (coin()) {
    text << " dlse";
    p.dlse = p.varlen ? random(lse_type, {p.Hq, tq}) : random(lse_type, {p.B, p.Hq, p.Lq});
  }
  auto heads = [&] { return (int[]){1, p.Hkv, p.Hq}[draw(0, 2)]; };
  if (coin()) {
    const int b = coin() ? p.B : 1, h = heads(), i = coin() ? maxq : 1, j = coin() ? maxk : 1;
    text << " bias[" << b << "," << h << "," << i << "," << j << "]";
    p.bias = random(f, {b, h, i, j});
    p.options.bias = p.bias.view;
  }
  if (coin()) {
    const int b = coin() && !p.varlen ? p.B : 1, h = heads();
    text << " key_bias[" << b << "," << h << "]";
    p.key_bias = p.varlen ? random(f, {h, tk}) : random(f, {b, h, p.Lk});
    p.options.key_bias = p.key_bias.view;
  }
  if (coin()) {
    text << " alibi";
    p.slopes = random(DType::kF32, {p.Hq}, 0.1);
    p.options.alibi_slopes = p.slopes.view;
  }
  if (coin()) {
    text << " sinks";
    p.sinks = random(f, {p.Hq});
    p.options.sinks = p.sinks.view;
  }
  if (coin()) p.options.softcap = 2.5, text << " softcap";
  if (draw(0, 3) == 0) p.options.dropout_p = 0.3, text << " dropout";
  p.options.seed = draw(0, 1 << 30);
  if (coin()) p.options.q_offset = draw(-20, 20), text << " offset " << p.options.q_offset.number;
  switch (draw(0, 3)) {
    case 0:
      p.mask = causal();
      text << " causal";
      break;
    case 1:
      p.mask = window(draw(0, 70), draw(0, 5));
      text << " window";
      break;
    case 2:
      p.mask = causal() & (~window(draw(0, 9), 3) | prefix(draw(0, 80)));
      text << " causal & (~window | prefix)";
      break;
    default:
      break;
  }
  p.options.num_threads = draw(1, 4);
  p.text = text.str();
  return p;
}

struct Results {
  Array out, lse, dq, dk, dv, dbias, dkey_bias, dsinks;
  AttentionGrads grads() {
    return {dq.view, dk.view, dv.view, dbias.view, dkey_bias.view, dsinks.view};
  }
};
Results allocate(const Problem& p, bool truth) {
  Results r;
  auto like = [&](const Array& a) { return zeros_like(a, truth ? DType::kF64 : a.view.dtype); };
  r.out = like(p.dout);
  const DType lse = truth || p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  r.lse = p.varlen ? Array(lse, {p.Hq, p.q.view.shape[0]}, 0) : Array(lse, {p.B, p.Hq, p.Lq}, 0);
  r.dq = like(p.q);
  r.dk = like(p.k);
  r.dv = like(p.v);
  r.dbias = like(p.bias);
  r.dkey_bias = like(p.key_bias);
  r.dsinks = like(p.sinks);
  return r;
}

Results run(const Problem& p) {
  Results r = allocate(p, false);
  attention_forward(p.q.view, p.k.view, p.v.view, p.mask, p.options, r.out.view, r.lse.view);
  attention_backward(p.q.view, p.k.view, p.v.view, r.out.view, r.lse.view, p.dout.view, p.dlse.view,
                     p.mask, p.options, r.grads());
  return r;
}

bool compare(const Problem& p, const char* what, const Array& got, const Array& want,
             double tolerance) {
  double worst = 0, largest = 0;
  for (std::int64_t i = 0; i < want.size(); ++i) {
    const double x = got.get(i), y = want.get(i);
    if (x == y) continue;  // infinities too
    const double off = std::abs(x - y);
    if (!(off <= worst)) worst = off;
    largest = std::max(largest, std::abs(y));
  }
  return check::report(
      worst <= tolerance * (1 + largest), __FILE__, __LINE__,
      p.text + ": " + what + " is off by " + check::show(worst) + " of " + check::show(largest));
}

/// Output, lse and all gradients against the truth.
bool check_problem(const Problem& p, double tolerance) {
  Results got = run(p), want = allocate(p, true);
  attention_truth(p.q.view, p.k.view, p.v.view, p.mask, p.options, want.out.view, want.lse.view,
                  p.dout.view, p.dlse.view, want.grads());
  bool ok = compare(p, "out", got.out, want.out, tolerance);
  ok &= compare(p, "lse", got.lse, want.lse, tolerance);
  ok &= compare(p, "dq", got.dq, want.dq, tolerance);
  ok &= compare(p, "dk", got.dk, want.dk, tolerance);
  ok &= compare(p, "dv", got.dv, want.dv, tolerance);
  // Sums over many cells whose true value may be 0, stored in the bias's own dtype.
  const double of_sums = std::max(16 * tolerance, 1e-6);
  ok &= compare(p, "dbias", got.dbias, want.dbias, of_sums);
  ok &= compare(p, "dkey_bias", got.dkey_bias, want.dkey_bias, of_sums);
  ok &= compare(p, "dsinks", got.dsinks, want.dsinks, of_sums);
  return ok;
}

void check_random(DType dtype, int cases, double tolerance) {
  for (int n = 0; n < cases; ++n) {
    if (!check_problem(random_problem(dtype), tolerance)) return;
  }
}

/// One sequence, no option.
Problem plain_problem(DType dtype, int Hq, int Hkv, int Lq, int Lk, int D, int Dv) {
  Problem p;
  p.dtype = dtype;
  p.B = 1;
  p.Hq = Hq;
  p.Hkv = Hkv;
  p.Lq = Lq;
  p.Lk = Lk;
  p.D = D;
  p.Dv = Dv;
  p.q = random(dtype, {1, Hq, Lq, D});
  p.k = random(dtype, {1, Hkv, Lk, D});
  p.v = random(dtype, {1, Hkv, Lk, Dv});
  p.dout = random(dtype, {1, Hq, Lq, Dv});
  std::ostringstream text;
  text << "Hq" << Hq << " Hkv" << Hkv << " Lq" << Lq << " Lk" << Lk << " D" << D << " Dv" << Dv;
  p.text = text.str();
  return p;
}

}  // namespace

TEST(fp64_against_truth) { check_random(DType::kF64, 150, 1e-12); }
TEST(fp32_against_truth) { check_random(DType::kF32, 150, 4e-6); }
TEST(bf16_against_truth) { check_random(DType::kBF16, 100, 2e-2); }

TEST(same_bits_for_any_number_of_threads) {
  for (int n = 0; n < 25; ++n) {
    Problem p = random_problem(DType::kF32);
    p.options.num_threads = 1;
    const Results one = run(p);
    for (int threads : {2, 3, 7}) {
      p.options.num_threads = threads;
      const Results many = run(p);
      const Array* a[] = {&one.out, &one.lse,   &one.dq,        &one.dk,
                          &one.dv,  &one.dbias, &one.dkey_bias, &one.dsinks};
      const Array* b[] = {&many.out, &many.lse,   &many.dq,        &many.dk,
                          &many.dv,  &many.dbias, &many.dkey_bias, &many.dsinks};
      for (int i = 0; i < 8; ++i) {
        if (!check::report(a[i]->bytes == b[i]->bytes, __FILE__, __LINE__,
                           p.text + ": result " + std::to_string(i) + " differs with " +
                               std::to_string(threads) + " threads")) {
          return;
        }
      }
    }
  }
}

TEST(wide_heads) {
  for (DType dtype : {DType::kF32, DType::kF64}) {
    for (auto [D, Dv] : {std::pair{129, 256}, {1024, 1024}, {1024, 1}, {1, 1000}}) {
      Problem p = plain_problem(dtype, 2, 1, 70, 140, D, Dv);
      p.mask = causal();
      check_problem(p, dtype == DType::kF32 ? 4e-6 : 1e-12);
    }
  }
}

TEST(long_sequences) {
  for (int L : {513, 650}) {
    Problem p = plain_problem(DType::kF32, 2, 2, L, L, 16, 16);
    for (const Mask& mask : {Mask(), causal(), window(100, 0), ~causal()}) {
      for (int threads : {1, 3}) {
        p.mask = mask;
        p.options.num_threads = threads;
        check_problem(p, 4e-6);
      }
    }
  }
}

TEST(far_off_tiles_are_passed_over) {
  Problem p = plain_problem(DType::kF32, 2, 1, 1500, 1500, 8, 8);
  for (const Mask& mask : {causal() & (window(70, 0) | prefix(3)), ~window(900, 2000)}) {
    p.mask = mask;
    p.options.num_threads = 3;
    check_problem(p, 4e-6);
  }
}

TEST(any_strides) {
  // The same numbers as [B, L, H, D] and with gaps between rows.
  Problem p = plain_problem(DType::kF32, 2, 2, 90, 90, 32, 32);
  const Results want = run(p);
  for (int gap : {0, 5}) {
    const std::int64_t L = 90, H = 2, D = 32, width = D + gap;
    std::vector<Array> arrays;
    auto strided = [&](const Array& from) {
      arrays.push_back(Array(DType::kF32, {L, H, width}, 777));
      Array& to = arrays.back();
      TensorView view = to.view;
      view.rank = 4;
      const std::int64_t shape[] = {1, H, L, D}, stride[] = {0, width, H * width, 1};
      for (int d = 0; d < 4; ++d) view.shape[d] = shape[d], view.stride[d] = stride[d];
      for (std::int64_t n = 0; n < H * L * D; ++n) {
        to.set((n / D % L) * H * width + n / D / L * width + n % D, from.get(n));
      }
      return view;
    };
    const TensorView q = strided(p.q), k = strided(p.k), v = strided(p.v), dout = strided(p.dout);
    const Array zero = zeros_like(p.q, DType::kF32);
    const TensorView out = strided(zero), dq = strided(zero), dk = strided(zero),
                     dv = strided(zero);
    Array lse(DType::kF32, {1, 2, 90});
    AttentionGrads grads;
    grads.dq = dq, grads.dk = dk, grads.dv = dv;
    attention_forward(q, k, v, p.mask, p.options, out, lse.view);
    attention_backward(q, k, v, out, lse.view, dout, {}, p.mask, p.options, grads);
    const TensorView* got[] = {&out, &dq, &dk, &dv};
    const Array* wanted[] = {&want.out, &want.dq, &want.dk, &want.dv};
    for (int t = 0; t < 4; ++t) {
      double worst = 0;
      const float* at = static_cast<const float*>(got[t]->data);
      for (std::int64_t n = 0; n < H * L * D; ++n) {
        const float x = at[(n / D % L) * H * width + n / D / L * width + n % D];
        worst = std::max(worst, std::abs(x - wanted[t]->get(n)));
      }
      CHECK_EQ(worst, 0.0);
      if (gap > 0) CHECK_EQ(at[D], 777.f);  // nothing written between rows
    }
  }
}

TEST(rows_of_minus_infinity) {
  // Row 1 has only -inf scores, row 2 only the lowest finite ones: an even mean, as in torch.
  Problem p = plain_problem(DType::kF32, 1, 1, 20, 20, 16, 16);
  p.bias = Array(DType::kF32, {1, 1, 20, 20}, 0);
  for (int j = 0; j < 20; ++j) {
    p.bias.set(20 + j, -INFINITY);
    p.bias.set(40 + j, std::numeric_limits<float>::lowest());
  }
  p.options.bias = p.bias.view;
  const Results r = run(p);
  CHECK_EQ(r.lse.get(1), -INFINITY);
  for (int d = 0; d < 16; ++d) {
    double mean = 0;
    for (int j = 0; j < 20; ++j) mean += p.v.get(j * 16 + d) / 20;
    CHECK_EQ(r.out.get(16 + d), 0.0);
    CHECK_EQ(r.dq.get(16 + d), 0.0);
    CHECK_NEAR(r.out.get(32 + d), mean, 1e-6);
  }
  for (const Array* grad : {&r.dq, &r.dk, &r.dv}) {
    for (int n = 0; n < 20 * 16; ++n) CHECK(std::isfinite(grad->get(n)));
  }
}

TEST(infinite_and_nan_scores) {
  Problem p = plain_problem(DType::kF32, 1, 1, 30, 30, 16, 16);
  p.q.set(3 * 16, INFINITY);
  p.q.set(7 * 16, NAN);
  p.k.set(2 * 16, 1), p.k.set(4 * 16, -1);
  const Results r = run(p);
  for (int i = 0; i < 30; ++i) CHECK_EQ(std::isnan(r.out.get(i * 16)), i == 3 || i == 7);
}

TEST(invisible_keys_do_not_leak) {
  // Key 5 is NaN throughout, and hidden from rows 0..4 by the causal mask: they stay finite.
  for (DType dtype : {DType::kF32, DType::kF64}) {
    const int L = 40, D = 16;
    Problem p = plain_problem(dtype, 1, 1, L, L, D, D);
    for (int d = 0; d < D; ++d) p.k.set(5 * D + d, NAN), p.v.set(5 * D + d, NAN);
    p.mask = causal();
    Results r = run(p);
    for (int i = 0; i < 5 * D; ++i) {
      CHECK(std::isfinite(r.out.get(i)));
      CHECK(std::isfinite(r.dq.get(i)));
    }
    CHECK(std::isnan(r.out.get(5 * D)));
    CHECK(std::isnan(r.out.get(39 * D)));
  }
}
