// Random problems and masks with their meaning in plain terms, for tests. Every generator draws a
// leaf's parameters in every allowed layout and returns, beside the mask, a function that says
// which cells it shows, written from the documentation alone.
#pragma once

#include <jali/jali.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace random_mask {

using jali::DType;
using jali::IntParam;
using jali::Mask;
using jali::Shape;
using jali::TensorView;

class Rng {
 public:
  explicit Rng(unsigned seed) : state_(seed) {}
  int in(int low, int high) { return low + static_cast<int>(state_() % unsigned(high - low + 1)); }
  bool one_in(int n) { return in(1, n) == 1; }
  template <class T>
  T pick(std::initializer_list<T> from) {
    return from.begin()[in(0, static_cast<int>(from.size()) - 1)];
  }

 private:
  std::mt19937 state_;
};

/// Lengths, offsets and heads of a call; keeps its arrays alive.
struct Problem {
  int B = 1, Hq = 1, Hkv = 1;
  bool varlen = false;
  std::vector<int> lq, lk, q_start, k_start, q_offset;  // per sequence
  std::vector<int> cu_q, cu_k, offsets;                 // what the views below point at
  int tq = 0, tk = 0;              // varlen: packed tokens, some behind the last sequence
  bool one_row_is_packed = false;  // varlen: no padded table is shared by the sequences
  int longest_q() const { return *std::max_element(lq.begin(), lq.end()); }
  int longest_k() const { return *std::max_element(lk.begin(), lk.end()); }
  int head_div(int heads) const { return Hq / heads; }
  Shape shape;

  Problem() = default;
  Problem(const Problem&) = delete;  // shape points into it
};

inline int random_length(Rng& rng) {
  return rng.pick<int>({1, 2, rng.in(3, 31), 37, 64, 65, rng.in(66, 150)});
}

inline void draw_problem(Rng& rng, Problem& p) {
  p.Hkv = rng.in(1, 3);
  p.Hq = p.Hkv * rng.in(1, 2);
  p.B = rng.in(1, 3);
  p.varlen = rng.one_in(3);
  int lq = random_length(rng), lk = rng.one_in(3) ? lq : random_length(rng);
  const bool own_offset = rng.one_in(2);
  p.cu_q = p.cu_k = {0};
  for (int b = 0; b < p.B; ++b) {
    if (p.varlen) lq = rng.in(0, 70), lk = rng.in(0, 70);
    p.lq.push_back(lq);
    p.lk.push_back(lk);
    p.q_start.push_back(p.varlen ? p.cu_q.back() : 0);
    p.k_start.push_back(p.varlen ? p.cu_k.back() : 0);
    p.cu_q.push_back(p.cu_q.back() + lq);
    p.cu_k.push_back(p.cu_k.back() + lk);
    p.offsets.push_back(own_offset ? rng.in(-20, 40) : lk - lq);
  }
  p.q_offset = p.offsets;
  p.shape.B = p.B;
  p.shape.Hq = p.Hq;
  p.shape.Hkv = p.Hkv;
  p.shape.Lq = p.longest_q();
  p.shape.Lk = p.longest_k();
  if (p.varlen) {
    p.shape.Tq = p.tq = p.cu_q.back() + (rng.one_in(3) ? rng.in(1, 9) : 0);
    p.shape.Tk = p.tk = p.cu_k.back() + (rng.one_in(3) ? rng.in(1, 9) : 0);
    p.shape.cu_seqlens_q = TensorView(p.cu_q.data(), DType::kI32, {p.B + 1});
    p.shape.cu_seqlens_k = TensorView(p.cu_k.data(), DType::kI32, {p.B + 1});
  }
  if (!own_offset) return;
  if (rng.one_in(2)) {
    p.shape.q_offset = TensorView(p.offsets.data(), DType::kI32, {p.B});
  } else {
    std::fill(p.q_offset.begin(), p.q_offset.end(), p.offsets[0]);
    p.shape.q_offset = p.offsets[0];
  }
}

/// Whether cell (i, j) of query head h in sequence b is visible; in bounds only.
using Meaning = std::function<bool(int b, int h, int i, int j)>;

/// A mask, what it means, and how to write it down.
struct Sample {
  Mask mask;
  Meaning visible;
  std::string text;
};

/// Draws parameters and keeps their memory.
class Generator {
 public:
  Generator(Rng& rng, const Problem& problem) : rng_(rng), p_(problem) {}

  Rng& rng() { return rng_; }
  const Problem& problem() const { return p_; }

  /// An optional number or table over the batch ('B') or the heads ('H').
  struct Int {
    IntParam param;
    std::function<int(int b, int h)> at;  // null: absent
  };
  Int integer(char dim, int low, int high, bool optional = true) {
    const int form = rng_.in(optional ? 0 : 1, 2);
    if (form == 0) return {};
    const int number = rng_.in(low, high);
    if (form == 1) return {IntParam(number), [=](int, int) { return number; }};
    const int size = dim == 'B' ? rng_.pick<int>({1, p_.B}) : rng_.pick<int>({1, p_.Hkv, p_.Hq});
    const int div = dim == 'H' ? p_.head_div(size) : 1;
    Table<int> t = table<int>({size}, [&](const int*) { return rng_.in(low, high); });
    return {IntParam(t.view), [=](int b, int h) {
              const int n = dim == 'B' ? (size > 1 ? b : 0) : h / div;
              return t.at({n});
            }};
  }

  template <class T>
  struct Table {
    TensorView view;
    std::function<T(std::vector<int>)> at;
  };
  /// A table of any rank with random strides; value(index) draws an element.
  template <class T, class Value>
  Table<T> table(std::vector<int> shape, Value value) {
    const int rank = static_cast<int>(shape.size());
    std::vector<int> order(rank), strides(rank);
    for (int d = 0; d < rank; ++d) order[d] = rank - 1 - d;
    if (rng_.one_in(3)) std::swap(order[0], order[rank - 1]);
    int size = rng_.one_in(3) ? 2 : 1;
    for (int d : order) {
      strides[d] = size;
      size = size * shape[d] + (rng_.one_in(4) ? 3 : 0);
    }
    // Bytes of a bool that nobody may read are neither 0 nor 1.
    memory_.emplace_back(std::max(size, 1) * sizeof(T), static_cast<char>(0x5a));
    T* data = reinterpret_cast<T*>(memory_.back().data());
    std::vector<int> index(rank);
    long count = 1;
    for (int n : shape) count *= n;
    for (long n = 0; n < count; ++n) {
      int at = 0;
      for (int d = 0; d < rank; ++d) at += index[d] * strides[d];
      data[at] = static_cast<T>(value(index.data()));
      for (int d = rank - 1; d >= 0 && ++index[d] == shape[d]; --d) index[d] = 0;
    }
    TensorView view;
    view.data = data;
    view.dtype = sizeof(T) == 1 ? DType::kBool : DType::kI32;
    view.rank = rank;
    std::copy(shape.begin(), shape.end(), view.shape);
    std::copy(strides.begin(), strides.end(), view.stride);
    return {view, [=](std::vector<int> i) {
              int at = 0;
              for (int d = 0; d < rank; ++d) at += i[d] * strides[d];
              return data[at];
            }};
  }

  /// A table over tokens: per row ('Q') or key ('K'), in any layout.
  template <class T>
  struct Tokens {
    TensorView view;
    std::function<T(int b, int h, int l)> at;
    int length = 0;
    bool packed = false;
  };
  template <class T, class Value>
  Tokens<T> tokens(char side, bool with_heads, Value value) {
    const std::vector<int>& starts = side == 'Q' ? p_.q_start : p_.k_start;
    const int longest = side == 'Q' ? p_.longest_q() : p_.longest_k();
    const int covered = side == 'Q' ? p_.cu_q.back() : p_.cu_k.back();
    const int total = rng_.one_in(2) ? covered : side == 'Q' ? p_.tq : p_.tk;
    const bool packed = p_.varlen && total > 0 && rng_.one_in(2);
    const bool own_rows = p_.varlen && p_.one_row_is_packed;
    const int batches = packed ? 1 : own_rows ? p_.B : rng_.pick<int>({1, p_.B});
    const int heads = with_heads ? rng_.pick<int>({1, p_.Hkv, p_.Hq}) : 1;
    // A padded table that is as long as a packed one would be read as packed.
    int length = packed ? total : longest;
    if (p_.varlen && !packed && (length == 0 || rng_.one_in(2))) length += 3;
    while (p_.varlen && !packed && (length == covered || length == p_.tq || length == p_.tk)) {
      ++length;
    }
    std::vector<int> shape = {batches, heads, length};
    if (!with_heads) shape.erase(shape.begin() + 1);
    const bool short_rank = batches == 1 && rng_.one_in(2);
    if (short_rank) shape.erase(shape.begin());
    if (short_rank && with_heads && heads == 1 && rng_.one_in(2)) shape.erase(shape.begin());
    const int rank = static_cast<int>(shape.size());
    Table<T> t = table<T>(shape, [&](const int* i) { return value(i[rank - 1]); });
    const int div = p_.head_div(heads);
    auto at = [=](int b, int h, int l) {
      std::vector<int> index = {batches > 1 ? b : 0, h / div, packed ? starts[b] + l : l};
      if (!with_heads) index.erase(index.begin() + 1);
      while (static_cast<int>(index.size()) > rank) index.erase(index.begin());
      return t.at(index);
    };
    return {t.view, at, length, packed};
  }

  /// A table over (rows, columns) of the given size, with any batch and head dims.
  template <class T>
  struct Grid {
    TensorView view;
    std::function<T(int b, int h, int r, int c)> at;
  };
  template <class T, class Value>
  Grid<T> grid(int rows, int cols, Value value) {
    const int batches = rng_.pick<int>({1, p_.B}), heads = rng_.pick<int>({1, p_.Hkv, p_.Hq});
    std::vector<int> shape = {batches, heads, rows, cols};
    if (batches == 1 && rng_.one_in(2)) {
      shape.erase(shape.begin());
      if (heads == 1 && rng_.one_in(2)) shape.erase(shape.begin());
    }
    const int rank = static_cast<int>(shape.size());
    Table<T> t = table<T>(shape, [&](const int* i) { return value(i[rank - 2], i[rank - 1]); });
    const int div = p_.head_div(heads);
    return {t.view, [=](int b, int h, int r, int c) {
              std::vector<int> index = {batches > 1 ? b : 0, h / div, rows > 1 ? r : 0,
                                        cols > 1 ? c : 0};
              while (static_cast<int>(index.size()) > rank) index.erase(index.begin());
              return t.at(index);
            }};
  }

  /// Position of row i for a leaf with an own offset.
  std::function<int(int b, int i)> position(const Int& offset) const {
    const std::vector<int> call = p_.q_offset;
    return [=](int b, int i) { return i + (offset.at ? offset.at(b, 0) : call[b]); };
  }

 private:
  Rng& rng_;
  const Problem& p_;
  std::deque<std::vector<char>> memory_;
};

}  // namespace random_mask
