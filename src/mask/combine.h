// Mask trees as types: And<Or<Window, Prefix>, Document> has the interface of a leaf (see leaf.h),
// so a kernel compiled for it evaluates the whole tree as if it were one leaf.
//
// A tree has no merge(): stored blocks belong to leaves, and rows()/cols() of a tree compose what
// its leaves give.
#pragma once

#include "mask/leaf.h"

namespace jali {

JALI_HD constexpr bool is_empty(Span s) { return s.end <= s.begin; }
JALI_HD constexpr Span intersection(Span a, Span b) {
  return {max_of(a.begin, b.begin), min_of(a.end, b.end)};
}
JALI_HD constexpr Span hull(Span a, Span b) {
  if (is_empty(a)) return b;
  if (is_empty(b)) return a;
  return {min_of(a.begin, b.begin), max_of(a.end, b.end)};
}

template <class M>
concept HasWord = requires(const M& m, typename M::Row r, i32 j) { m.word(r, j, j); };

/// Whether it has among().
template <class M>
concept IsLight = requires(const M& m, typename M::Row r, Run keys) { m.among(r, keys); };

/// Whether it has seen_by().
template <class M>
concept IsLightByKey =
    requires(const M& m, const Frame& f, i32 j, Run rows) { m.seen_by(f, j, rows); };

/// For seen_by(): where the rows are that see a key, if they are one run.
struct AllRows {
  /// Rows lo to hi, both included; none if hi < lo.
  struct Between {
    static constexpr bool kOneRun = true;
    i32 lo, hi;
    JALI_HD friend constexpr Between operator&(Between a, Between b) {
      return {max_of(a.lo, b.lo), min_of(a.hi, b.hi)};
    }
  };
  /// Any others, and what comes of them.
  struct Several {
    static constexpr bool kOneRun = false;
  };
  JALI_HD constexpr Between between(i32 lo, i32 hi) const { return {lo, hi}; }
  template <class Fits>
  JALI_HD constexpr Several each(Fits) const {
    return {};
  }
};
template <class X>
concept OfAllRows = requires { X::kOneRun; };
JALI_HD constexpr AllRows::Several operator&(OfAllRows auto, OfAllRows auto) { return {}; }
JALI_HD constexpr AllRows::Several operator|(OfAllRows auto, OfAllRows auto) { return {}; }
JALI_HD constexpr AllRows::Several operator~(OfAllRows auto) { return {}; }

/// Whether one run of rows sees each key, wherever it is.
template <class M>
constexpr bool seen_in_one_run = false;
template <IsLightByKey M>
constexpr bool seen_in_one_run<M> = decltype(M{}.seen_by(Frame{}, 0, AllRows{}))::kOneRun;

/// What And and Or share: a pair of everything.
template <class A, class B>
struct Pair {
  static constexpr bool kRowsReadTables = A::kRowsReadTables || B::kRowsReadTables;
  static constexpr bool kColsReadTables = A::kColsReadTables || B::kColsReadTables;
  A a;
  B b;

  struct Row {
    typename A::Row a;
    typename B::Row b;
  };
  struct Col {
    typename A::Col a;
    typename B::Col b;
  };
  JALI_HD Row row(const Frame& f, i32 i) const { return {a.row(f, i), b.row(f, i)}; }
  JALI_HD Col col(const Frame& f, i32 j) const { return {a.col(f, j), b.col(f, j)}; }

  struct RowBlock {
    typename A::RowBlock a;
    typename B::RowBlock b;
  };
  struct ColBlock {
    typename A::ColBlock a;
    typename B::ColBlock b;
  };
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const {
    return {a.rows(f, i0, i1), b.rows(f, i0, i1)};
  }
  JALI_HD ColBlock cols(const Frame& f, i32 j0, i32 j1) const {
    return {a.cols(f, j0, j1), b.cols(f, j0, j1)};
  }
};

/// Visible where both are.
template <class A, class B>
struct And : Pair<A, B> {
  using Base = Pair<A, B>;
  using typename Base::Col, typename Base::ColBlock, typename Base::Row, typename Base::RowBlock;
  JALI_HD bool visible(Row r, Col c) const {
    return this->a.visible(r.a, c.a) & this->b.visible(r.b, c.b);
  }
  JALI_HD u64 word(Row r, i32 j, i32 n) const
    requires(HasWord<A> && HasWord<B>)
  {
    return this->a.word(r.a, j, n) & this->b.word(r.b, j, n);
  }
  template <class Keys>
  JALI_HD auto among(Row r, Keys keys) const
    requires(IsLight<A> && IsLight<B>)
  {
    return this->a.among(r.a, keys) & this->b.among(r.b, keys);
  }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const
    requires(IsLightByKey<A> && IsLightByKey<B>)
  {
    return this->a.seen_by(f, j, rows) & this->b.seen_by(f, j, rows);
  }
  JALI_HD Tile classify(const Frame& f, RowBlock r, ColBlock c) const {
    return min_of(this->a.classify(f, r.a, c.a), this->b.classify(f, r.b, c.b));
  }
  JALI_HD Span key_span(const Frame& f, RowBlock r) const {
    return intersection(this->a.key_span(f, r.a), this->b.key_span(f, r.b));
  }
  JALI_HD Span row_span(const Frame& f, ColBlock c) const {
    return intersection(this->a.row_span(f, c.a), this->b.row_span(f, c.b));
  }
};

/// Visible where either is.
template <class A, class B>
struct Or : Pair<A, B> {
  using Base = Pair<A, B>;
  using typename Base::Col, typename Base::ColBlock, typename Base::Row, typename Base::RowBlock;
  JALI_HD bool visible(Row r, Col c) const {
    return this->a.visible(r.a, c.a) | this->b.visible(r.b, c.b);
  }
  JALI_HD u64 word(Row r, i32 j, i32 n) const
    requires(HasWord<A> && HasWord<B>)
  {
    return this->a.word(r.a, j, n) | this->b.word(r.b, j, n);
  }
  template <class Keys>
  JALI_HD auto among(Row r, Keys keys) const
    requires(IsLight<A> && IsLight<B>)
  {
    return this->a.among(r.a, keys) | this->b.among(r.b, keys);
  }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const
    requires(IsLightByKey<A> && IsLightByKey<B>)
  {
    return this->a.seen_by(f, j, rows) | this->b.seen_by(f, j, rows);
  }
  JALI_HD Tile classify(const Frame& f, RowBlock r, ColBlock c) const {
    return max_of(this->a.classify(f, r.a, c.a), this->b.classify(f, r.b, c.b));
  }
  JALI_HD Span key_span(const Frame& f, RowBlock r) const {
    return hull(this->a.key_span(f, r.a), this->b.key_span(f, r.b));
  }
  JALI_HD Span row_span(const Frame& f, ColBlock c) const {
    return hull(this->a.row_span(f, c.a), this->b.row_span(f, c.b));
  }
};

/// Visible where the other is not (inside the bounds of the frame, which no mask knows).
template <class A>
struct Not {
  static constexpr bool kRowsReadTables = A::kRowsReadTables;
  static constexpr bool kColsReadTables = A::kColsReadTables;
  A a;

  using Row = typename A::Row;
  using Col = typename A::Col;
  using RowBlock = typename A::RowBlock;
  using ColBlock = typename A::ColBlock;
  JALI_HD Row row(const Frame& f, i32 i) const { return a.row(f, i); }
  JALI_HD Col col(const Frame& f, i32 j) const { return a.col(f, j); }
  JALI_HD bool visible(Row r, Col c) const { return !a.visible(r, c); }
  JALI_HD u64 word(Row r, i32 j, i32 n) const
    requires(HasWord<A>)
  {
    return ~a.word(r, j, n) & bit_range(0, n);
  }
  template <class Keys>
  JALI_HD auto among(Row r, Keys keys) const
    requires(IsLight<A>)
  {
    return ~a.among(r, keys);
  }
  template <class Rows>
  JALI_HD auto seen_by(const Frame& f, i32 j, Rows rows) const
    requires(IsLightByKey<A>)
  {
    return ~a.seen_by(f, j, rows);
  }
  JALI_HD RowBlock rows(const Frame& f, i32 i0, i32 i1) const { return a.rows(f, i0, i1); }
  JALI_HD ColBlock cols(const Frame& f, i32 j0, i32 j1) const { return a.cols(f, j0, j1); }
  JALI_HD Tile classify(const Frame& f, RowBlock r, ColBlock c) const {
    return static_cast<Tile>(2 - static_cast<i32>(a.classify(f, r, c)));
  }
  // The complement of a span is no span.
  JALI_HD Span key_span(const Frame&, RowBlock) const { return everything(); }
  JALI_HD Span row_span(const Frame&, ColBlock) const { return everything(); }
};

/// Whether Has<L>::value of a leaf L of the tree M.
template <template <class> class Has, class M>
constexpr bool any_leaf = Has<M>::value;
template <template <class> class Has, class A, class B>
constexpr bool any_leaf<Has, And<A, B>> = any_leaf<Has, A> || any_leaf<Has, B>;
template <template <class> class Has, class A, class B>
constexpr bool any_leaf<Has, Or<A, B>> = any_leaf<Has, A> || any_leaf<Has, B>;
template <template <class> class Has, class A>
constexpr bool any_leaf<Has, Not<A>> = any_leaf<Has, A>;

}  // namespace jali
