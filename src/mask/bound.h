// A mask bound to a problem: parsed, checked, with stored summaries, ready to be asked for classes,
// spans and cells. This is all that plan and backends know of masks on the host.
#pragma once

#include <jali/jali.h>

#include <memory>
#include <vector>

#include "mask/leaf_node.h"

namespace jali {

/// Rows and keys per stored block of a leaf that reads tables.
constexpr i32 kSummary = 64;

class BoundMask {
 public:
  /// Checks the program and every table against the shape (throws Error), then binds.
  BoundMask(const Mask& mask, const Shape& shape);
  ~BoundMask();
  BoundMask(BoundMask&&) noexcept;
  BoundMask& operator=(BoundMask&&) noexcept;

  /// No mask at all: every cell of every tile is visible.
  bool trivial() const { return nodes_.empty(); }
  bool varies_by_batch() const { return varies_by_batch_; }
  bool varies_by_head() const { return varies_by_head_; }
  const Shape& shape() const { return shape_; }
  i32 num_batches() const { return static_cast<i32>(shape_.B); }
  i32 num_heads() const { return static_cast<i32>(shape_.Hq); }
  Frame frame(i32 b, i32 h) const;

  /// Stores the row and key blocks of all leaves that read tables: O(L) work and memory per
  /// distinct (b, h). Without it, MaskCursor reads the tables of each range it is asked for.
  void summarize();
  std::int64_t summary_bytes() const;

  struct Node {
    enum class Op : u8 { kLeaf, kAnd, kOr, kNot } op;
    i32 leaf = -1;  // index into leaves()
  };
  /// Postfix.
  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<std::unique_ptr<LeafNode>>& leaves() const { return leaves_; }

 private:
  friend class MaskCursor;
  struct Summary;  // blocks of one leaf
  Shape shape_;
  std::vector<Node> nodes_;
  std::vector<std::unique_ptr<LeafNode>> leaves_;
  std::vector<std::unique_ptr<Summary>> summaries_;
  bool varies_by_batch_ = false, varies_by_head_ = false;
  std::vector<i32> q_offsets_, q_starts_, k_starts_, q_lengths_, k_lengths_;  // per sequence
};

/// Asks a bound mask about tiles of one (b, h). Cheap to make; one per thread.
class MaskCursor {
 public:
  explicit MaskCursor(const BoundMask& mask);
  /// Moves to another sequence and head.
  void set_frame(i32 b, i32 h);
  const Frame& frame() const { return frame_; }

  /// Fixes the tile row [i0, i1), i0 < i1 <= num_rows.
  void set_rows(i32 i0, i32 i1);
  /// Fixes the tile column [j0, j1).
  void set_cols(i32 j0, i32 j1);
  /// Class of (rows, cols), both fixed before. Sound: empty and full are never wrong.
  Tile classify();
  /// Keys that the fixed rows can reach at all, clipped to [0, num_keys).
  Span key_span();
  /// Rows that can reach the fixed keys at all, clipped to [0, num_rows).
  Span row_span();
  /// The cells of the fixed tile: see LeafNode::fill. Returns the exact class of the tile.
  Tile fill(u64* bits, i64 stride);

 private:
  const BoundMask& mask_;
  Frame frame_;
  Span rows_{0, 0}, cols_{0, 0};
  std::vector<u64> row_blocks_, col_blocks_;  // one slot per leaf, at block_at_
  std::vector<i32> row_at_, col_at_;          // in u64s
  std::vector<u64> scratch_;                  // tiles of intermediate results of fill
};

}  // namespace jali
