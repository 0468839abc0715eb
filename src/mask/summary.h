// Stored row and key blocks of a leaf that reads tables: per 64 rows or keys, with a pyramid above
// (each level merges 8 blocks of the one below) that finds the ends of a span in O(log L).
#pragma once

#include <vector>

#include "mask/leaf_node.h"

namespace jali {

/// Rows or keys per stored block.
constexpr i32 kSummary = 64;

/// The blocks of one side (rows or keys) of one leaf for one (b, h).
class BlockPyramid {
 public:
  enum class Side { kRows, kKeys };
  /// Reads the tables of [0, length): O(length).
  BlockPyramid(const LeafNode& leaf, const Frame& f, Side side);

  /// The block of [begin, end), merged from stored ones; false where the range does not lie on
  /// multiples of kSummary (the caller then reads the tables).
  bool range(i32 begin, i32 end, void* out) const;
  /// Narrows `within` to where `other` (a block of the other side) is not surely empty. Never drops
  /// a visible cell; bounded work.
  Span narrow(const Frame& f, const void* other, Span within) const;
  std::int64_t bytes() const;

 private:
  static constexpr i32 kFan = 8;
  const char* at(int level, i32 index) const {
    return reinterpret_cast<const char*>(levels_[level].data()) + i64{index} * block_bytes_;
  }
  char* at(int level, i32 index) {
    return reinterpret_cast<char*>(levels_[level].data()) + i64{index} * block_bytes_;
  }
  i32 count(int level) const { return counts_[level]; }
  void merge(void* into, const void* block) const;
  bool active(const Frame& f, const void* other, int level, i32 index) const;
  i32 first_active(const Frame& f, const void* other, int level, i32 index, i32 low, i32 high,
                   i32& budget) const;
  i32 last_active(const Frame& f, const void* other, int level, i32 index, i32 low, i32 high,
                  i32& budget) const;

  const LeafNode* leaf_;
  Side side_;
  i32 length_;
  i32 block_bytes_;  // a multiple of 8
  std::vector<std::vector<u64>> levels_;
  std::vector<i32> counts_;
};

/// Both sides of one leaf, for every different (b, h).
class Summary {
 public:
  /// `frames`: one per sequence whose lengths and offsets differ, else one for all.
  Summary(const LeafNode& leaf, const std::vector<Frame>& frames, i32 num_batches, i32 hq);
  const BlockPyramid* rows(i32 b, i32 h) const {
    return rows_.empty() ? nullptr : &rows_[slot(b, h)];
  }
  const BlockPyramid* keys(i32 b, i32 h) const {
    return keys_.empty() ? nullptr : &keys_[slot(b, h)];
  }
  std::int64_t bytes() const;

 private:
  i32 slot(i32 b, i32 h) const { return (num_batches_ > 1 ? b : 0) * num_heads_ + h / head_div_; }
  i32 num_batches_, num_heads_, head_div_;
  std::vector<BlockPyramid> rows_, keys_;
};

}  // namespace jali
