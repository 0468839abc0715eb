// Random trees of masks against their meaning: cells, classes, spans, with and without stored
// blocks, and the public functions that look at a mask alone.
#include <cstdio>

#include "check.h"
#include "leaf_generators.h"
#include "mask/bound.h"

using namespace jali;
using namespace random_mask;

namespace {

constexpr int kTrees = 600;

/// A tree, its problem and its cells, in bounds.
struct Case {
  Rng rng;
  Problem p;
  Generator generator;
  Sample sample;
  explicit Case(unsigned seed, int depth = 4) : rng(seed), generator(rng, p) {
    draw_problem(rng, p);
    sample = random_tree(generator, depth);
  }
  bool at(int b, int h, int i, int j) const { return sample.visible(b, h, i, j); }
  Tile tile(int b, int h, Span r, Span c) const {
    bool any = false, all = true;
    for (int i = r.begin; i < r.end; ++i) {
      for (int j = c.begin; j < c.end; ++j) {
        const bool seen = at(b, h, i, j);
        any |= seen;
        all &= seen;
      }
    }
    return tile_of(!any, all);
  }
};

/// Runs the check on trees of many seeds; stops at the first that fails and says which.
template <class Check>
void for_each_tree(unsigned seed, int count, Check work) {
  for (int n = 0; n < count; ++n) {
    Case c(seed + n);
    const long before = check::num_failures;
    work(c);
    if (check::num_failures > before) {
      std::printf("seed %u: %s\n", seed + n, c.sample.text.c_str());
      return;
    }
  }
}

/// A byte array with the shape of a mask_dense or mask_tiles result.
struct Bytes {
  std::vector<u8> data;
  TensorView view;
  Bytes(i64 b, i64 h, i64 m, i64 n)
      : data(b * h * m * n, 0x5a), view(data.data(), DType::kBool, {b, h, m, n}) {}
  u8 at(i64 b, i64 h, i64 m, i64 n) const {
    const i64* s = view.shape;
    return data[(((s[0] > 1 ? b : 0) * s[1] + (s[1] > 1 ? h : 0)) * s[2] + m) * s[3] + n];
  }
};

void check_tile(Case& c, MaskCursor& cursor, int b, int h, Span r, Span k) {
  const Tile truth = c.tile(b, h, r, k);
  cursor.set_rows(r.begin, r.end);
  cursor.set_cols(k.begin, k.end);
  const Tile said = cursor.classify();
  CHECK(said == Tile::kPartial || said == truth);
  CHECK_EQ(cursor.exact_class(), truth);
  const int words = ceil_div(k.end - k.begin, 64);
  std::vector<u64> bits(std::size_t(r.end - r.begin) * words, 0x5a5a);
  CHECK_EQ(cursor.fill(bits.data(), words), truth);
  for (int i = r.begin; i < r.end; ++i) {
    for (int j = k.begin; j < k.begin + 64 * words; ++j) {
      const bool bit =
          bits[std::size_t(i - r.begin) * words + (j - k.begin) / 64] >> ((j - k.begin) % 64) & 1;
      if (!CHECK_EQ(bit, j < k.end && c.at(b, h, i, j))) return;
    }
  }
  const Span keys = cursor.key_span(), rows = cursor.row_span();
  const Frame f = cursor.frame();
  CHECK(0 <= keys.begin && keys.end <= f.num_keys && 0 <= rows.begin && rows.end <= f.num_rows);
  for (int i = r.begin; i < r.end; ++i) {
    for (int j = 0; j < f.num_keys; ++j) {
      if (c.at(b, h, i, j) && !CHECK(keys.begin <= j && j < keys.end)) return;
    }
  }
  for (int i = 0; i < f.num_rows; ++i) {
    for (int j = k.begin; j < k.end; ++j) {
      if (c.at(b, h, i, j) && !CHECK(rows.begin <= i && i < rows.end)) return;
    }
  }
}

}  // namespace

TEST(cells_classes_and_spans_of_random_trees) {
  for_each_tree(20000, kTrees, [](Case& c) {
    BoundMask bound(c.sample.mask, c.p.shape);
    if (c.rng.one_in(2)) bound.summarize();
    MaskCursor cursor(bound);
    const int b = c.rng.in(0, c.p.B - 1), h = c.rng.in(0, c.p.Hq - 1);
    cursor.set_frame(b, h);
    const int m = c.p.lq[b], n = c.p.lk[b];
    if (m == 0 || n == 0) return;
    const int rows = c.rng.pick<int>({1, 32, 64, 128}), keys = c.rng.pick<int>({1, 64, 96, 128});
    for (int t = 0; t < 4; ++t) {
      const int i0 = c.rng.in(0, (m - 1) / rows) * rows, j0 = c.rng.in(0, (n - 1) / keys) * keys;
      check_tile(c, cursor, b, h, {i0, std::min(i0 + rows, m)}, {j0, std::min(j0 + keys, n)});
    }
  });
}

TEST(stored_blocks_tell_what_the_tables_tell) {
  for_each_tree(40000, kTrees, [](Case& c) {
    const BoundMask direct(c.sample.mask, c.p.shape);
    BoundMask stored(c.sample.mask, c.p.shape);
    stored.summarize();
    MaskCursor a(direct), z(stored);
    for (int b = 0; b < c.p.B; ++b) {
      const int h = c.rng.in(0, c.p.Hq - 1);
      a.set_frame(b, h);
      z.set_frame(b, h);
      for (int i0 = 0; i0 < c.p.lq[b]; i0 += 64) {
        for (int j0 = 0; j0 < c.p.lk[b]; j0 += 128) {
          for (MaskCursor* cursor : {&a, &z}) {
            cursor->set_rows(i0, std::min(i0 + 64, c.p.lq[b]));
            cursor->set_cols(j0, std::min(j0 + 128, c.p.lk[b]));
          }
          CHECK_EQ(z.classify(), a.classify());
        }
      }
    }
  });
}

// Long enough that spans are narrowed by the stored blocks: every key outside is surely not seen.
TEST(narrowed_spans_of_long_documents) {
  for (int per_document : {64, 300, 1000}) {
    const int L = 6000, kShort = 16 * kSummary;  // shorter spans are scanned, not narrowed
    std::vector<i32> ids(L);
    for (int l = 0; l < L; ++l) ids[l] = l % 11 == 10 ? -1 : l / per_document;
    Shape shape;
    shape.Lq = shape.Lk = L;
    const Mask mask = causal() & document(TensorView(ids.data(), DType::kI32, {L}));
    BoundMask bound(mask, shape);
    bound.summarize();
    MaskCursor cursor(bound);
    cursor.set_frame(0, 0);
    for (int i0 = 0; i0 < L; i0 += 128) {
      const int i1 = std::min(i0 + 128, L);
      cursor.set_rows(i0, i1);
      const Span keys = cursor.key_span();
      const int first = i0 / per_document * per_document;
      CHECK(keys.begin <= first && keys.end >= i1 - 1);
      CHECK(keys.end <= i1 && (i1 <= kShort || keys.begin >= first - kSummary));
      cursor.set_cols(i0, i1);
      const Span rows = cursor.row_span();
      const int last = std::min(((i1 - 1) / per_document + 1) * per_document, L);
      CHECK(rows.begin == i0 && rows.end >= last - 1);
      CHECK(L - i0 <= kShort || rows.end <= last + kSummary);
    }
  }
}

TEST(mask_dense_and_mask_tiles_are_exact) {
  for_each_tree(60000, kTrees / 3, [](Case& c) {
    const Problem& p = c.p;
    const int m = p.longest_q(), n = p.longest_k();
    Bytes cells(p.B, p.Hq, m, n);
    mask_dense(c.sample.mask, p.shape, cells.view);
    const auto [by_batch, by_head] = mask_varies(c.sample.mask, p.shape);
    const int rows = c.rng.pick<int>({1, 16, 64, 128}), keys = c.rng.pick<int>({7, 64, 128});
    Bytes tiles(by_batch ? p.B : 1, by_head ? p.Hq : 1, ceil_div(m, rows), ceil_div(n, keys));
    mask_tiles(c.sample.mask, p.shape, rows, keys, tiles.view);
    for (int b = 0; b < p.B; ++b) {
      for (int h = 0; h < p.Hq; ++h) {
        for (int i = 0; i < m; ++i) {
          for (int j = 0; j < n; ++j) {
            const bool seen = i < p.lq[b] && j < p.lk[b] && c.at(b, h, i, j);
            if (!CHECK_EQ(int{cells.at(b, h, i, j)}, int{seen})) return;
          }
        }
        for (int y = 0; y * rows < p.lq[b]; ++y) {
          for (int x = 0; x * keys < p.lk[b]; ++x) {
            const Tile truth = c.tile(b, h, {y * rows, std::min((y + 1) * rows, p.lq[b])},
                                      {x * keys, std::min((x + 1) * keys, p.lk[b])});
            if (!CHECK_EQ(int{tiles.at(b, h, y, x)}, static_cast<int>(truth))) return;
          }
        }
      }
    }
  });
}

TEST(no_mask_sees_everything) {
  Shape shape;
  shape.Lq = 3;
  shape.Lk = 70;
  Bytes cells(1, 1, 3, 70), tiles(1, 1, 1, 2);
  mask_dense(Mask(), shape, cells.view);
  mask_tiles(Mask(), shape, 64, 64, tiles.view);
  for (u8 cell : cells.data) CHECK_EQ(int{cell}, 1);
  for (u8 tile : tiles.data) CHECK_EQ(int{tile}, 2);
  mask_dense(~Mask(), shape, cells.view);
  for (u8 cell : cells.data) CHECK_EQ(int{cell}, 0);
  CHECK((Mask() & causal()).program() == causal().program());
  CHECK((causal() | Mask()).program().empty());
}
