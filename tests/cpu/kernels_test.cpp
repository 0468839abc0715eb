// Kernels of every instruction set that this machine has: dtypes, packing, dropout bits.
#include "cpu/kernels.h"

#include <cstring>
#include <random>

#include "base/philox.h"
#include "check.h"

using namespace jali;
using namespace jali::cpu;

namespace {

std::vector<std::pair<std::string, const KernelTable*>> tables() {
#if defined(__x86_64__)
  std::vector<std::pair<std::string, const KernelTable*>> list = {{"v2", &kernels_v2()}};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    list.emplace_back("v3", &kernels_v3());
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    list.emplace_back("v4", &kernels_v4());
  }
  return list;
#else
  return {{"generic", &kernels_generic()}};
#endif
}

double half_value(u16 x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  double size = std::ldexp(fraction, -24);
  if (exponent > 0) size = std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) size = fraction ? NAN : INFINITY;
  return x & 0x8000 ? -size : size;
}
double bf16_value(u16 x) {
  const u32 bits = u32{x} << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

/// The 16-bit number nearest to x, ties to the even pattern, by looking at all of one sign.
u16 nearest(double (*value)(u16), double x, u16 infinity) {
  u16 low = 0, high = infinity;  // value(low) <= |x| < value(high)
  const double size = std::abs(x);
  while (high - low > 1) {
    const u16 middle = (low + high) / 2;
    (value(middle) <= size ? low : high) = middle;
  }
  // Beyond the largest number, infinity stands one step further.
  const double below = value(low);
  const double above = high == infinity ? 2 * below - value(low - 1) : value(high);
  const double to_low = size - below, to_high = above - size;
  const u16 best = to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high;
  return std::signbit(x) ? best | 0x8000 : best;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

}  // namespace

TEST(every_16_bit_number_is_read_exactly) {
  std::vector<u16> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = static_cast<u16>(i);
  std::vector<float> got(65536);
  for (const auto& [name, table] : tables()) {
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      table->f32.pack({all.data(), dtype, 0, 1}, 1, 65536, got.data(), 65536);
      for (int i = 0; i < 65536; ++i) {
        const double want = dtype == DType::kF16 ? half_value(all[i]) : bf16_value(all[i]);
        if (!check::report(
                same(got[i], want), __FILE__, __LINE__,
                name + ": pattern " + std::to_string(i) + " read as " + check::show(got[i]))) {
          return;
        }
      }
    }
  }
}

TEST(rounding_to_16_bits_is_to_nearest_even) {
  std::vector<float> x = {0,          -0.f,       1,         -1,        65504,
                          65519.99f,  65520,      1e30f,     -1e30f,    0x1p-24f,
                          0x1p-25f,   0x1.8p-24f, 6.1e-5f,   INFINITY,  -INFINITY,
                          0x1.002p0f, 0x1.006p0f, 0x1.01p0f, 0x1.03p0f, 3.4e38f};
  std::mt19937 rng(1);
  for (int i = 0; i < 20000; ++i) {
    x.push_back(std::ldexp(std::uniform_real_distribution<float>(-1, 1)(rng),
                           std::uniform_int_distribution<int>(-30, 18)(rng)));
  }
  while (x.size() % 16 != 0) x.push_back(NAN);
  std::vector<u16> got(x.size());
  const int n = static_cast<int>(x.size());
  for (const auto& [name, table] : tables()) {
    for (DType dtype : {DType::kF16, DType::kBF16}) {
      const bool half = dtype == DType::kF16;
      table->f32.unpack(x.data(), n, 1, n, nullptr, {got.data(), dtype, 0, 1});
      for (int i = 0; i < n; ++i) {
        const auto value = half ? half_value : bf16_value;
        bool ok = std::isnan(x[i]) ? std::isnan(value(got[i]))
                                   : got[i] == nearest(value, x[i], half ? 0x7c00 : 0x7f80);
        if (std::isinf(x[i])) ok = value(got[i]) == x[i];
        if (!check::report(
                ok, __FILE__, __LINE__,
                name + ": " + check::show(x[i]) + " became " + check::show(value(got[i])))) {
          return;
        }
      }
    }
  }
}

TEST(packing_any_strides) {
  for (const auto& [name, table] : tables()) {
    for (int rows : {1, 5, 64}) {
      for (int width : {1, 7, 16, 33}) {
        for (int stride_d : {1, 3}) {
          const int stride = width * stride_d + 2;
          std::vector<float> x(rows * stride);
          for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 97);
          const int ld = (width + 15) / 16 * 16;
          std::vector<float> packed(rows * ld, -1), turned(width * kTileKeys, -1);
          const Rows from{x.data(), DType::kF32, stride, stride_d};
          table->f32.pack(from, rows, width, packed.data(), ld);
          table->f32.pack_transposed(from, rows, width, 2, turned.data());
          bool ok = true;
          for (int r = 0; r < kTileKeys; ++r) {
            for (int d = 0; d < width; ++d) {
              const float want = r < rows ? x[r * stride + d * stride_d] : 0;
              if (r < rows) ok &= packed[r * ld + d] == want;
              ok &= turned[d * kTileKeys + r] == 2 * want;
            }
          }
          std::vector<float> back = x;
          for (int r = 0; r < rows; ++r) {
            for (int d = 0; d < width; ++d) back[r * stride + d * stride_d] = -1;
          }
          table->f32.unpack(packed.data(), ld, rows, width, nullptr,
                            {back.data(), DType::kF32, stride, stride_d});
          ok &= back == x;
          CHECK(ok);
        }
      }
    }
  }
}

TEST(dropout_bits_follow_philox) {
  const u64 seed = 0x123456789abcdef0;
  for (const auto& [name, table] : tables()) {
    for (double p : {0.0, 0.1, 0.5, 0.99, 1.0}) {
      const u32 threshold = dropout_threshold(p);
      u64 bits[20];
      table->f32.dropout_bits(seed, threshold, 2, 5, 17, 20, 128, bits);
      for (int r = 0; r < 20; ++r) {
        for (int c = 0; c < kTileKeys; ++c) {
          const int i = 17 + r, j = 128 + c;
          const bool kept = DropoutRule(threshold).kept(dropout_number(seed, 2, 5, i, j));
          if (!CHECK_EQ((bits[r] >> c & 1) != 0, kept)) return;
        }
      }
    }
  }
}
