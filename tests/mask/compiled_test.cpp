// Trees as types (combine.h) against the same trees at run time, over every leaf: the leaf that a
// kernel is compiled for holds the very parameters that the run-time mask was bound to.
#include "check.h"
#include "leaf_generators.h"
#include "leaf_list.h"
#include "mask/bound.h"
#include "mask/combine.h"
#include "mask/leaf_of.h"

using namespace jali;
using namespace random_mask;

namespace {

template <class L>
const L& leaf_at(const BoundMask& bound, int index) {
  return static_cast<const LeafOf<L>&>(*bound.leaves().at(index)).leaf();
}

Span clipped(Span s, int length) {
  s = {max_of(s.begin, 0), min_of(s.end, length)};
  return s.end <= s.begin ? Span{0, 0} : s;
}

/// Without stored blocks the cursor computes exactly what the type computes.
template <class Tree>
void check_same(const Tree& tree, const BoundMask& bound, const Problem& p, Rng& rng) {
  MaskCursor cursor(bound);
  for (int b = 0; b < p.B; ++b) {
    const int m = p.lq[b], n = p.lk[b], h = rng.in(0, p.Hq - 1);
    if (m == 0 || n == 0) continue;
    cursor.set_frame(b, h);
    const Frame f = cursor.frame();
    for (int t = 0; t < 4; ++t) {
      const int i0 = rng.in(0, m - 1), i1 = std::min(i0 + rng.pick<int>({1, 16, 64}), m);
      const int j0 = rng.in(0, n - 1), j1 = std::min(j0 + rng.pick<int>({1, 16, 64}), n);
      cursor.set_rows(i0, i1);
      cursor.set_cols(j0, j1);
      const auto rows = tree.rows(f, i0, i1);
      const auto cols = tree.cols(f, j0, j1);
      CHECK_EQ(tree.classify(f, rows, cols), cursor.classify());
      const Span keys = clipped(tree.key_span(f, rows), n),
                 back = clipped(tree.row_span(f, cols), m);
      CHECK(keys.begin == cursor.key_span().begin && keys.end == cursor.key_span().end);
      CHECK(back.begin == cursor.row_span().begin && back.end == cursor.row_span().end);
      std::vector<u64> bits(i1 - i0);
      cursor.fill(bits.data(), 1);
      for (int i = i0; i < i1; ++i) {
        for (int j = j0; j < j1; ++j) {
          const bool bit = bits[i - i0] >> (j - j0) & 1;
          if (!CHECK_EQ(tree.visible(tree.row(f, i), tree.col(f, j)), bit)) return;
        }
      }
    }
  }
}

/// (L & ~causal) | window, and ~(L | causal) & L2 with a second draw of L.
template <class L>
void check_leaf(const char* name) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    Rng rng(70000 + seed);
    Problem p;
    draw_problem(rng, p);
    Generator g(rng, p);
    const Sample leaf = leaf_generators().at(name)(g), other = leaf_generators().at(name)(g);
    const long before = check::num_failures;
    {
      const BoundMask bound((leaf.mask & ~causal()) | make_window(g).mask, p.shape);
      Or<And<L, Not<jali::leaf::Causal>>, jali::leaf::Window> tree;
      tree.a.a = leaf_at<L>(bound, 0);
      tree.a.b.a = leaf_at<jali::leaf::Causal>(bound, 1);
      tree.b = leaf_at<jali::leaf::Window>(bound, 2);
      check_same(tree, bound, p, rng);
    }
    {
      const BoundMask bound(~(leaf.mask | causal()) & other.mask, p.shape);
      And<Not<Or<L, jali::leaf::Causal>>, L> tree;
      tree.a.a.a = leaf_at<L>(bound, 0);
      tree.a.a.b = leaf_at<jali::leaf::Causal>(bound, 1);
      tree.b = leaf_at<L>(bound, 2);
      check_same(tree, bound, p, rng);
    }
    if (check::num_failures > before) {
      std::printf("%s fails with seed %u\n", name, seed);
      return;
    }
  }
}

}  // namespace

TEST(compiled_trees_are_run_time_trees) {
#define JALI_CHECK_LEAF(Struct, name) check_leaf<leaf::Struct>(#name);
  JALI_FOR_EACH_LEAF(JALI_CHECK_LEAF)
#undef JALI_CHECK_LEAF
}
