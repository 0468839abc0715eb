// dynamic_ends against its definition: each row sorts its own candidates.
#include <jali/jali.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "check.h"

using namespace jali;  // NOLINT

namespace {

constexpr float kInf = INFINITY;

/// One sequence and head. ids[d][j]: document of key j; kept[j]: the keys that padding leaves.
struct Keys {
  std::vector<float> score;
  std::vector<std::vector<int>> ids;
  std::vector<char> kept;
};

bool candidate(const Keys& k, int j, float threshold) {
  if (!k.kept.empty() && !k.kept[j]) return false;
  for (const auto& id : k.ids) {
    if (id[j] < 0) return false;
  }
  return !std::isnan(k.score[j]) && k.score[j] != -kInf && k.score[j] >= threshold;
}

bool same_documents(const Keys& k, int a, int b) {
  for (const auto& id : k.ids) {
    if (id[a] != id[b]) return false;
  }
  return true;
}

/// The keys that a row of key `doc`'s documents keeps of the first `past` keys.
std::vector<int> best(const Keys& k, int doc, int past, long keep, float threshold) {
  std::vector<int> list;
  for (int j = 0; j < past; ++j) {
    if (candidate(k, j, threshold) && same_documents(k, j, doc)) list.push_back(j);
  }
  std::sort(list.begin(), list.end(), [&](int a, int b) {
    return k.score[a] != k.score[b] ? k.score[a] > k.score[b] : a > b;
  });
  if (keep >= 0 && static_cast<long>(list.size()) > keep) list.resize(keep);
  std::sort(list.begin(), list.end());
  return list;
}

/// A row of the documents of every key, at every position up to a few beyond the last key.
void check_keys(const Keys& k, const std::vector<int>& end, long keep, float threshold,
                bool causal) {
  int length = static_cast<int>(k.score.size());
  for (int doc = 0; doc < length; ++doc) {
    for (int p = 0; p < length + 3; ++p) {
      std::vector<int> expected =
          best(k, doc, causal ? std::min(p + 1, length) : length, keep, threshold);
      std::vector<int> got;
      for (int j = 0; j < length; ++j) {
        bool visible = causal ? j <= p && p < end[j] : end[j] != 0;
        if (visible && same_documents(k, j, doc)) got.push_back(j);
      }
      if (!CHECK_EQ(got, expected)) return;
    }
    if (k.ids.empty()) return;  // one segment
  }
}

float random_score(std::mt19937& rng, int num_values) {
  switch (rng() % 12) {
    case 0:
      return NAN;
    case 1:
      return -kInf;
    case 2:
      return rng() % 2 ? 0.0f : -0.0f;
    case 3:
      return rng() % 4 ? 1.0f : kInf;
    default:
      return (static_cast<int>(rng() % num_values) - num_values / 2) * 0.37f;
  }
}

Keys random_keys(std::mt19937& rng, int length, int num_tables, bool padding) {
  Keys k;
  int num_values = 1 + rng() % 40;
  for (int j = 0; j < length; ++j) k.score.push_back(random_score(rng, num_values));
  for (int d = 0; d < num_tables; ++d) {
    bool contiguous = rng() % 2;
    std::vector<int> id(length);
    for (int j = 0; j < length; ++j) {
      int next = static_cast<int>(rng() % 4) - 1;
      id[j] = contiguous && j > 0 && rng() % 8 ? id[j - 1] : next;
    }
    k.ids.push_back(id);
  }
  if (padding) {
    for (int j = 0; j < length; ++j) k.kept.push_back(rng() % 5 != 0);
  }
  return k;
}

std::vector<int> ends_of(Keys& k, DynamicOptions options) {
  long length = static_cast<long>(k.score.size());
  for (auto& id : k.ids)
    options.documents.emplace_back(id.data(), DType::kI32,
                                   std::initializer_list<std::int64_t>{length});
  if (!k.kept.empty()) {
    options.keep_keys.emplace_back(k.kept.data(), DType::kBool,
                                   std::initializer_list<std::int64_t>{length});
  }
  std::vector<int> end(length, -7);
  dynamic_ends({k.score.data(), DType::kF32, {length}}, options,
               {end.data(), DType::kI32, {length}});
  return end;
}

}  // namespace

TEST(every_row_keeps_the_best_of_its_past) {
  std::mt19937 rng(1);
  for (int round = 0; round < 400; ++round) {
    int length = rng() % 40;
    Keys k = random_keys(rng, length, rng() % 3, rng() % 2);
    DynamicOptions options;
    options.keep = static_cast<long>(rng() % 12) - 1;
    if (rng() % 10 == 0) options.keep = length + 5;
    if (rng() % 3 == 0) options.threshold = (static_cast<int>(rng() % 5) - 2) * 0.37f;
    options.causal = rng() % 4 != 0;
    check_keys(k, ends_of(k, options), options.keep, options.threshold, options.causal);
  }
}

TEST(equal_scores_are_a_sliding_window) {
  Keys k;
  for (int j = 0; j < 50; ++j) k.score.push_back(j % 2 ? 0.0f : -0.0f);
  DynamicOptions options;
  options.keep = 7;
  std::vector<int> end = ends_of(k, options);
  for (int j = 0; j < 50; ++j)
    CHECK_EQ(end[j], j + 7 < 50 ? j + 7 : std::numeric_limits<int>::max());
}

TEST(scores_that_differ_in_the_last_bit_are_ordered) {
  Keys k;
  k.score = {1.0f,   std::nextafter(1.0f, 2.0f), -1.0f, std::nextafter(-1.0f, -2.0f), 1e-45f,
             -1e-45f};
  DynamicOptions options;
  for (options.keep = 0; options.keep < 8; ++options.keep) {
    check_keys(k, ends_of(k, options), options.keep, options.threshold, true);
  }
}

TEST(batches_heads_and_strides) {
  std::mt19937 rng(2);
  const int B = 3, H = 4, L = 70;
  std::vector<float> score(B * L * H);
  for (float& x : score) x = random_score(rng, 9);
  TensorView scores(score.data(), DType::kF32, {B, H, L});  // stored as [B, L, H]
  scores.stride[0] = L * H, scores.stride[1] = 1, scores.stride[2] = H;
  std::vector<int> ids(B * L), end(B * H * L);
  for (int& id : ids) id = static_cast<int>(rng() % 3);
  DynamicOptions options;
  options.keep = 5;
  options.documents = {{ids.data(), DType::kI32, {B, L}}};
  dynamic_ends(scores, options, {end.data(), DType::kI32, {B, H, L}});
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < H; ++h) {
      Keys k;
      for (int j = 0; j < L; ++j) k.score.push_back(score[(b * L + j) * H + h]);
      k.ids = {{ids.begin() + b * L, ids.begin() + (b + 1) * L}};
      auto row = end.begin() + (b * H + h) * L;
      check_keys(k, {row, row + L}, 5, -kInf, true);
    }
  }
}

TEST(any_number_of_threads_gives_the_same) {
  std::mt19937 rng(4);
  const int B = 2, H = 3, L = 20000;
  std::vector<float> score(B * H * L);
  for (float& x : score) x = random_score(rng, 1000);
  std::vector<int> one(B * H * L, -7), many(B * H * L, -8);
  TensorView scores(score.data(), DType::kF32, {B, H, L});
  DynamicOptions options;
  options.keep = 300;
  options.num_threads = 1;
  dynamic_ends(scores, options, {one.data(), DType::kI32, {B, H, L}});
  options.num_threads = 7;
  dynamic_ends(scores, options, {many.data(), DType::kI32, {B, H, L}});
  CHECK(one == many);
}

TEST(varlen_tables_packed_and_padded) {
  std::mt19937 rng(3);
  std::vector<int> cu = {0, 5, 5, 26, 30};
  const int N = 4, H = 2, T = 33, longest = 21;  // three tokens behind the last sequence
  std::vector<float> score(H * T);
  for (float& x : score) x = random_score(rng, 6);
  std::vector<int> packed_ids(T), padded_ids(N * longest, -1), end(H * T, -7), again(H * T, -7);
  for (int b = 0; b < N; ++b) {
    for (int t = cu[b]; t < cu[b + 1]; ++t) {
      packed_ids[t] = padded_ids[b * longest + t - cu[b]] = static_cast<int>(rng() % 3) - 1;
    }
  }
  DynamicOptions options;
  options.keep = 3;
  options.cu_seqlens_k = {cu.data(), DType::kI32, {N + 1}};
  TensorView scores(score.data(), DType::kF32, {1, H, T});
  options.documents = {{packed_ids.data(), DType::kI32, {T}}};
  dynamic_ends(scores, options, {end.data(), DType::kI32, {1, H, T}});
  options.documents = {{padded_ids.data(), DType::kI32, {N, longest}}};
  dynamic_ends(scores, options, {again.data(), DType::kI32, {H, T}});
  CHECK_EQ(end, again);
  for (int h = 0; h < H; ++h) CHECK_EQ(end[h * T + 31], 0);
  for (int h = 0; h < H; ++h) {
    for (int b = 0; b < N; ++b) {
      Keys k;
      k.score = {score.begin() + h * T + cu[b], score.begin() + h * T + cu[b + 1]};
      k.ids = {{packed_ids.begin() + cu[b], packed_ids.begin() + cu[b + 1]}};
      auto row = end.begin() + h * T;
      check_keys(k, {row + cu[b], row + cu[b + 1]}, 3, -kInf, true);
    }
  }
}

TEST(wrong_arguments_are_named) {
  std::vector<float> score(12);
  std::vector<int> end(12), cu = {0, 7, 5, 12}, ids(12);
  TensorView scores(score.data(), DType::kF32, {2, 6}), ends(end.data(), DType::kI32, {2, 6});
  DynamicOptions options;
  CHECK_THROWS(dynamic_ends({score.data(), DType::kF64, {2, 6}}, options, ends), Error, "float64");
  CHECK_THROWS(dynamic_ends({score.data(), DType::kF32, {3, 4}}, options, ends), Error, "[3, 4]");
  CHECK_THROWS(dynamic_ends({score.data(), DType::kF32, {1, 6}}, options, ends), Error, "heads");
  options.documents = {{ids.data(), DType::kI32, {3, 4}}};
  CHECK_THROWS(dynamic_ends(scores, options, ends), Error, "a document table has shape [3, 4]");
  options.documents.clear();
  options.threshold = NAN;
  CHECK_THROWS(dynamic_ends(scores, options, ends), Error, "threshold is NaN");
  options.threshold = 0;
  options.cu_seqlens_k = {cu.data(), DType::kI32, {4}};
  TensorView scores1(score.data(), DType::kF32, {12}), ends1(end.data(), DType::kI32, {12});
  CHECK_THROWS(dynamic_ends(scores1, options, ends1), Error, "from 7 to 5 at index 2");
  CHECK_THROWS(dynamic_ends(scores, options, ends), Error, "at most the 6 keys");
}
