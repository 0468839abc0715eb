// Packed document: documents lie behind each other, and a row sees the keys of its own.
#pragma once

#include "mask/leaf.h"

namespace jali::leaf {

/// Document n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. Key j is visible to the row at
/// position p = i + q_offset when both are in the same one; tokens outside all are in none.
struct PackedDocument {
  static constexpr const char* kName = "packed_document";
  static constexpr bool kRowsReadTables = false, kColsReadTables = false;  // but a few entries
  TokenTable<i32> cu_seqlens;

  template <class V>
  void fields(V&& v) {
    v("cu_seqlens", cu_seqlens, "BN",
      "first token of each document and the end of the last [B, documents + 1]");
  }
  const TokenTable<i32>* documents() const { return &cu_seqlens; }

  JALI_HD i32 bound(const Frame& f, i32 n) const { return cu_seqlens.at(f.b, f.h, 0, n); }
  JALI_HD i32 num_documents() const { return cu_seqlens.length - 1; }
  JALI_HD i32 end_of_last(const Frame& f) const { return bound(f, num_documents()); }
  const char* valid_tables(const Frame& f) const {
    if (bound(f, 0) != 0) return "cu_seqlens must begin with 0";
    for (i32 n = 0; n < num_documents(); ++n) {
      if (bound(f, n + 1) < bound(f, n)) {
        return "cu_seqlens decreases; it must hold the running sum of the documents' lengths";
      }
    }
    return nullptr;
  }

  /// The tokens of the document of token p, which is in one.
  JALI_HD Span document_of(const Frame& f, i32 p) const {
    i32 n = 0, after = num_documents();  // the document is among [n, after)
    while (after - n > 1) {
      const i32 middle = n + (after - n) / 2;
      if (bound(f, middle) <= p) {
        n = middle;
      } else {
        after = middle;
      }
    }
    return {bound(f, n), bound(f, n + 1)};
  }

  struct Row {
    i32 begin, end;
  };
  struct Col {
    i32 j;
  };
  JALI_HD Row row(const Frame& f, i32 i) const {
    const i32 p = i + f.q_offset;
    if (p < 0 || p >= end_of_last(f)) return {0, 0};
    const Span own = document_of(f, p);
    return {own.begin, own.end};
  }
  JALI_HD Col col(const Frame&, i32 j) const { return {j}; }
  JALI_HD bool visible(Row r, Col c) const { return (r.begin <= c.j) & (c.j < r.end); }
  template <class Keys>
  JALI_HD auto among(Row r, Keys keys) const {
    return keys.between(r.begin, r.end - 1);
  }
  JALI_HD u64 word(Row r, i32 j, i32 n) const { return among(r, Run{j, n}); }

  using RowBlock = Intervals;
  using ColBlock = Range;  // keys
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    const i32 p0 = i0 + f.q_offset, p1 = i1 + f.q_offset - 1, end = end_of_last(f);
    const i32 first = max_of(p0, 0), last = min_of(p1, end - 1);
    if (first > last) return intervals_of({0, 0});
    const Span a = document_of(f, first), z = document_of(f, last);
    const bool one = p0 == first && p1 == last && a.begin == z.begin;
    return {{a.begin, z.end}, one ? a : Span{kFar, -kFar}};
  }
  JALI_HD ColBlock cols(const Frame&, i32 j0, i32 j1) const { return {j0, j1 - 1}; }
  JALI_HD Tile classify(const Frame&, RowBlock r, ColBlock c) const { return jali::classify(r, c); }
  JALI_HD Span key_span(const Frame&, RowBlock r) const { return r.reach; }
  JALI_HD Span row_span(const Frame& f, ColBlock c) const {
    const i32 last = min_of(c.hi, end_of_last(f) - 1);
    if (c.lo > last) return {kFar, -kFar};
    return {document_of(f, c.lo).begin - f.q_offset, document_of(f, last).end - f.q_offset};
  }
};

}  // namespace jali::leaf
