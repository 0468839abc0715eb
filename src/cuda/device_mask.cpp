#include "cuda/device_mask.h"

#include <cstring>
#include <set>

#include "base/tensor.h"

namespace jali::cuda {
namespace {

constexpr i32 kBlockAlignment = 16;

bool is_stored(const LeafNode& leaf) { return leaf.rows_read_tables() || leaf.cols_read_tables(); }

i32 aligned(i32 at, i32 alignment) { return ceil_div(at, alignment) * alignment; }

}  // namespace

DeviceMask::DeviceMask(const BoundMask& mask) : mask_(&mask), type_("cuda::NoMask") {
  if (mask.trivial()) return;
  type_.clear();
  type_.reserve(128);
  const i32 root = static_cast<i32>(mask.nodes().size()) - 1;
  add_type(root);
  num_bytes_ = place(root, 0);
}

void DeviceMask::add_type(i32 n) {
  using Op = BoundMask::Node::Op;
  const BoundMask::Node& node = mask_->nodes()[n];
  if (node.op == Op::kLeaf) {
    const LeafNode& leaf = *mask_->leaves()[node.leaf];
    const bool stored = is_stored(leaf);
    if (stored) type_ += "cuda::Stored<";
    type_ += leaf.device_type();
    if (stored) type_ += ">";
    return;
  }
  type_ += node.op == Op::kAnd ? "And<" : node.op == Op::kOr ? "Or<" : "Not<";
  add_type(node.first);
  if (node.op != Op::kNot) {
    type_ += ", ";
    add_type(node.second);
  }
  type_ += ">";
}

std::string DeviceMask::definitions() const {
  if (mask_->trivial()) return "#include \"cuda/tile/no_mask.h\"\n";
  std::set<std::string> different;
  for (const auto& leaf : mask_->leaves()) different.insert(leaf->device_definition());
  std::string text = "#include \"cuda/kernel/stored.h\"\n";
  for (const std::string& one : different) text += one;
  return text;
}

i32 DeviceMask::alignment_of(i32 n) const {
  const BoundMask::Node& node = mask_->nodes()[n];
  if (node.op == BoundMask::Node::Op::kLeaf) {
    const LeafNode& leaf = *mask_->leaves()[node.leaf];
    const i32 own = leaf.device_bytes().alignment;
    return is_stored(leaf) ? max_of(own, static_cast<i32>(alignof(StoredBlocks))) : own;
  }
  const i32 first = alignment_of(node.first);
  return node.op == BoundMask::Node::Op::kNot ? first : max_of(first, alignment_of(node.second));
}

// The layout that a compiler gives to the members of And, Or and Not: one behind the other. `at` is a
// multiple of the node's alignment. Returns the size.
i32 DeviceMask::place(i32 n, i32 at) {
  const BoundMask::Node& node = mask_->nodes()[n];
  if (node.op == BoundMask::Node::Op::kLeaf) return place_leaf(node.leaf, at);
  i32 size = place(node.first, at);
  if (node.op == BoundMask::Node::Op::kNot) return size;
  size = aligned(size, alignment_of(node.second));
  size += place(node.second, at + size);
  return aligned(size, alignment_of(n));
}

i32 DeviceMask::place_leaf(i32 leaf, i32 at) {
  const LeafNode& node = *mask_->leaves()[leaf];
  Piece piece{leaf, at, -1, {}, {}};
  i32 size = node.device_bytes().size;
  if (is_stored(node)) {
    size = aligned(size, alignof(StoredBlocks));
    piece.stored_at = at + size;
    if (node.rows_read_tables()) piece.rows = blocks(node, true, node.device_row_block_bytes());
    if (node.cols_read_tables()) piece.keys = blocks(node, false, node.device_col_block_bytes());
    size += 2 * static_cast<i32>(sizeof(StoredBlocks));
  }
  pieces_.push_back(piece);
  return size;
}

StoredBlocks DeviceMask::blocks(const LeafNode& leaf, bool rows, int block_bytes) {
  const Shape& s = mask_->shape();
  StoredBlocks stored;
  stored.packed = s.cu_seqlens_q.given();
  stored.head_div = static_cast<i32>(s.Hq) / leaf.num_heads();
  stored.num = static_cast<i32>(
      stored.packed ? num_slots(rows ? s.Tq : s.Tk, static_cast<i32>(s.B), kStoredSpan)
                    : ceil_div<i64>(rows ? s.Lq : s.Lk, kStoredSpan));
  const bool offsets = s.q_offset.tag == IntParam::Tag::kTable;
  const bool varies = !stored.packed && s.B > 1 && (offsets || leaf.varies_by_batch());
  const i64 of_all_heads = i64{stored.num} * leaf.num_heads();
  if (leaf.num_heads() > 1) stored.stride_h = stored.num;
  if (varies) stored.stride_b = of_all_heads;
  stored.data = reinterpret_cast<void*>(stored_bytes_);
  const i64 blocks = of_all_heads * (varies ? s.B : 1), bytes = blocks * block_bytes;
  num_stored_blocks_ += blocks;
  stored_bytes_ += ceil_div<i64>(bytes, kBlockAlignment) * kBlockAlignment;
  return stored;
}

std::vector<u64> DeviceMask::parameters(void* stored) const {
  std::vector<u64> words(ceil_div(num_bytes_, 8));
  char* out = reinterpret_cast<char*>(words.data());
  for (const Piece& piece : pieces_) {
    const LeafBytes bytes = mask_->leaves()[piece.leaf]->device_bytes();
    std::memcpy(out + piece.at, bytes.data, bytes.size);
    if (piece.stored_at < 0) continue;
    StoredBlocks sides[2] = {piece.rows, piece.keys};
    for (StoredBlocks& side : sides) {
      side.data = static_cast<char*>(stored) + reinterpret_cast<i64>(side.data);
    }
    std::memcpy(out + piece.stored_at, sides, sizeof sides);
  }
  return words;
}

Sequences sequences_of(const BoundMask& mask, const std::optional<TokenTable<i32>>& documents) {
  const Shape& s = mask.shape();
  Sequences out;
  out.B = static_cast<i32>(s.B);
  out.Hq = static_cast<i32>(s.Hq);
  out.group = static_cast<i32>(s.Hq / s.Hkv);
  out.Lq = mask.longest_rows();
  out.Lk = mask.longest_keys();
  if (s.q_offset.tag == IntParam::Tag::kNumber) {
    out.q_offset = static_cast<i32>(s.q_offset.number);
  } else if (s.q_offset.tag == IntParam::Tag::kTable) {
    const TensorView& offsets = s.q_offset.table;
    out.q_offsets = data_of<const i32>(offsets);
    if (offsets.rank == 1 && offsets.shape[0] > 1) out.q_offsets_step = offsets.stride[0];
  }
  if (s.cu_seqlens_q.given()) {
    out.cu_q = data_of<const i32>(s.cu_seqlens_q);
    out.cu_k = data_of<const i32>(s.cu_seqlens_k);
    out.packed = true;
    out.pieces = out.B;
    out.tokens_q = static_cast<i32>(s.Tq);
    out.tokens_k = static_cast<i32>(s.Tk);
  } else if (documents) {
    out.cu_q = out.cu_k = documents->data;
    out.cu_step = static_cast<i32>(documents->stride_b);
    out.pieces = documents->length - 1;
    out.tokens_q = out.Lq;
    out.tokens_k = out.Lk;
  }
  return out;
}

}  // namespace jali::cuda
