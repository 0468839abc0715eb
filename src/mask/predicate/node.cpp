#include "mask/predicate/node.h"

#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "base/tensor.h"
#include "mask/predicate/analysis.h"
#include "mask/predicate/codegen.h"

namespace jali {
namespace predicate {
namespace {

/// What rows (or keys) of a block can hold: where they run, then a Bound per measured step.
struct Block {
  i64 begin, last;
  Bound bounds[1];
};
constexpr int kBlockHead = offsetof(Block, bounds);
constexpr std::size_t kMaxMeasured = (LeafNode::kMaxBlockBytes - kBlockHead) / sizeof(Bound);
static_assert(alignof(Block) <= 8);

class PredicateNode final : public LeafNode {
 public:
  PredicateNode(BindContext& context, const std::int64_t* code, std::int64_t code_size) {
    program_ = parse(code, code_size);
    if (context.shape.device == DeviceType::kCUDA) remember_structure(code, code_size);
    take_offset(context);
    take_consts(context);
    take_tables(context);
    program_ = compact(program_, [this](i32 a, i32 b) { return consts_[a].i == consts_[b].i; });
    varies_by_batch_ = program_.uses(Op::kBatch) || (offset_.data && offset_.size > 1);
    num_heads_ = program_.uses(Op::kHead) ? static_cast<i32>(context.shape.Hq) : 1;
    code_ = {program_.steps.data(),
             static_cast<i32>(program_.steps.size()),
             nullptr,
             consts_.data(),
             tables_.data(),
             false};
    choose_width(context.shape);
    if (!type_.empty()) lay_out_for_device();
    measured_ = measured_steps(program_, kMaxMeasured);
    lay_out();
    engine_ = &engine(current_isa());
  }

  const char* name() const override { return "predicate"; }
  int row_block_bytes() const override { return block_bytes(measured_.rows); }
  int col_block_bytes() const override { return block_bytes(measured_.keys); }
  bool rows_read_tables() const override { return !measured_.rows.empty(); }
  bool cols_read_tables() const override { return !measured_.keys.empty(); }
  bool varies_by_batch() const override { return varies_by_batch_; }
  i32 num_heads() const override { return num_heads_; }
  const char* wrong_tables(const Frame&) const override { return nullptr; }

  void rows(const Frame& f, i32 i0, i32 i1, void* out) const override {
    measure(f, Stage::kRow, i0, i1, measured_.rows, out);
  }
  void cols(const Frame& f, i32 j0, i32 j1, void* out) const override {
    measure(f, Stage::kKey, j0, j1, measured_.keys, out);
  }
  void merge_rows(void* into, const void* block) const override {
    merge(into, block, measured_.rows.size());
  }
  void merge_cols(void* into, const void* block) const override {
    merge(into, block, measured_.keys.size());
  }
  Tile classify(const Frame& f, const void* row_block, const void* col_block) const override {
    return classify(f, static_cast<const Block*>(row_block), static_cast<const Block*>(col_block));
  }
  Span key_span(const Frame& f, const void* row_block) const override {
    Block keys;  // of unknown contents: its bounds are not read
    return span(f.num_keys, [&](i32 begin, i32 end) {
      keys.begin = begin;
      keys.last = end - 1;
      return classify(f, static_cast<const Block*>(row_block), &keys, true, false);
    });
  }
  Span row_span(const Frame& f, const void* col_block) const override {
    Block rows;
    return span(f.num_rows, [&](i32 begin, i32 end) {
      rows.begin = begin;
      rows.last = end - 1;
      return classify(f, &rows, static_cast<const Block*>(col_block), false, true);
    });
  }
  void fill(const Frame& f, i32 i0, i32 i1, i32 j0, i32 j1, u64* bits, i64 stride) const override {
    const std::unique_ptr<u64[]> scratch(new u64[scratch_words_]);
    engine_->fill(code_, f, row_offset(f), i0, i1, j0, j1, scratch.get(), bits, stride);
  }

  std::string device_type() const override { return "predicate::" + type_; }
  std::string device_definition() const override {
    return "#include \"mask/predicate/generated.h\"\nnamespace jali::predicate {\n" +
           generate(structure_, type_, code_.wide) + "}\n";
  }
  LeafBytes device_bytes() const override {
    return {bytes_.data(), static_cast<i32>(bytes_.size() * sizeof(u64)), alignof(u64)};
  }
  int device_light_row_bytes() const override { return device_light_row_bytes_; }
  bool device_mapped() const override { return true; }
  // A Range, then an interval per measured step.
  int device_row_block_bytes() const override { return device_block_bytes_; }
  int device_col_block_bytes() const override { return device_block_bytes_; }

 private:
  static int block_bytes(const std::vector<i32>& measured) {
    return kBlockHead + static_cast<int>(measured.size() * sizeof(Bound));
  }
  i64 row_offset(const Frame& f) const {
    return offset_.given ? offset_.at_batch(f.b) : f.q_offset;
  }

  void take_offset(BindContext& context);
  void take_consts(BindContext& context);
  void take_tables(BindContext& context);
  void choose_width(const Shape& shape);
  void lay_out();
  void remember_structure(const std::int64_t* code, std::int64_t code_size);
  void lay_out_for_device();

  void measure(const Frame& f, Stage stage, i32 begin, i32 end, const std::vector<i32>& steps,
               void* out) const {
    Block* block = static_cast<Block*>(out);
    block->begin = begin;
    block->last = end - 1;
    if (steps.empty()) return;
    const std::unique_ptr<u64[]> scratch(new u64[scratch_words_]);
    engine_->measure(code_, f, row_offset(f), stage, begin, end, scratch.get(), steps.data(),
                     static_cast<i32>(steps.size()), block->bounds);
  }
  static void merge(void* into, const void* other, std::size_t count) {
    Block* a = static_cast<Block*>(into);
    const Block* b = static_cast<const Block*>(other);
    a->begin = min_of(a->begin, b->begin);
    a->last = max_of(a->last, b->last);
    for (std::size_t k = 0; k < count; ++k) {
      a->bounds[k].i = hull(a->bounds[k].i, b->bounds[k].i);
      a->bounds[k].f = hull(a->bounds[k].f, b->bounds[k].f);
    }
  }

  /// Without rows_known (keys_known), the bounds that hold everywhere stand in for the block's.
  Tile classify(const Frame& f, const Block* rows, const Block* keys, bool rows_known = true,
                bool keys_known = true) const;
  template <class Classify>
  static Span span(i32 length, Classify classify);

  Program program_;
  std::vector<Word> consts_;
  std::vector<Table> tables_;
  std::vector<Bound> table_ranges_;
  Scalar offset_;
  Code code_;
  bool varies_by_batch_ = false;
  i32 num_heads_ = 1;
  std::vector<Value> anywhere_;  // per step, over the whole problem
  Measured measured_;
  std::vector<i32> slots_;
  i64 scratch_words_ = 0;
  const Engine* engine_ = nullptr;

  // On a GPU
  Program structure_;       // as given, whatever the values of its literals
  std::string type_;        // of the generated struct
  std::vector<u64> bytes_;  // of its members
  int device_block_bytes_ = 0, device_light_row_bytes_ = 0;
};

std::int64_t take_scalar(BindContext& context, const char* what) {
  if (context.scalars == context.scalars_end) value_error("predicate: no scalar left for ", what);
  return *context.scalars++;
}
const TensorView& take_table(BindContext& context, const char* what) {
  if (context.tables == context.tables_end) value_error("predicate: no table left for ", what);
  check_device(what, *context.tables, context.shape.device, context.shape.device_index,
               "predicate");
  return *context.tables++;
}

void check_offset(std::int64_t offset) {
  if (offset < -kMaxLength || offset > kMaxLength) {
    value_error("predicate: offset = ", offset, " is beyond ±2^30");
  }
}

void PredicateNode::take_offset(BindContext& context) {
  offset_.given = program_.offset != Program::Offset::kAbsent;
  if (program_.offset == Program::Offset::kScalar) {
    const std::int64_t offset = take_scalar(context, "the offset");
    check_offset(offset);
    offset_.value = static_cast<i32>(offset);
  } else if (program_.offset == Program::Offset::kTable) {
    const TensorView& t = take_table(context, "the offset");
    if (t.dtype != DType::kI32) {
      type_error("predicate: offset has dtype ", dtype_name(t.dtype), "; expected int32");
    }
    if (t.rank != 1 || (t.shape[0] != 1 && t.shape[0] != context.shape.B)) {
      value_error("predicate: offset ", shape_text(t),
                  ": expected an int or a tensor [B = ", context.shape.B, "]");
    }
    offset_.data = data_of<const i32>(t);
    offset_.size = static_cast<i32>(t.shape[0]);
    offset_.stride = t.stride[0];
    for (i32 b = 0; t.device == DeviceType::kCPU && b < offset_.size; ++b) {
      check_offset(offset_.at_batch(b));
    }
  }
}

void PredicateNode::take_consts(BindContext& context) {
  for (const Step& step : program_.steps) {
    if (step.op != Op::kConst) continue;
    Word word;
    word.i = take_scalar(context, "a literal");
    if (step.type == Type::kFloat) {
      double x;
      std::memcpy(&x, &word.i, sizeof x);
      word.i = 0;
      word.f = static_cast<float>(x);
    }
    if (step.type == Type::kBool) word.i = word.i != 0;
    consts_.push_back(word);
  }
}

void PredicateNode::take_tables(BindContext& context) {
  for (const TableType& type : program_.tables) {
    const TensorView& t = take_table(context, "a captured tensor");
    if (t.dtype != type.dtype || t.rank != type.rank) {
      type_error("predicate: a captured tensor is ", dtype_name(t.dtype), " ", shape_text(t),
                 "; the program expects ", dtype_name(type.dtype), " with ", type.rank, " dims");
    }
    Table table = {t.data, t.dtype, t.rank, {}, {}, t.device == DeviceType::kCPU};
    for (int d = 0; d < t.rank; ++d) {
      table.size[d] = t.shape[d];
      table.stride[d] = t.stride[d];
      if (t.shape[d] == 0) {
        value_error("predicate: a captured tensor ", shape_text(t), " has no elements to read");
      }
    }
    tables_.push_back(table);
    table_ranges_.push_back(range_of(table));
  }
}

/// Bounds every value over the whole problem; 32 bits do if all integers fit them.
void PredicateNode::choose_width(const Shape& shape) {
  Interval offset = point(offset_.value);
  if (offset_.data && shape.device == DeviceType::kCUDA) {
    offset = {-kMaxLength, kMaxLength};
  } else if (offset_.data) {
    for (i32 b = 0; b < offset_.size; ++b) {
      const Interval x = point(offset_.at_batch(b));
      offset = b ? hull(offset, x) : x;
    }
  } else if (!offset_.given) {  // the call's; BoundMask keeps it within these
    const IntParam& q = shape.q_offset;
    offset = q.tag == IntParam::Tag::kNumber  ? point(q.number)
             : q.tag == IntParam::Tag::kTable ? Interval{-kMaxLength, kMaxLength}
             : shape.cu_seqlens_q.given()     ? Interval{-shape.Lq, shape.Lk}
                                              : point(shape.Lk - shape.Lq);
  }
  auto up_to = [](std::int64_t n) { return Interval{0, max_of<i64>(n - 1, 0)}; };
  const Domain domain = {up_to(shape.B), up_to(shape.Hq), add(up_to(shape.Lq), offset),
                         up_to(shape.Lk)};
  std::vector<i32> all(program_.steps.size());
  for (std::size_t s = 0; s < all.size(); ++s) all[s] = static_cast<i32>(s);
  anywhere_.resize(all.size());
  analyse(code_, table_ranges_.data(), domain, all, anywhere_.data());
  for (std::size_t s = 0; s < all.size(); ++s) {
    const Interval x = anywhere_[s].i;
    if (program_.steps[s].type == Type::kInt && (x.lo < -kFar - 1ll || x.hi > kFar)) {
      code_.wide = true;
    }
    anywhere_[s].affine = not_affine();  // true of one (b, h) only
  }
}

void PredicateNode::remember_structure(const std::int64_t* code, std::int64_t code_size) {
  structure_ = program_;
  u64 hash = 14695981039346656037ull;  // FNV-1a
  for (std::int64_t n = 0; n < code_size; ++n) {
    hash = (hash ^ static_cast<u64>(code[n])) * 1099511628211ull;
  }
  char text[32];
  std::snprintf(text, sizeof text, "Predicate%016llx", static_cast<unsigned long long>(hash));
  type_ = text;
}

/// The members of the generated struct, in its order (see codegen.h).
void PredicateNode::lay_out_for_device() {
  if (code_.wide) type_ += "Wide";
  std::vector<char> bytes;
  auto append = [&](const void* data, std::size_t size, std::size_t alignment) {
    bytes.resize(ceil_div(bytes.size(), alignment) * alignment);
    bytes.insert(bytes.end(), static_cast<const char*>(data),
                 static_cast<const char*>(data) + size);
  };
  append(&offset_, sizeof offset_, alignof(Scalar));
  const Program printed = canonical(structure_);
  for (const Step& step : printed.steps) {
    if (step.op != Op::kConst) continue;
    const Word& word = consts_[step.index];
    const i32 narrow = static_cast<i32>(word.i);
    if (step.type == Type::kFloat) {
      append(&word.f, 4, 4);
    } else if (step.type == Type::kBool) {
      append(&word.i, 1, 1);
    } else if (code_.wide) {
      append(&word.i, 8, 8);
    } else {
      append(&narrow, 4, 4);
    }
  }
  for (std::size_t n = 0; n < tables_.size(); ++n) {
    const Table& t = tables_[n];
    const std::size_t rank = max_of(t.rank, 1);
    append(&t.data, 8, 8);
    append(t.size, 8 * rank, 8);
    append(t.stride, 8 * rank, 8);
    if (t.dtype == DType::kF32) {
      append(&table_ranges_[n].f, sizeof(FloatInterval), alignof(FloatInterval));
    } else {
      append(&table_ranges_[n].i, sizeof(Interval), alignof(Interval));
    }
  }
  bytes_.resize(ceil_div<std::size_t>(bytes.size(), 8));
  std::memcpy(bytes_.data(), bytes.data(), bytes.size());
  device_block_bytes_ = static_cast<int>(sizeof(Range) + printed.steps.size() * sizeof(Interval));
  device_light_row_bytes_ = light_row_bytes(printed, code_.wide);
}

void PredicateNode::lay_out() {
  i64 at = 0;
  for (const Step& step : program_.steps) {
    slots_.push_back(static_cast<i32>(at));
    at += ceil_div(lanes_of(step.stage) * lane_bytes(step.type, code_.wide), 64) * 64;
    if (at > (1 << 30)) unsupported("predicate: ", program_.steps.size(), " operations");
  }
  code_.slots = slots_.data();
  scratch_words_ = at / 8;
}

Tile PredicateNode::classify(const Frame& f, const Block* rows, const Block* keys, bool rows_known,
                             bool keys_known) const {
  constexpr std::size_t kFew = 48;
  Value few[kFew];  // not initialised: a class costs less than that would
  std::vector<Value> many;
  Value* values = few;
  if (program_.steps.size() > kFew) {
    many.resize(program_.steps.size());
    values = many.data();
  }
  auto set = [&](const std::vector<i32>& measured, const Block* block, bool known) {
    for (std::size_t k = 0; k < measured.size(); ++k) {
      Value& v = values[measured[k]];
      v = anywhere_[measured[k]];
      if (!known) continue;
      v.i = block->bounds[k].i;
      v.f = settled(block->bounds[k].f);
    }
  };
  set(measured_.rows, rows, rows_known);
  set(measured_.keys, keys, keys_known);
  const i64 offset = row_offset(f);
  const Domain domain = {point(f.b),
                         point(f.h),
                         {rows->begin + offset, rows->last + offset},
                         {keys->begin, keys->last}};
  analyse(code_, table_ranges_.data(), domain, measured_.order, values);
  const Interval result = values[program_.steps.size() - 1].i;
  return tile_of(result.hi == 0, result.lo == 1);
}

/// The hull of the blocks of `length` that are not ruled out, found by halving: it needs no
/// knowledge of the predicate, and O(log length) classifications where one bound is simple.
template <class Classify>
Span PredicateNode::span(i32 length, Classify classify) {
  constexpr i32 kGrain = 64, kBudget = 200;
  struct Search {
    Classify& classify;
    i32 budget;
    /// The first (forward) or last block in [begin, end) that is not ruled out; empty: none.
    Span find(i32 begin, i32 end, bool forward) {
      if (--budget >= 0 && classify(begin, end) == Tile::kEmpty) return {0, 0};
      if (end - begin <= kGrain || budget < 0) return {begin, end};
      const i32 middle = begin + ceil_div((end - begin) / 2, kGrain) * kGrain;
      const Span near = forward ? find(begin, middle, true) : find(middle, end, false);
      if (near.begin < near.end) return near;
      return forward ? find(middle, end, true) : find(begin, middle, false);
    }
  };
  if (length == 0) return {0, 0};
  const Span first = Search{classify, kBudget}.find(0, length, true);
  if (first.begin >= first.end) return {0, 0};
  const Span last = Search{classify, kBudget}.find(first.begin, length, false);
  return {first.begin, max_of(first.end, last.end)};
}

}  // namespace
}  // namespace predicate

const LeafKind& predicate_kind() {
  static const LeafKind kind = {
      "predicate",
      {{"offset", "int", "B?", "position of row 0, int or [B]; absent: the call's q_offset"}},
      [](BindContext& context, const std::int64_t* code,
         std::int64_t code_size) -> std::unique_ptr<LeafNode> {
        return std::make_unique<predicate::PredicateNode>(context, code, code_size);
      }};
  return kind;
}

}  // namespace jali
