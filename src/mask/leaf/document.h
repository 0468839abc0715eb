// Document: a row sees the keys of its own document.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Key j is visible when q_ids[b, i] == k_ids[b, j] >= 0. With one table (k_ids absent) the row at
/// position p = i + q_offset reads q_ids[b, p]; outside the table it sees nothing.
struct Document {
  static constexpr const char* kName = "document";
  static constexpr bool kRowsReadTables = true, kColsReadTables = true;
  TokenTable<i32> q_ids, k_ids;

  template <class V>
  void fields(V&& v) {
    v("q_ids", q_ids, k_ids.given() ? "BQ" : "BP",
      "document of each row [B, Lq]; alone: of each token, by position");
    v("k_ids", k_ids, "BK?", "document of each key [B, Lk]; absent: q_ids, read at the position");
  }

  JALI_HD const char* valid(i32, i32 Lk) const {
    return k_ids.given() || q_ids.packed || q_ids.length >= Lk
               ? nullptr
               : "q_ids alone must hold the document of every key: Lk entries are needed";
  }

  struct Row {
    i32 id;
  };
  struct Col {
    i32 id;
  };
  JALI_HD Row row(const Frame& f, i32 i) const {
    if (k_ids.given()) return {q_ids.at(f.b, f.h, f.q_start, i)};
    i32 p = i + f.q_offset;
    bool inside = p >= 0 && p < (q_ids.packed ? f.num_keys : q_ids.length);
    return {inside ? q_ids.at(f.b, f.h, f.k_start, p) : -1};
  }
  JALI_HD Col col(const Frame& f, i32 j) const {
    return {(k_ids.given() ? k_ids : q_ids).at(f.b, f.h, f.k_start, j)};
  }
  JALI_HD bool visible(Row r, Col c) const { return (r.id == c.id) & (r.id >= 0); }

  /// Smallest and largest valid id; `holes`: an invalid (negative) one is among them.
  struct Block {
    Range ids;
    i32 holes;
  };
  using RowBlock = Block;
  using ColBlock = Block;
  JALI_HD static Block merge(Block a, Block b) {
    return {jali::merge(a.ids, b.ids), a.holes | b.holes};
  }
  JALI_HD static Block of(i32 id) { return id >= 0 ? Block{{id, id}, 0} : Block{{kFar, -kFar}, 1}; }
  /// Reduces `count` ids, side by side at `run`, or, where that is null, given by at(k).
  template <class At>
  JALI_HD static Block reduce(const i32* run, i32 count, At at) {
    Block x{{kFar, -kFar}, 0};
    if (run) {
      for (i32 k = 0; k < count; ++k) x = merge(x, of(run[k]));
    } else {
      for (i32 k = 0; k < count; ++k) x = merge(x, of(at(k)));
    }
    return x;
  }
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    i32 p0 = i0 + f.q_offset, p1 = i1 + f.q_offset;
    bool cut = !k_ids.given() && q_ids.packed && (p0 < 0 || p1 > f.num_keys);
    const i32* run = cut             ? nullptr
                     : k_ids.given() ? q_ids.run(f.b, f.h, f.q_start, i0, i1)
                                     : q_ids.run(f.b, f.h, f.k_start, p0, p1);
    return reduce(run, i1 - i0, [&](i32 k) { return row(f, i0 + k).id; });
  }
  JALI_HD ColBlock cols(const Frame& f, i32 j0, i32 j1) const {
    const i32* run = (k_ids.given() ? k_ids : q_ids).run(f.b, f.h, f.k_start, j0, j1);
    return reduce(run, j1 - j0, [&](i32 k) { return col(f, j0 + k).id; });
  }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const {
    bool empty =
        r.ids.hi < c.ids.lo || c.ids.hi < r.ids.lo || r.ids.hi < r.ids.lo || c.ids.hi < c.ids.lo;
    bool one = r.ids.lo == r.ids.hi && c.ids.lo == c.ids.hi;
    return tile_of(empty, one && !(r.holes | c.holes));
  }
  // No bound in closed form; the plan narrows it from the stored blocks.
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

}  // namespace jali::leaf
