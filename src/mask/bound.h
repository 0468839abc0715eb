// A mask bound to a problem: parsed, checked, with stored summaries, ready to be asked for classes,
// spans and cells. This is all that plan and backends know of masks on the host.
#pragma once

#include <jali/jali.h>

#include <memory>
#include <optional>
#include <vector>

#include "mask/leaf_node.h"
#include "mask/summary.h"

namespace jali {

class BoundMask {
 public:
  /// Checks the program, every table and the shape itself (throws Error), then binds.
  BoundMask(const Mask& mask, const Shape& shape);

  /// The problem it is bound to; with cu_seqlens, Lq and Lk are those of the longest sequence.
  /// On a GPU nobody has read cu_seqlens, offsets and tables: frame(), summarize() and cursors without a
  /// frame of their own must not be used, and Lq and Lk are upper bounds.
  const Shape& shape() const { return shape_; }
  bool on_gpu() const { return shape_.device == DeviceType::kCUDA; }
  /// No mask at all: every cell of every tile is visible.
  bool trivial() const { return nodes_.empty(); }
  /// Whether it has no tables, of one number neither: the host knows all of it.
  bool numbers_alone() const { return num_tables_ == 0; }
  /// Whether cells may differ between sequences (then per-sequence lengths may differ too) / heads.
  bool varies_by_batch() const { return varies_by_batch_; }
  bool varies_by_head() const { return num_heads_ > 1; }
  /// The number of different heads: 1, Hkv or Hq.
  i32 num_mask_heads() const { return num_heads_; }
  i32 num_batches() const { return num_batches_; }
  i32 num_heads() const { return hq_; }
  /// Of the longest sequence.
  i32 longest_rows() const { return lq_; }
  i32 longest_keys() const { return lk_; }
  /// Lengths, position and packed starts of sequence b, seen from query head h.
  Frame frame(i32 b, i32 h) const;

  /// If the mask is one leaf with documents(), alone or & leaves that are relative() and the same for
  /// all sequences: those documents; then the mask becomes the others alone, for cells of one document.
  /// Not if there are more than `most` in a sequence. On the CPU its sequences are the documents then.
  std::optional<TokenTable<i32>> take_documents(i64 most);

  /// Stores the row and key blocks of all leaves that read tables: O(L) work and memory per
  /// different (b, h). Without it, MaskCursor reads the tables of each range it is asked for.
  void summarize();
  std::int64_t summary_bytes() const;

  /// Postfix; `first` and `second` index nodes.
  struct Node {
    enum class Op : u8 { kLeaf, kAnd, kOr, kNot } op;
    i32 leaf = -1;
    i32 first = -1, second = -1;
  };
  const std::vector<Node>& nodes() const { return nodes_; }
  const std::vector<std::unique_ptr<LeafNode>>& leaves() const { return leaves_; }
  /// The stored blocks of a leaf, or null.
  const Summary* summary(i32 leaf) const {
    return summaries_.empty() ? nullptr : summaries_[leaf].get();
  }

 private:
  void bind_shape();
  void bind_frames();
  void bind_documents(const TokenTable<i32>& documents);
  void parse(const Mask& mask);
  void check_tables(const LeafNode& leaf) const;

  Shape shape_;
  i32 num_batches_ = 1, hq_ = 1, num_heads_ = 1, lq_ = 0, lk_ = 0, num_tables_ = 0;
  bool varies_by_batch_ = false;
  bool frames_vary_ = false;   // lengths or offsets differ between sequences
  std::vector<Frame> frames_;  // per sequence, for head 0; one for all unless frames_vary_
  std::vector<Node> nodes_;
  std::vector<std::unique_ptr<LeafNode>> leaves_;
  std::vector<std::unique_ptr<Summary>> summaries_;
};

/// Asks a bound mask about tiles of one (b, h). Cheap to make; one per thread.
class MaskCursor {
 public:
  explicit MaskCursor(const BoundMask& mask);
  /// Of a frame that the mask does not know, as on a GPU; for masks of numbers_alone().
  MaskCursor(const BoundMask& mask, const Frame& frame);
  /// Moves to another sequence and head.
  void set_frame(i32 b, i32 h);
  const Frame& frame() const { return frame_; }

  /// Fixes the tile row [i0, i1), 0 <= i0 < i1 <= num_rows.
  void set_rows(i32 i0, i32 i1);
  /// Fixes the tile column [j0, j1), 0 <= j0 < j1 <= num_keys.
  void set_cols(i32 j0, i32 j1);
  /// Class of (rows, cols), both fixed before. Sound: empty and full are never wrong.
  Tile classify();
  /// Keys that the fixed rows can reach at all, clipped to [0, num_keys).
  Span key_span();
  /// Rows that can reach the fixed keys at all, clipped to [0, num_rows).
  Span row_span();
  /// The cells of the fixed tile, as LeafNode::fill gives them. Returns the tile's exact class.
  Tile fill(u64* bits, i64 stride);
  /// The exact class of the fixed tile; looks at cells only where classify() is unsure.
  Tile exact_class();

 private:
  void* block(std::vector<u64>& blocks, i32 leaf) { return &blocks[i64{leaf} * block_words_]; }
  template <class LeafSpan>
  Span combine_spans(LeafSpan leaf_span);
  void fill_node(i32 node, i32 i0, i32 i1, u64* bits, i64 stride, i32 depth);

  const BoundMask* mask_;
  Frame frame_;
  Span rows_{0, 0}, cols_{0, 0};
  i32 block_words_ = 1;                       // slot of one leaf's block
  std::vector<u64> row_blocks_, col_blocks_;  // one slot per leaf
  std::vector<Tile> classes_;                 // per node, of the fixed tile
  std::vector<Span> spans_;                   // per node
  std::vector<Span> own_spans_;               // per leaf, in closed form
  std::vector<std::vector<u64>> scratch_;     // per depth of the tree, for fill
  std::vector<u64> cells_;                    // a few rows, for exact_class
};

}  // namespace jali
