// exp2 and tanh of vectors, and the matrix product, against the standard library and plain loops.
#define JALI_ISA isa_test
#include "cpu/impl/math.h"

#include <random>

#include "check.h"
#include "cpu/impl/gemm.h"

using namespace jali;
using namespace jali::isa_test;

namespace {

template <class T, class F>
T lane(F f, T x) {
  return f(splat<T>(x))[0];
}
template <class T>
T exp2_one(T x) {
  return lane<T>([](Vec<T> v) { return exp2_of<T>(v); }, x);
}
template <class T>
T tanh_one(T x) {
  return lane<T>([](Vec<T> v) { return tanh_of<T>(v); }, x);
}

template <class T>
void check_exp2(double tolerance, double lowest) {
  double worst = 0;
  for (double x = lowest + 1; x <= 1; x += 0.00371) {
    const T y = static_cast<T>(x);
    const double want = std::exp2(static_cast<double>(y));
    worst = std::max(worst, std::abs(exp2_one<T>(y) - want) / want);
  }
  CHECK_NEAR(worst, 0, tolerance);
  CHECK_EQ(exp2_one<T>(0), T(1));
  CHECK_EQ(exp2_one<T>(static_cast<T>(lowest)), T(0));
  CHECK_EQ(exp2_one<T>(-1e30f), T(0));
  CHECK_EQ(exp2_one<T>(-INFINITY), T(0));
  CHECK(std::isnan(exp2_one<T>(NAN)));
}

template <class T>
void check_tanh(double tolerance) {
  double worst = 0;
  for (double size = 1e-20; size < 100; size *= 1.0137) {
    for (T x : {static_cast<T>(size), static_cast<T>(-size)}) {
      const double want = std::tanh(static_cast<double>(x));
      worst = std::max(worst, std::abs(tanh_one<T>(x) - want) / std::abs(want));
    }
  }
  CHECK_NEAR(worst, 0, tolerance);
  CHECK_EQ(tanh_one<T>(0), T(0));
  CHECK_EQ(tanh_one<T>(INFINITY), T(1));
  CHECK_EQ(tanh_one<T>(-INFINITY), T(-1));
  CHECK(std::isnan(tanh_one<T>(NAN)));
}

template <class T>
void check_gemm(double tolerance) {
  std::mt19937 rng(3);
  std::uniform_int_distribution<int> value(-4, 4);
  for (int M : {1, 2, 3, 5, 6, 7, 13, 64}) {
    for (int vecs : {1, 2, 3, 4, 5, 9}) {
      for (int K : {0, 1, 2, 17, 64}) {
        for (bool transposed : {false, true}) {
          const int N = vecs * kLanes<T>, ldb = N + 3, ldc = N + 5;
          std::vector<T> a(M * K + 1), b(K * ldb + N), c(M * ldc + N), scale(M);
          for (auto* x : {&a, &b, &c, &scale}) {
            for (T& y : *x) y = static_cast<T>(value(rng));
          }
          const int a_row = transposed ? 1 : K, a_k = transposed ? M : 1;
          for (Into into : {Into::kNothing, Into::kSum, Into::kScaledSum}) {
            std::vector<T> got = c;
            gemm<T>(into, M, N, K, a.data(), a_row, a_k, b.data(), ldb, got.data(), ldc,
                    scale.data());
            double worst = 0;
            for (int m = 0; m < M; ++m) {
              for (int n = 0; n < ldc; ++n) {
                double want = c[m * ldc + n];
                if (n < N) {
                  want *= into == Into::kNothing ? 0 : into == Into::kSum ? 1 : scale[m];
                  for (int k = 0; k < K; ++k) {
                    want += static_cast<double>(a[m * a_row + k * a_k]) * b[k * ldb + n];
                  }
                }
                worst = std::max(worst, std::abs(want - got[m * ldc + n]));
              }
            }
            if (!CHECK_NEAR(worst, 0, tolerance)) return;
          }
        }
      }
    }
  }
}

}  // namespace

TEST(exp2_float) { check_exp2<float>(2e-7, -127); }
TEST(exp2_double) { check_exp2<double>(4e-16, -1023); }
TEST(tanh_float) { check_tanh<float>(4e-7); }
TEST(tanh_double) { check_tanh<double>(8e-16); }
TEST(gemm_float) { check_gemm<float>(0); }  // small integers: exact
TEST(gemm_double) { check_gemm<double>(0); }
