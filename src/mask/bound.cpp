#include "mask/bound.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/tensor.h"

namespace jali {
namespace {

void check_cu_seqlens(const char* name, const TensorView& cu, const Shape& s) {
  if (cu.rank != 1 || cu.dtype != DType::kI32) {
    type_error(name, " is ", dtype_name(cu.dtype), " ", shape_text(cu),
               "; expected int32 [number of sequences + 1]");
  }
  if (cu.shape[0] != s.B + 1) {
    value_error(name, " has ", cu.shape[0], " entries; expected ", s.B + 1);
  }
  if (cu.stride[0] != 1) value_error(name, " must be contiguous");
  check_device(name, cu, s.device, s.device_index);
}

const i32* read_cu_seqlens(const char* name, const TensorView& cu, std::int64_t B) {
  const i32* at = data_of<const i32>(cu);
  if (at[0] != 0) value_error(name, "[0] = ", at[0], "; expected 0");
  for (std::int64_t b = 0; b < B; ++b) {
    if (at[b + 1] < at[b]) {
      value_error(name, " decreases at ", b + 1, " (", at[b], " to ", at[b + 1],
                  "); it must hold the running sum of the sequence lengths");
    }
  }
  return at;
}

void check_offset(i64 offset) {
  if (offset < -kMaxLength || offset > kMaxLength) {
    value_error("q_offset = ", offset, " is beyond ±2^30");
  }
}

i32 check_length(const char* name, std::int64_t n) {
  if (n < 0 || n >= kMaxLength) value_error(name, " = ", n, "; expected 0 <= ", name, " < 2^30");
  return static_cast<i32>(n);
}

}  // namespace

BoundMask::BoundMask(const Mask& mask, const Shape& shape) : shape_(shape) {
  bind_shape();
  if (!on_gpu()) bind_frames();
  num_tables_ = static_cast<i32>(mask.tables().size());
  parse(mask);
}

void BoundMask::bind_shape() {
  Shape& s = shape_;
  if (s.B < 0 || s.Hq < 1 || s.Hkv < 1 || s.Hq % s.Hkv != 0) {
    value_error("B = ", s.B, ", Hq = ", s.Hq, ", Hkv = ", s.Hkv,
                ": expected at least one head, and Hq a multiple of Hkv");
  }
  num_batches_ = static_cast<i32>(s.B);
  hq_ = static_cast<i32>(s.Hq);
  const bool varlen = s.cu_seqlens_q.given();
  if (varlen != s.cu_seqlens_k.given()) {
    value_error("cu_seqlens_q and cu_seqlens_k must be given together");
  }
  if (varlen) {
    check_cu_seqlens("cu_seqlens_q", s.cu_seqlens_q, s);
    check_cu_seqlens("cu_seqlens_k", s.cu_seqlens_k, s);
    s.Lq = s.Lk = 0;
    if (on_gpu()) {
      s.Lq = s.Tq;
      s.Lk = s.Tk;
    } else {
      const i32* cu_q = read_cu_seqlens("cu_seqlens_q", s.cu_seqlens_q, s.B);
      const i32* cu_k = read_cu_seqlens("cu_seqlens_k", s.cu_seqlens_k, s.B);
      for (std::int64_t b = 0; b < s.B; ++b) {
        s.Lq = max_of<std::int64_t>(s.Lq, cu_q[b + 1] - cu_q[b]);
        s.Lk = max_of<std::int64_t>(s.Lk, cu_k[b + 1] - cu_k[b]);
      }
    }
  }
  lq_ = check_length("Lq", s.Lq);
  lk_ = check_length("Lk", s.Lk);
  const TensorView& offsets = s.q_offset.table;
  const bool table = s.q_offset.tag == IntParam::Tag::kTable;
  if (table) {
    if (offsets.dtype != DType::kI32) {
      type_error("q_offset has dtype ", dtype_name(offsets.dtype), "; expected int32");
    }
    if (offsets.rank > 1 || (offsets.num_elements() != 1 && offsets.num_elements() != s.B)) {
      value_error("q_offset ", shape_text(offsets), ": expected an int or a tensor [B = ", s.B,
                  "]");
    }
    check_device("q_offset", offsets, s.device, s.device_index);
  }
  if (s.q_offset.tag == IntParam::Tag::kNumber) check_offset(s.q_offset.number);
  frames_vary_ = varlen || (table && offsets.num_elements() > 1);
  varies_by_batch_ = frames_vary_;
}

void BoundMask::bind_frames() {
  const Shape& s = shape_;
  const bool varlen = s.cu_seqlens_q.given();
  const i32* cu_q = varlen ? data_of<const i32>(s.cu_seqlens_q) : nullptr;
  const i32* cu_k = varlen ? data_of<const i32>(s.cu_seqlens_k) : nullptr;
  for (i32 b = 0; b < (frames_vary_ ? num_batches_ : 1); ++b) {
    Frame f;
    f.b = b;
    f.num_rows = varlen ? cu_q[b + 1] - cu_q[b] : lq_;
    f.num_keys = varlen ? cu_k[b + 1] - cu_k[b] : lk_;
    f.q_start = varlen ? cu_q[b] : 0;
    f.k_start = varlen ? cu_k[b] : 0;
    i64 offset = i64{f.num_keys} - f.num_rows;
    if (s.q_offset.tag == IntParam::Tag::kNumber) offset = s.q_offset.number;
    if (s.q_offset.tag == IntParam::Tag::kTable) {
      const TensorView& offsets = s.q_offset.table;
      const i64 step = offsets.rank == 1 && offsets.shape[0] > 1 ? offsets.stride[0] : 0;
      offset = data_of<const i32>(offsets)[b * step];
      check_offset(offset);
    }
    f.q_offset = static_cast<i32>(offset);
    frames_.push_back(f);
  }
  if (frames_.empty()) frames_.emplace_back();
}

void BoundMask::parse(const Mask& mask) {
  const std::vector<std::int64_t>& program = mask.program();
  BindContext context{shape_, mask.scalars().data(), mask.tables().data(),
                      mask.scalars().data() + mask.scalars().size(),
                      mask.tables().data() + mask.tables().size()};
  std::vector<i32> stack;
  auto pop = [&] {
    if (stack.empty()) value_error("mask program: an operator lacks its operand");
    const i32 node = stack.back();
    stack.pop_back();
    return node;
  };
  for (std::size_t at = 0; at < program.size();) {
    const std::int64_t code = program[at++];
    Node node{Node::Op::kNot};
    if (code == Mask::kAnd || code == Mask::kOr) {
      node.op = code == Mask::kAnd ? Node::Op::kAnd : Node::Op::kOr;
      node.second = pop();
      node.first = pop();
    } else if (code == Mask::kNot) {
      node.first = pop();
    } else {
      const LeafKind* kind = find_leaf(code);
      if (!kind) value_error("mask program: ", code, " is no operator and no known leaf");
      const std::int64_t size = at < program.size() ? program[at++] : -1;
      if (size < 0 || size > static_cast<std::int64_t>(program.size() - at)) {
        value_error("mask program: leaf ", kind->name, " is cut short");
      }
      node.op = Node::Op::kLeaf;
      node.leaf = static_cast<i32>(leaves_.size());
      leaves_.push_back(kind->bind(context, program.data() + at, size));
      at += size;
      varies_by_batch_ |= leaves_.back()->varies_by_batch();
      num_heads_ = max_of(num_heads_, leaves_.back()->num_heads());
    }
    stack.push_back(static_cast<i32>(nodes_.size()));
    nodes_.push_back(node);
  }
  if (stack.size() > 1)
    value_error("mask program: ", stack.size(), " expressions left, expected 1");
  if (context.scalars != context.scalars_end || context.tables != context.tables_end) {
    value_error("mask program: ", context.scalars_end - context.scalars, " scalars and ",
                context.tables_end - context.tables, " tables are left over");
  }
  if (on_gpu()) return;
  for (const auto& leaf : leaves_) check_tables(*leaf);
}

std::optional<TokenTable<i32>> BoundMask::take_documents(i64 most) {
  i32 found = -1;
  for (const Node& node : nodes_) {
    if (node.op != Node::Op::kLeaf && node.op != Node::Op::kAnd) return {};
  }
  for (i32 n = 0; n < static_cast<i32>(leaves_.size()); ++n) {
    const LeafNode& leaf = *leaves_[n];
    const bool documents = leaf.documents() != nullptr;
    if (documents ? found >= 0 : !leaf.relative() || leaf.varies_by_batch()) return {};
    if (documents) found = n;
  }
  if (found < 0) return {};
  const TokenTable<i32> documents = *leaves_[found]->documents();
  const i64 num = documents.length - 1;
  const i64 largest = kMaxLength / max_of(num_batches_, 1);
  if (num < 1 || num > most || documents.stride_l != 1 || documents.stride_b > largest) return {};
  leaves_.erase(leaves_.begin() + found);
  --num_tables_;       // its only one
  summaries_.clear();  // relative leaves have none
  nodes_.clear();
  for (i32 n = 0; n < static_cast<i32>(leaves_.size()); ++n) {
    nodes_.push_back({Node::Op::kLeaf, n});
    const i32 last = static_cast<i32>(nodes_.size()) - 1;
    if (n > 0) nodes_.push_back({Node::Op::kAnd, -1, last - 1, last});
  }
  varies_by_batch_ = frames_vary_;
  if (!on_gpu()) bind_documents(documents);
  return documents;
}

void BoundMask::bind_documents(const TokenTable<i32>& documents) {
  const i32 length = lk_, num = documents.length - 1;
  frames_.clear();
  lq_ = lk_ = 0;
  for (i32 b = 0; b < num_batches_; ++b) {
    for (i32 n = 0; n < num; ++n) {
      Frame f;
      f.q_start = f.k_start = min_of(documents.at(b, 0, 0, n), length);
      f.num_rows = f.num_keys = min_of(documents.at(b, 0, 0, n + 1), length) - f.q_start;
      lq_ = lk_ = max_of(lk_, f.num_keys);
      frames_.push_back(f);
    }
  }
  num_batches_ *= num;
  frames_vary_ = varies_by_batch_ = true;
}

void BoundMask::check_tables(const LeafNode& leaf) const {
  const i32 batches =
      leaf.varies_by_batch() || frames_vary_ ? num_batches_ : min_of(num_batches_, 1);
  for (i32 b = 0; b < batches; ++b) {
    for (i32 h = 0; h < leaf.num_heads(); ++h) {
      if (const char* wrong = leaf.wrong_tables(frame(b, h * (hq_ / leaf.num_heads())))) {
        value_error(leaf.name(), ": ", wrong);
      }
    }
  }
}

Frame BoundMask::frame(i32 b, i32 h) const {
  Frame f = frames_[frames_vary_ ? b : 0];
  f.b = b;
  f.h = h;
  return f;
}

void BoundMask::summarize() {
  summaries_.clear();
  for (const auto& leaf : leaves_) {
    const bool reads = leaf->rows_read_tables() || leaf->cols_read_tables();
    summaries_.push_back(reads ? std::make_unique<Summary>(*leaf, frames_, num_batches_, hq_)
                               : nullptr);
  }
}

std::int64_t BoundMask::summary_bytes() const {
  std::int64_t n = 0;
  for (const auto& s : summaries_) n += s ? s->bytes() : 0;
  return n;
}

MaskCursor::MaskCursor(const BoundMask& mask)
    : MaskCursor(mask, mask.num_batches() > 0 ? mask.frame(0, 0) : Frame{}) {}

MaskCursor::MaskCursor(const BoundMask& mask, const Frame& frame) : mask_(&mask), frame_(frame) {
  for (const auto& leaf : mask.leaves()) {
    const i32 bytes = max_of(leaf->row_block_bytes(), leaf->col_block_bytes());
    block_words_ = max_of(block_words_, ceil_div(bytes, 8));
  }
  row_blocks_.resize(mask.leaves().size() * block_words_);
  col_blocks_.resize(mask.leaves().size() * block_words_);
  classes_.resize(mask.nodes().size());
  spans_.resize(mask.nodes().size());
  own_spans_.resize(mask.leaves().size());
}

void MaskCursor::set_frame(i32 b, i32 h) { frame_ = mask_->frame(b, h); }

void MaskCursor::set_rows(i32 i0, i32 i1) {
  rows_ = {i0, i1};
  for (i32 k = 0; k < static_cast<i32>(mask_->leaves().size()); ++k) {
    const Summary* summary = mask_->summary(k);
    const BlockPyramid* stored = summary ? summary->rows(frame_.b, frame_.h) : nullptr;
    void* out = block(row_blocks_, k);
    if (!stored || !stored->range(i0, i1, out)) mask_->leaves()[k]->rows(frame_, i0, i1, out);
  }
}

void MaskCursor::set_cols(i32 j0, i32 j1) {
  cols_ = {j0, j1};
  for (i32 k = 0; k < static_cast<i32>(mask_->leaves().size()); ++k) {
    const Summary* summary = mask_->summary(k);
    const BlockPyramid* stored = summary ? summary->keys(frame_.b, frame_.h) : nullptr;
    void* out = block(col_blocks_, k);
    if (!stored || !stored->range(j0, j1, out)) mask_->leaves()[k]->cols(frame_, j0, j1, out);
  }
}

Tile MaskCursor::classify() {
  const auto& nodes = mask_->nodes();
  if (nodes.empty()) return Tile::kFull;
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    const BoundMask::Node& node = nodes[n];
    switch (node.op) {
      case BoundMask::Node::Op::kLeaf:
        classes_[n] = mask_->leaves()[node.leaf]->classify(frame_, block(row_blocks_, node.leaf),
                                                           block(col_blocks_, node.leaf));
        break;
      case BoundMask::Node::Op::kAnd:
        classes_[n] = min_of(classes_[node.first], classes_[node.second]);
        break;
      case BoundMask::Node::Op::kOr:
        classes_[n] = max_of(classes_[node.first], classes_[node.second]);
        break;
      case BoundMask::Node::Op::kNot:
        classes_[n] = static_cast<Tile>(2 - static_cast<int>(classes_[node.first]));
        break;
    }
  }
  return classes_.back();
}

// Spans of the tree from those of its leaves: And intersects, Or takes the hull, Not knows nothing.
template <class LeafSpan>
Span MaskCursor::combine_spans(LeafSpan leaf_span) {
  const auto& nodes = mask_->nodes();
  auto is_empty = [](Span s) { return s.end <= s.begin; };
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    const BoundMask::Node& node = nodes[n];
    if (node.op == BoundMask::Node::Op::kLeaf) {
      spans_[n] = leaf_span(node.leaf);
    } else if (node.op == BoundMask::Node::Op::kNot) {
      spans_[n] = everything();
    } else {
      const Span a = spans_[node.first], b = spans_[node.second];
      if (node.op == BoundMask::Node::Op::kAnd) {
        spans_[n] = {max_of(a.begin, b.begin), min_of(a.end, b.end)};
      } else if (is_empty(a) || is_empty(b)) {
        spans_[n] = is_empty(a) ? b : a;
      } else {
        spans_[n] = {min_of(a.begin, b.begin), max_of(a.end, b.end)};
      }
    }
  }
  return spans_.back();
}

namespace {
// Below this many keys (rows) a span is scanned tile by tile faster than it is narrowed.
constexpr i32 kShortSpan = 16 * kSummary;

Span clipped(Span s, i32 length) {
  s = {max_of(s.begin, 0), min_of(s.end, length)};
  return s.end <= s.begin ? Span{0, 0} : s;
}
}  // namespace

Span MaskCursor::key_span() {
  const i32 length = frame_.num_keys;
  if (mask_->trivial()) return {0, length};
  auto closed_form = [&](i32 leaf) {
    return own_spans_[leaf] = mask_->leaves()[leaf]->key_span(frame_, block(row_blocks_, leaf));
  };
  const Span wide = clipped(combine_spans(closed_form), length);
  if (wide.end - wide.begin <= kShortSpan) return wide;
  return clipped(combine_spans([&](i32 leaf) {
                   const Span own = own_spans_[leaf];
                   const Summary* summary = mask_->summary(leaf);
                   const BlockPyramid* keys = summary ? summary->keys(frame_.b, frame_.h) : nullptr;
                   if (!keys) return own;
                   const Span in = {max_of(own.begin, wide.begin), min_of(own.end, wide.end)};
                   return keys->narrow(frame_, block(row_blocks_, leaf), in);
                 }),
                 length);
}

Span MaskCursor::row_span() {
  const i32 length = frame_.num_rows;
  if (mask_->trivial()) return {0, length};
  auto closed_form = [&](i32 leaf) {
    return own_spans_[leaf] = mask_->leaves()[leaf]->row_span(frame_, block(col_blocks_, leaf));
  };
  const Span wide = clipped(combine_spans(closed_form), length);
  if (wide.end - wide.begin <= kShortSpan) return wide;
  return clipped(combine_spans([&](i32 leaf) {
                   const Span own = own_spans_[leaf];
                   const Summary* summary = mask_->summary(leaf);
                   const BlockPyramid* rows = summary ? summary->rows(frame_.b, frame_.h) : nullptr;
                   if (!rows) return own;
                   const Span in = {max_of(own.begin, wide.begin), min_of(own.end, wide.end)};
                   return rows->narrow(frame_, block(col_blocks_, leaf), in);
                 }),
                 length);
}

// Cells of rows [i0, i1) of the fixed columns for a node; subtrees whose class decides are not read.
void MaskCursor::fill_node(i32 n, i32 i0, i32 i1, u64* bits, i64 stride, i32 depth) {
  const BoundMask::Node& node = mask_->nodes()[n];
  const i32 num_words = ceil_div(cols_.end - cols_.begin, 64);
  const i32 in_last = (cols_.end - cols_.begin) % 64;
  const u64 tail = in_last ? (u64{1} << in_last) - 1 : ~u64{0};
  auto each_word = [&](auto&& change) {
    for (i32 i = 0; i < i1 - i0; ++i) {
      for (i32 w = 0; w < num_words; ++w) change(bits[i * stride + w], i, w);
    }
  };
  if (classes_[n] != Tile::kPartial) {
    const u64 value = classes_[n] == Tile::kFull ? ~u64{0} : 0;
    each_word([&](u64& word, i32, i32 w) { word = w + 1 == num_words ? value & tail : value; });
    return;
  }
  switch (node.op) {
    case BoundMask::Node::Op::kLeaf:
      mask_->leaves()[node.leaf]->fill(frame_, i0, i1, cols_.begin, cols_.end, bits, stride);
      return;
    case BoundMask::Node::Op::kNot:
      fill_node(node.first, i0, i1, bits, stride, depth);
      each_word(
          [&](u64& word, i32, i32 w) { word = ~word & (w + 1 == num_words ? tail : ~u64{0}); });
      return;
    default: {
      // A partial And has no empty side and a partial Or no full one: the other side alone counts
      // where one is full (And) or empty (Or).
      const bool is_and = node.op == BoundMask::Node::Op::kAnd;
      const Tile neutral = is_and ? Tile::kFull : Tile::kEmpty;
      if (classes_[node.first] == neutral) {
        return fill_node(node.second, i0, i1, bits, stride, depth);
      }
      fill_node(node.first, i0, i1, bits, stride, depth);
      if (classes_[node.second] == neutral) return;
      if (static_cast<i32>(scratch_.size()) <= depth) scratch_.resize(depth + 1);
      scratch_[depth].resize(i64{i1 - i0} * num_words);
      fill_node(node.second, i0, i1, scratch_[depth].data(), num_words, depth + 1);
      const u64* other = scratch_[depth].data();
      each_word([&](u64& word, i32 i, i32 w) {
        const u64 x = other[i64{i} * num_words + w];
        word = is_and ? word & x : word | x;
      });
    }
  }
}

Tile MaskCursor::fill(u64* bits, i64 stride) {
  const Tile said = classify();
  const i32 width = cols_.end - cols_.begin;
  const i32 num_words = ceil_div(width, 64);
  const u64 tail = width % 64 ? (u64{1} << width % 64) - 1 : ~u64{0};
  if (mask_->trivial()) {
    for (i32 i = 0; i < rows_.end - rows_.begin; ++i) {
      for (i32 w = 0; w < num_words; ++w)
        bits[i * stride + w] = w + 1 == num_words ? tail : ~u64{0};
    }
    return said;
  }
  const i32 root = static_cast<i32>(mask_->nodes().size()) - 1;
  fill_node(root, rows_.begin, rows_.end, bits, stride, 0);
  if (said != Tile::kPartial) return said;
  u64 any = 0, all = ~u64{0};
  for (i32 i = 0; i < rows_.end - rows_.begin; ++i) {
    for (i32 w = 0; w < num_words; ++w) {
      const u64 word = bits[i * stride + w];
      any |= word;
      all &= w + 1 == num_words ? word | ~tail : word;
    }
  }
  return tile_of(any == 0, all == ~u64{0});
}

Tile MaskCursor::exact_class() {
  const Tile said = classify();
  if (said != Tile::kPartial) return said;
  // A few rows at a time: most partial tiles show both kinds of cells at once.
  constexpr i32 kRows = 8;
  const i32 width = cols_.end - cols_.begin;
  const i32 num_words = ceil_div(width, 64);
  const u64 tail = width % 64 ? (u64{1} << width % 64) - 1 : ~u64{0};
  cells_.resize(i64{kRows} * num_words);
  const i32 root = static_cast<i32>(mask_->nodes().size()) - 1;
  u64 any = 0, all = ~u64{0};
  for (i32 i = rows_.begin; i < rows_.end; i += kRows) {
    const i32 end = min_of(i + kRows, rows_.end);
    fill_node(root, i, end, cells_.data(), num_words, 0);
    for (i32 k = 0; k < (end - i) * num_words; ++k) {
      any |= cells_[k];
      all &= (k + 1) % num_words == 0 ? cells_[k] | ~tail : cells_[k];
    }
    if (any != 0 && all != ~u64{0}) return Tile::kPartial;
  }
  return tile_of(any == 0, all == ~u64{0});
}

}  // namespace jali
