#include "mask/summary.h"

#include <algorithm>
#include <cstring>

namespace jali {

BlockPyramid::BlockPyramid(const LeafNode& leaf, const Frame& f, Side side)
    : leaf_(&leaf), side_(side) {
  const bool rows = side == Side::kRows;
  length_ = rows ? f.num_rows : f.num_keys;
  block_bytes_ = ((rows ? leaf.row_block_bytes() : leaf.col_block_bytes()) + 7) / 8 * 8;
  i32 n = ceil_div(length_, kSummary);
  counts_.push_back(n);
  levels_.emplace_back(i64{n} * block_bytes_ / 8);
  for (i32 k = 0; k < n; ++k) {
    const i32 begin = k * kSummary, end = min_of(length_, begin + kSummary);
    rows ? leaf.rows(f, begin, end, at(0, k)) : leaf.cols(f, begin, end, at(0, k));
  }
  while (n > 1) {
    const int below = static_cast<int>(levels_.size()) - 1;
    const i32 num_below = n;
    n = ceil_div(n, kFan);
    counts_.push_back(n);
    levels_.emplace_back(i64{n} * block_bytes_ / 8);
    for (i32 k = 0; k < n; ++k) {
      std::memcpy(at(below + 1, k), at(below, k * kFan), block_bytes_);
      for (i32 c = k * kFan + 1; c < min_of(num_below, (k + 1) * kFan); ++c) {
        merge(at(below + 1, k), at(below, c));
      }
    }
  }
}

void BlockPyramid::merge(void* into, const void* block) const {
  side_ == Side::kRows ? leaf_->merge_rows(into, block) : leaf_->merge_cols(into, block);
}

bool BlockPyramid::range(i32 begin, i32 end, void* out) const {
  if (begin % kSummary != 0 || (end % kSummary != 0 && end != length_)) return false;
  std::memcpy(out, at(0, begin / kSummary), block_bytes_);
  for (i32 k = begin / kSummary + 1; k < ceil_div(end, kSummary); ++k) merge(out, at(0, k));
  return true;
}

bool BlockPyramid::active(const Frame& f, const void* other, int level, i32 index) const {
  const void* own = at(level, index);
  return (side_ == Side::kRows ? leaf_->classify(f, own, other) : leaf_->classify(f, other, own)) !=
         Tile::kEmpty;
}

// Depth-first over the blocks of [low, high) (indices of level 0). Returns the first active one,
// or, when the budget runs out, the first not ruled out; `high` when there is none.
i32 BlockPyramid::first_active(const Frame& f, const void* other, int level, i32 index, i32 low,
                               i32 high, i32& budget) const {
  const i32 width = 1 << (3 * level);
  const i32 begin = index * width;
  if (begin + width <= low || begin >= high) return high;
  if (--budget < 0) return max_of(begin, low);
  if (!active(f, other, level, index)) return high;
  if (level == 0) return begin;
  for (i32 c = index * kFan; c < min_of(count(level - 1), (index + 1) * kFan); ++c) {
    const i32 found = first_active(f, other, level - 1, c, low, high, budget);
    if (found < high) return found;
  }
  return high;
}

// The mirror image: the last active one plus one, or `low` when there is none.
i32 BlockPyramid::last_active(const Frame& f, const void* other, int level, i32 index, i32 low,
                              i32 high, i32& budget) const {
  const i32 width = 1 << (3 * level);
  const i32 begin = index * width;
  if (begin + width <= low || begin >= high) return low;
  if (--budget < 0) return min_of(begin + width, high);
  if (!active(f, other, level, index)) return low;
  if (level == 0) return begin + 1;
  for (i32 c = min_of(count(level - 1), (index + 1) * kFan) - 1; c >= index * kFan; --c) {
    const i32 found = last_active(f, other, level - 1, c, low, high, budget);
    if (found > low) return found;
  }
  return low;
}

Span BlockPyramid::narrow(const Frame& f, const void* other, Span within) const {
  constexpr i32 kBudget = 256;
  const i32 low = max_of(within.begin, 0) / kSummary;
  const i32 high = ceil_div(min_of(within.end, length_), kSummary);
  if (low >= high) return {0, 0};
  // PERF: the ends themselves are mostly active; the pyramid is for when they are not.
  const int top = static_cast<int>(levels_.size()) - 1;
  i32 budget = kBudget;
  const i32 first =
      active(f, other, 0, low) ? low : first_active(f, other, top, 0, low, high, budget);
  if (first >= high) return {0, 0};
  budget = kBudget;
  const i32 last =
      active(f, other, 0, high - 1) ? high : last_active(f, other, top, 0, first, high, budget);
  return {first * kSummary, min_of(last * kSummary, length_)};
}

std::int64_t BlockPyramid::bytes() const {
  std::int64_t n = 0;
  for (const auto& level : levels_) n += static_cast<std::int64_t>(level.size()) * 8;
  return n;
}

Summary::Summary(const LeafNode& leaf, const std::vector<Frame>& frames, i32 num_batches, i32 hq)
    : num_batches_(leaf.varies_by_batch() || frames.size() > 1 ? num_batches : 1),
      num_heads_(leaf.num_heads()),
      head_div_(hq / leaf.num_heads()) {
  for (i32 b = 0; b < num_batches_; ++b) {
    for (i32 h = 0; h < num_heads_; ++h) {
      Frame f = frames[frames.size() > 1 ? b : 0];
      f.b = b;
      f.h = h * head_div_;
      if (leaf.rows_read_tables()) rows_.emplace_back(leaf, f, BlockPyramid::Side::kRows);
      if (leaf.cols_read_tables()) keys_.emplace_back(leaf, f, BlockPyramid::Side::kKeys);
    }
  }
}

std::int64_t Summary::bytes() const {
  std::int64_t n = 0;
  for (const auto& p : rows_) n += p.bytes();
  for (const auto& p : keys_) n += p.bytes();
  return n;
}

}  // namespace jali
