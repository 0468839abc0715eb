// A tree against its meaning, cell by cell, and its classes and spans against its cells.
#include "mask/combine.h"

#include <string>

#include "check.h"
#include "leaf_list.h"
#include "source_pack.h"

using namespace jali;

namespace {

/// Checks that classes and spans of `mask` are sound for every tile of a frame, and its cells
/// against `meaning(p, j)`.
template <class M, class Meaning>
void check_tree(const M& mask, Meaning meaning) {
  for (i32 q_offset : {-3, 0, 5}) {
    Frame f;
    f.num_rows = 21;
    f.num_keys = 26;
    f.q_offset = q_offset;
    for (i32 i = 0; i < f.num_rows; ++i) {
      for (i32 j = 0; j < f.num_keys; ++j) {
        if (!CHECK_EQ(mask.visible(mask.row(f, i), mask.col(f, j)), meaning(i + q_offset, j)))
          return;
      }
    }
    if constexpr (IsLightByKey<M>) {
      for (i32 j = 0; j < f.num_keys; ++j) {
        const Run rows{j % 4, f.num_rows};
        const u64 seen = mask.seen_by(f, j, rows);
        for (i32 n = 0; n < rows.n; ++n) {
          if (!CHECK_EQ(seen >> n & 1, u64{meaning(rows.first + n + q_offset, j)})) return;
        }
      }
    }
    if constexpr (seen_in_one_run<M>) {
      for (i32 j = 0; j < f.num_keys; ++j) {
        const AllRows::Between rows = mask.seen_by(f, j, AllRows{});
        for (i32 i = 0; i < f.num_rows; ++i) {
          if (!CHECK_EQ(rows.lo <= i && i <= rows.hi, meaning(i + q_offset, j))) return;
        }
      }
    }
    for (i32 i0 = 0; i0 < f.num_rows; i0 += 4) {
      i32 i1 = min_of(i0 + 4, f.num_rows);
      auto r = mask.rows(f, i0, i1);
      Span keys = mask.key_span(f, r);
      for (i32 j0 = 0; j0 < f.num_keys; j0 += 3) {
        i32 j1 = min_of(j0 + 3, f.num_keys);
        auto c = mask.cols(f, j0, j1);
        Span rows = mask.row_span(f, c);
        int num_visible = 0;
        for (i32 i = i0; i < i1; ++i) {
          for (i32 j = j0; j < j1; ++j) {
            if (!meaning(i + q_offset, j)) continue;
            ++num_visible;
            CHECK(j >= keys.begin && j < keys.end);
            CHECK(i >= rows.begin && i < rows.end);
          }
        }
        Tile tile = mask.classify(f, r, c);
        if (tile == Tile::kEmpty) CHECK_EQ(num_visible, 0);
        if (tile == Tile::kFull) CHECK_EQ(num_visible, (i1 - i0) * (j1 - j0));
      }
    }
  }
}

static_assert(seen_in_one_run<And<leaf::Causal, And<leaf::Window, leaf::Prefix>>>);
static_assert(!seen_in_one_run<Or<leaf::Causal, leaf::Prefix>>);
static_assert(!seen_in_one_run<And<Not<leaf::Causal>, leaf::Window>>);
static_assert(!seen_in_one_run<leaf::Document>);

Scalar number(i32 value) {
  Scalar s;
  s.value = value;
  s.given = 1;
  return s;
}

/// A grid of 3 dims; bit d of `causal` is dim d's.
leaf::Neighborhood neighborhood(const i32 (&shape)[3], const i32 (&kernel)[3],
                                const i32 (&dilation)[3], i32 causal) {
  leaf::Neighborhood x;
  for (i32 d = 0; d < 3; ++d) {
    x.shape[d] = number(shape[d]);
    x.kernel[d] = number(kernel[d]);
    x.dilation[d] = number(dilation[d]);
    x.causal[d] = number(causal >> d & 1);
  }
  return x;
}

leaf::Window window(i32 left, i32 right) {
  leaf::Window w;
  w.left = number(left);
  w.right = number(right);
  return w;
}

leaf::Prefix prefix(i32 length) {
  leaf::Prefix p;
  p.length = number(length);
  return p;
}

}  // namespace

TEST(and_or_not_follow_their_meaning) {
  And<leaf::Causal, Or<leaf::Window, leaf::Prefix>> streaming;
  streaming.b.a = window(4, 0);
  streaming.b.b = prefix(2);
  check_tree(streaming, [](i32 p, i32 j) { return j <= p && (p - j <= 4 || j < 2); });

  Not<leaf::Causal> future;
  check_tree(future, [](i32 p, i32 j) { return j > p; });

  And<Not<leaf::Prefix>, Not<leaf::Window>> far;
  far.a.a = prefix(3);
  far.b.a = window(2, 5);
  check_tree(far, [](i32 p, i32 j) { return j >= 3 && (j < p - 2 || j > p + 5); });

  Or<leaf::Causal, Not<leaf::Causal>> tautology;
  check_tree(tautology, [](i32, i32) { return true; });
}

TEST(keys_of_tables_are_seen_by_one_run_of_rows) {
  u8 keep[26];
  i32 start[26], end[26];
  for (i32 j = 0; j < 26; ++j) {
    keep[j] = j % 5 != 2;
    start[j] = j % 7 == 3 ? -kFar : j / 2 - 4;
    end[j] = j % 6 == 1 ? kFar : j % 11 == 5 ? -kFar : j + 3;
  }
  And<leaf::KeyPadding, leaf::KeyInterval> mask;
  mask.a.keep = {keep, 0, 0, 1, 26};
  mask.b.start = {start, 0, 0, 1, 26};
  mask.b.end = {end, 0, 0, 1, 26};
  static_assert(seen_in_one_run<And<leaf::KeyPadding, leaf::KeyInterval>>);
  check_tree(mask, [&](i32 p, i32 j) { return keep[j] && start[j] <= p && p < end[j]; });
}

// Which keys a row sees, against the cells.
TEST(neighborhoods_see_their_keys) {
  const leaf::Neighborhood all[] = {
      neighborhood({1, 1, 40}, {1, 1, 7}, {1, 1, 1}, 0),
      neighborhood({1, 7, 6}, {1, 4, 3}, {1, 1, 1}, 4),
      neighborhood({3, 4, 5}, {2, 3, 5}, {1, 1, 1}, 1),
      neighborhood({2, 3, 9}, {2, 3, 1}, {1, 1, 1}, 2),
      neighborhood({1, 6, 8}, {1, 3, 2}, {1, 2, 3}, 0),
  };
  Frame f;
  f.num_rows = f.num_keys = 64;  // beyond the grids
  for (const leaf::Neighborhood& mask : all) {
    for (i32 a = 0; a < 64; ++a) {
      const Run some{a % 5, 59 - a % 7};
      const u64 keys = mask.among(mask.row(f, a), some);
      for (i32 n = 0; n < some.n; ++n) {
        const i32 b = some.first + n;
        if (!CHECK_EQ(keys >> n & 1, u64{mask.visible(mask.row(f, a), mask.col(f, b))})) return;
      }
    }
  }
}

TEST(classes_are_not_lazy) {
  And<leaf::Causal, leaf::Window> band;
  band.b = window(8, 8);
  Frame f;
  f.num_rows = f.num_keys = 64;
  auto r = band.rows(f, 32, 36);
  CHECK_EQ(band.classify(f, r, band.cols(f, 0, 4)), Tile::kEmpty);
  CHECK_EQ(band.classify(f, r, band.cols(f, 28, 32)), Tile::kFull);
  CHECK_EQ(band.classify(f, r, band.cols(f, 32, 36)), Tile::kPartial);
  CHECK_EQ(band.key_span(f, r).begin, 24);
  CHECK_EQ(band.key_span(f, r).end, 36);
}

TEST(hull_ignores_empty_spans) {
  CHECK_EQ(hull({5, 5}, {7, 9}).begin, 7);
  CHECK_EQ(hull({2, 3}, {4, 0}).end, 3);
  CHECK(is_empty(intersection({0, 4}, {4, 8})));
}

TEST(source_pack_holds_every_leaf_and_what_it_includes) {
  auto packed = [](const std::string& name) {
    for (const PackedSource* s = kSourcePack; s->name; ++s) {
      if (s->name == name) return true;
    }
    return false;
  };
#define JALI_CHECK_PACKED(Struct, name) CHECK(packed("mask/leaf/" #name ".h"));
  JALI_FOR_EACH_LEAF(JALI_CHECK_PACKED)
#undef JALI_CHECK_PACKED
  CHECK(packed("mask/combine.h"));
  CHECK(packed("mask/predicate/ops.h"));
  const std::string mark = "\n#include \"";
  for (const PackedSource* s = kSourcePack; s->name; ++s) {
    std::string text = s->text;
    for (std::size_t at = text.find(mark); at != std::string::npos; at = text.find(mark, at + 1)) {
      std::size_t from = at + mark.size();
      CHECK(packed(text.substr(from, text.find('"', from) - from)));
    }
  }
}
