// One generator per leaf: legal parameters, and the leaf's meaning from the documentation.
#pragma once

#include <map>

#include "random_mask.h"

namespace random_mask {

inline int floor_mod(int a, int b) { return ((a % b) + b) % b; }

inline Sample make_causal(Generator& g) {
  auto offset = g.integer('B', -20, 40);
  auto p = g.position(offset);
  return {jali::causal(offset.param), [=](int b, int, int i, int j) { return j <= p(b, i); }, ""};
}

inline Sample make_window(Generator& g) {
  auto left = g.integer('H', -3, 40), right = g.integer('H', -3, 40);
  auto offset = g.integer('B', -20, 40);
  auto p = g.position(offset);
  return {jali::window(left.param, right.param, offset.param),
          [=](int b, int h, int i, int j) {
            return (!left.at || j >= p(b, i) - left.at(b, h)) &&
                   (!right.at || j <= p(b, i) + right.at(b, h));
          },
          ""};
}

inline Sample make_prefix(Generator& g) {
  auto length = g.integer('B', -2, 100, false);
  return {jali::prefix(length.param), [=](int b, int h, int, int j) { return j < length.at(b, h); },
          ""};
}

inline Sample make_key_padding(Generator& g) {
  const int holes = g.rng().pick<int>({1, 2, 20});  // about one in `holes`
  const bool right = g.rng().one_in(2);
  const int length = g.rng().in(0, 100);
  auto keep = g.tokens<unsigned char>(
      'K', false, [&](int l) { return right ? l < length : g.rng().in(0, holes) > 0; });
  return {jali::key_padding(keep.view),
          [=](int b, int h, int, int j) { return keep.at(b, h, j) != 0; }, ""};
}

inline Sample make_document(Generator& g) {
  // Documents in order, or shuffled ids; some tokens belong to none.
  const int length = g.rng().in(1, 40), shuffle = g.rng().one_in(4) ? 7 : 1;
  auto id = [&](int l) { return g.rng().one_in(15) ? -1 : l / length * shuffle % 5 + l / length; };
  if (g.rng().one_in(2)) {
    auto q = g.tokens<int>('Q', false, id), k = g.tokens<int>('K', false, id);
    return {jali::document(q.view, k.view),
            [=](int b, int h, int i, int j) {
              return q.at(b, h, i) >= 0 && q.at(b, h, i) == k.at(b, h, j);
            },
            ""};
  }
  auto ids = g.tokens<int>('K', false, id);
  const std::vector<int> offset = g.problem().q_offset, lk = g.problem().lk;
  return {jali::document(ids.view),
          [=](int b, int h, int i, int j) {
            const int p = i + offset[b];
            if (p < 0 || p >= (ids.packed ? lk[b] : ids.length)) return false;
            return ids.at(b, h, p) >= 0 && ids.at(b, h, p) == ids.at(b, h, j);
          },
          ""};
}

inline Sample make_packed_document(Generator& g) {
  // Some documents are empty, some tokens left over, some documents longer than the sequence.
  const int batches = g.rng().pick<int>({1, g.problem().B}), documents = g.rng().in(0, 9);
  const int longest = g.rng().pick<int>({5, 40, 200});
  int end = 0;
  auto cuts = g.table<int>({batches, documents + 1}, [&](const int* at) {
    return end = at[1] == 0 ? 0 : end + std::max(g.rng().in(-longest / 4, longest), 0);
  });
  const std::vector<int> offset = g.problem().q_offset;
  return {jali::packed_document(cuts.view),
          [=](int b, int, int i, int j) {
            const int p = i + offset[b], from = batches > 1 ? b : 0;
            for (int n = 0; n < documents; ++n) {
              const int begin = cuts.at({from, n}), after = cuts.at({from, n + 1});
              if (begin <= p && p < after) return begin <= j && j < after;
            }
            return false;
          },
          ""};
}

/// Intervals around `l * slope`: nested, random, some empty, some open.
struct Ends {
  int spread, width;
  bool empty_ones;
  explicit Ends(Rng& rng)
      : spread(rng.pick<int>({0, 5, 60})), width(rng.in(0, 60)), empty_ones(rng.one_in(3)) {}
  int start(Rng& rng, int l) const { return l - spread / 2 + rng.in(0, spread); }
  int end(Rng& rng, int l) const {
    if (empty_ones && rng.one_in(8)) return -100;
    return l + width + rng.in(0, spread);
  }
};

inline Sample make_key_interval(Generator& g) {
  const Ends ends(g.rng());
  const int form = g.rng().in(0, 3);  // bit 0: no start, bit 1: no end
  auto offset = g.integer('B', -20, 40);
  Generator::Tokens<int> start, end;
  if (!(form & 1)) start = g.tokens<int>('K', true, [&](int l) { return ends.start(g.rng(), l); });
  if (!(form & 2)) end = g.tokens<int>('K', true, [&](int l) { return ends.end(g.rng(), l); });
  auto p = g.position(offset);
  return {jali::key_interval(start.view, end.view, offset.param),
          [=](int b, int h, int i, int j) {
            return (!start.at || start.at(b, h, j) <= p(b, i)) &&
                   (!end.at || p(b, i) < end.at(b, h, j));
          },
          ""};
}

inline Sample make_row_interval(Generator& g) {
  const Ends ends(g.rng());
  const int form = g.rng().in(0, 3);
  Generator::Tokens<int> start, end;
  if (!(form & 1)) start = g.tokens<int>('Q', true, [&](int l) { return ends.start(g.rng(), l); });
  if (!(form & 2)) end = g.tokens<int>('Q', true, [&](int l) { return ends.end(g.rng(), l); });
  return {jali::row_interval(start.view, end.view),
          [=](int b, int h, int i, int j) {
            return (!start.at || start.at(b, h, i) <= j) && (!end.at || j < end.at(b, h, i));
          },
          ""};
}

inline Sample make_dilated(Generator& g) {
  const int step = g.rng().pick<int>({1, 2, 3, 7, 64, 100});
  auto offset = g.integer('B', -20, 40);
  auto p = g.position(offset);
  return {jali::dilated(step, offset.param),
          [=](int b, int, int i, int j) { return floor_mod(p(b, i) - j, step) == 0; }, ""};
}

/// NATTEN's definition, dim by dim: the point's dilation group, its place in it, the window there.
inline Sample make_neighborhood(Generator& g) {
  Rng& rng = g.rng();
  const int dims = rng.in(1, 3), most = dims == 1 ? 120 : dims == 2 ? 14 : 6;
  std::vector<std::int64_t> shape, kernel, dilation;
  std::vector<bool> causal;
  for (int d = 0; d < dims; ++d) {
    shape.push_back(rng.in(1, most));
    dilation.push_back(rng.in(1, std::min<int>(3, static_cast<int>(shape[d]))));
    kernel.push_back(rng.in(1, static_cast<int>(shape[d] / dilation[d])));
    causal.push_back(rng.one_in(3));
  }
  auto visible = [=](int, int, int i, int j) {
    std::int64_t row = i, key = j;
    for (int d = dims - 1; d >= 0; --d) {
      const std::int64_t n = shape[d], step = dilation[d], size = kernel[d];
      const std::int64_t x = row % n, y = key % n;
      row /= n;
      key /= n;
      if (x % step != y % step) return false;
      const std::int64_t group = (n - x % step + step - 1) / step, at = x / step, other = y / step;
      const std::int64_t first =
          causal[d] ? at - size + 1 : std::clamp<std::int64_t>(at - size / 2, 0, group - size);
      const std::int64_t last = causal[d] ? at : first + size - 1;
      if (other < first || other > last) return false;
    }
    return row == 0 && key == 0;  // inside the grid
  };
  return {jali::neighborhood(shape, kernel, dilation, causal), visible, ""};
}

inline Sample make_block_bitset(Generator& g) {
  Rng& rng = g.rng();
  const int m = rng.pick<int>({1, 3, 16, 64, 200}), n = rng.pick<int>({1, 3, 16, 64, 200});
  const int rows = rng.one_in(6) ? 1 : (std::max(g.problem().longest_q(), 1) + m - 1) / m;
  const int cols = rng.one_in(6) ? 1 : (std::max(g.problem().longest_k(), 1) + n - 1) / n;
  const int often = rng.in(1, 4);
  auto blocks = g.grid<unsigned char>(rows, cols, [&](int, int) { return rng.in(0, often) > 1; });
  return {jali::block_sparse(blocks.view, m, n),
          [=](int b, int h, int i, int j) { return blocks.at(b, h, i / m, j / n) != 0; }, ""};
}

inline Sample make_block_csr(Generator& g) {
  Rng& rng = g.rng();
  const Problem& p = g.problem();
  const int m = rng.pick<int>({1, 3, 16, 64, 200}), n = rng.pick<int>({1, 1, 3, 16, 64});
  const int rows = (p.longest_q() + m - 1) / m, cols = (p.longest_k() + n - 1) / n;
  const int heads = rng.pick<int>({1, p.Hkv, p.Hq}), batches = rng.pick<int>({1, p.B});
  const int often = rng.in(1, 4), div = p.head_div(heads);
  // cells[((b * heads + h) * rows + r) * cols + c]
  std::vector<char> cells(std::size_t(batches) * heads * rows * cols);
  for (char& cell : cells) cell = rng.in(0, often) > 1;
  std::vector<std::vector<int>> pointers, lists;
  std::size_t longest = 0;
  for (int list = 0; list < batches * heads; ++list) {
    pointers.push_back({0});
    lists.emplace_back();
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) {
        if (cells[(std::size_t(list) * rows + r) * cols + c]) lists.back().push_back(c);
      }
      pointers.back().push_back(static_cast<int>(lists.back().size()));
    }
    longest = std::max(longest, lists.back().size());
  }
  for (auto& list : lists) list.resize(longest, -9);  // never read
  auto row_ptr = g.table<int>({batches, heads, rows + 1},
                              [&](const int* i) { return pointers[i[0] * heads + i[1]][i[2]]; });
  auto col_idx = g.table<int>({batches, heads, static_cast<int>(longest)},
                              [&](const int* i) { return lists[i[0] * heads + i[1]][i[2]]; });
  return {jali::block_csr(row_ptr.view, col_idx.view, m, n),
          [=](int b, int h, int i, int j) {
            const int list = (batches > 1 ? b : 0) * heads + h / div;
            return cells[(std::size_t(list) * rows + i / m) * cols + j / n] != 0;
          },
          ""};
}

inline Sample make_dense(Generator& g) {
  Rng& rng = g.rng();
  const int extra = g.problem().varlen ? rng.in(0, 2) : 0;
  const int rows = rng.one_in(3) ? 1 : g.problem().longest_q() + extra;
  const int cols = rng.one_in(3) ? 1 : g.problem().longest_k() + extra;
  const int often = rng.pick<int>({1, 2, 50});
  auto cells = g.grid<unsigned char>(rows, cols, [&](int, int) { return rng.in(0, often) > 0; });
  return {jali::dense(cells.view),
          [=](int b, int h, int i, int j) { return cells.at(b, h, i, j) != 0; }, ""};
}

inline const std::map<std::string, Sample (*)(Generator&)>& leaf_generators() {
  static const std::map<std::string, Sample (*)(Generator&)> all = {
      {"block_bitset", make_block_bitset},
      {"block_csr", make_block_csr},
      {"causal", make_causal},
      {"dense", make_dense},
      {"dilated", make_dilated},
      {"document", make_document},
      {"key_interval", make_key_interval},
      {"key_padding", make_key_padding},
      {"neighborhood", make_neighborhood},
      {"packed_document", make_packed_document},
      {"prefix", make_prefix},
      {"row_interval", make_row_interval},
      {"window", make_window},
  };
  return all;
}

/// A tree of at most `depth` operators above each leaf.
inline Sample random_tree(Generator& g, int depth) {
  const int op = depth == 0 ? 0 : g.rng().in(0, 4);
  if (op <= 1) {
    auto it = leaf_generators().begin();
    std::advance(it, g.rng().in(0, static_cast<int>(leaf_generators().size()) - 1));
    Sample leaf = it->second(g);
    leaf.text = it->first;
    return leaf;
  }
  Sample a = random_tree(g, depth - 1);
  const Meaning see_a = a.visible;
  if (op == 2) {
    return {~a.mask, [=](int b, int h, int i, int j) { return !see_a(b, h, i, j); }, "~" + a.text};
  }
  Sample other = random_tree(g, depth - 1);
  const Meaning see_b = other.visible;
  if (op == 3) {
    return {a.mask & other.mask,
            [=](int b, int h, int i, int j) { return see_a(b, h, i, j) && see_b(b, h, i, j); },
            "(" + a.text + " & " + other.text + ")"};
  }
  return {a.mask | other.mask,
          [=](int b, int h, int i, int j) { return see_a(b, h, i, j) || see_b(b, h, i, j); },
          "(" + a.text + " | " + other.text + ")"};
}

}  // namespace random_mask
