// Every leaf against its meaning: cells, classes, spans, merged blocks; in any layout of its tables.
#include <cstring>

#include "check.h"
#include "leaf_generators.h"
#include "mask/bound.h"

using namespace jali;
using namespace random_mask;

namespace {

constexpr int kProblems = 60;  // per leaf

struct Cells {
  int rows, keys;
  std::vector<char> seen;
  bool at(int i, int j) const { return seen[std::size_t(i) * keys + j] != 0; }
  Tile tile(Span r, Span c) const {
    bool any = false, all = true;
    for (int i = r.begin; i < r.end; ++i) {
      for (int j = c.begin; j < c.end; ++j) {
        any |= at(i, j);
        all &= at(i, j);
      }
    }
    return tile_of(!any, all);
  }
};

struct Block {
  alignas(8) char bytes[LeafNode::kMaxBlockBytes];
};

struct Score {
  long tiles = 0, exact = 0;
};

Span random_range(Rng& rng, int length) {
  const int begin = rng.in(0, length - 1);
  const int size = rng.pick<int>({1, 2, 16, 64, 128});
  return {begin, std::min(begin + size, length)};
}

void check_fill(const LeafNode& leaf, const Frame& f, const Cells& cells, Span r, Span c) {
  const int words = ceil_div(c.end - c.begin, 64), stride = words + 1;
  std::vector<u64> bits(std::size_t(r.end - r.begin) * stride, 0x5a5a);
  leaf.fill(f, r.begin, r.end, c.begin, c.end, bits.data(), stride);
  for (int i = r.begin; i < r.end; ++i) {
    const u64* row = &bits[std::size_t(i - r.begin) * stride];
    for (int j = c.begin; j < c.begin + 64 * words; ++j) {
      const bool bit = row[(j - c.begin) / 64] >> ((j - c.begin) % 64) & 1;
      if (!CHECK_EQ(bit, j < c.end && cells.at(i, j))) return;
    }
    if (!CHECK_EQ(row[words], u64{0x5a5a})) return;  // nothing written beyond
  }
}

/// The span must hold every visible key of the rows (row of the keys).
void check_spans(const LeafNode& leaf, const Frame& f, const Cells& cells, Span r, Span c,
                 const Block& rows, const Block& cols) {
  const Span keys = leaf.key_span(f, rows.bytes), back = leaf.row_span(f, cols.bytes);
  for (int i = r.begin; i < r.end; ++i) {
    for (int j = 0; j < f.num_keys; ++j) {
      if (cells.at(i, j) && !CHECK(keys.begin <= j && j < keys.end)) return;
    }
  }
  for (int i = 0; i < f.num_rows; ++i) {
    for (int j = c.begin; j < c.end; ++j) {
      if (cells.at(i, j) && !CHECK(back.begin <= i && i < back.end)) return;
    }
  }
}

/// Blocks of [begin, mid) and [mid, end) merge to what tells the same as that of [begin, end).
void check_merge(const LeafNode& leaf, const Frame& f, Rng& rng, Span r, Span c, const Block& rows,
                 const Block& cols) {
  Block part, rest;
  if (leaf.rows_read_tables() && r.end - r.begin > 1) {
    const int mid = rng.in(r.begin + 1, r.end - 1);
    leaf.rows(f, r.begin, mid, part.bytes);
    leaf.rows(f, mid, r.end, rest.bytes);
    leaf.merge_rows(part.bytes, rest.bytes);
    CHECK_EQ(leaf.classify(f, part.bytes, cols.bytes), leaf.classify(f, rows.bytes, cols.bytes));
    const Span a = leaf.key_span(f, part.bytes), b = leaf.key_span(f, rows.bytes);
    CHECK(a.begin == b.begin && a.end == b.end);
  }
  if (leaf.cols_read_tables() && c.end - c.begin > 1) {
    const int mid = rng.in(c.begin + 1, c.end - 1);
    leaf.cols(f, c.begin, mid, part.bytes);
    leaf.cols(f, mid, c.end, rest.bytes);
    leaf.merge_cols(part.bytes, rest.bytes);
    CHECK_EQ(leaf.classify(f, rows.bytes, part.bytes), leaf.classify(f, rows.bytes, cols.bytes));
    const Span a = leaf.row_span(f, part.bytes), b = leaf.row_span(f, cols.bytes);
    CHECK(a.begin == b.begin && a.end == b.end);
  }
}

void check_frame(const LeafNode& leaf, const Frame& f, const Cells& cells, Rng& rng, Score& score) {
  check_fill(leaf, f, cells, {0, f.num_rows}, {0, f.num_keys});
  for (int n = 0; n < 12; ++n) {
    const Span r = random_range(rng, f.num_rows), c = random_range(rng, f.num_keys);
    check_fill(leaf, f, cells, r, c);
    Block rows, cols;
    leaf.rows(f, r.begin, r.end, rows.bytes);
    leaf.cols(f, c.begin, c.end, cols.bytes);
    check_spans(leaf, f, cells, r, c, rows, cols);
    check_merge(leaf, f, rng, r, c, rows, cols);
    const Tile said = leaf.classify(f, rows.bytes, cols.bytes), truth = cells.tile(r, c);
    ++score.tiles;
    if (said == truth) {
      ++score.exact;
    } else {
      CHECK_EQ(said, Tile::kPartial);
    }
  }
}

/// A leaf may only say that it does not vary if it does not.
void check_variation(const LeafNode& leaf, const Problem& p, const Meaning& visible) {
  const int div = p.Hq / leaf.num_heads();
  for (int b = 0; b < p.B; ++b) {
    for (int h = 0; h < p.Hq; ++h) {
      for (int i = 0; i < p.lq[b]; ++i) {
        for (int j = 0; j < p.lk[b]; ++j) {
          if (!CHECK_EQ(visible(b, h, i, j), visible(b, h / div * div, i, j))) return;
          const bool same_frame = !p.varlen && p.q_offset[0] == p.q_offset[b];
          if (same_frame && !leaf.varies_by_batch() &&
              !CHECK_EQ(visible(b, h, i, j), visible(0, h, i, j))) {
            return;
          }
        }
      }
    }
  }
}

Score check_leaf(const std::string& name, unsigned seed) {
  Score score;
  for (int n = 0; n < kProblems; ++n) {
    Rng rng(seed + n);
    Problem p;
    draw_problem(rng, p);
    Generator generator(rng, p);
    const Sample sample = leaf_generators().at(name)(generator);
    const long before = check::num_failures;
    const BoundMask bound(sample.mask, p.shape);
    const LeafNode& leaf = *bound.leaves().at(0);
    check_variation(leaf, p, sample.visible);
    for (int b = 0; b < p.B; ++b) {
      for (int h = 0; h < p.Hq; h += rng.in(1, p.Hq)) {
        const Frame f = bound.frame(b, h);
        CHECK_EQ(f.num_rows, p.lq[b]);
        CHECK_EQ(f.num_keys, p.lk[b]);
        if (f.num_rows == 0 || f.num_keys == 0) continue;
        Cells cells{f.num_rows, f.num_keys, {}};
        for (int i = 0; i < f.num_rows; ++i) {
          for (int j = 0; j < f.num_keys; ++j) cells.seen.push_back(sample.visible(b, h, i, j));
        }
        check_frame(leaf, f, cells, rng, score);
      }
    }
    if (check::num_failures > before) {
      std::printf("%s fails with seed %u\n", name.c_str(), seed + n);
      return score;
    }
  }
  return score;
}

}  // namespace

TEST(every_leaf_follows_its_meaning) {
  for (const LeafKind& kind : leaf_kinds()) {
    if (!CHECK(leaf_generators().count(kind.name) == 1)) {
      std::printf("leaf %s has no generator in leaf_generators.h\n", kind.name.c_str());
      continue;
    }
    const Score s = check_leaf(kind.name, 1000);
    CHECK(s.tiles > 0);
    std::printf("%-14s %6ld tiles, %5.1f%% of the classes exact\n", kind.name.c_str(), s.tiles,
                100.0 * s.exact / s.tiles);
  }
}

TEST(every_leaf_has_a_documented_name_and_fields) {
  for (const LeafKind& kind : leaf_kinds()) {
    CHECK(find_leaf(leaf_kind(kind.name.c_str())) == &kind);
    for (const FieldInfo& field : kind.fields) {
      CHECK(!field.name.empty() && !field.doc.empty());
    }
  }
}

// Leaves whose classes follow from the ranges alone are exact.
TEST(closed_forms_are_exact) {
  for (const char* name :
       {"causal", "window", "prefix", "key_padding", "dilated", "block_bitset", "block_csr"}) {
    const Score s = check_leaf(name, 5000);
    CHECK_EQ(s.exact, s.tiles);
  }
}
