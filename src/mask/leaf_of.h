// LeafOf<L>: the run-time face of the leaf struct L. Nothing here knows a particular leaf.
#pragma once

#include <memory>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "mask/binder.h"
#include "mask/combine.h"
#include "mask/leaf_functions.h"
#include "mask/leaf_node.h"

namespace jali {

template <class L>
class LeafOf final : public LeafNode {
  static_assert(std::is_trivially_copyable_v<L>, "kernels receive the struct as bytes");

 public:
  using RowBlock = typename L::RowBlock;
  using ColBlock = typename L::ColBlock;
  static_assert(sizeof(RowBlock) <= kMaxBlockBytes && sizeof(ColBlock) <= kMaxBlockBytes);
  static_assert(alignof(RowBlock) <= 8 && alignof(ColBlock) <= 8);

  LeafOf(BindContext& context, const std::int64_t* code, std::int64_t code_size,
         const LeafFunctions& functions)
      : functions_(functions) {
    Binder binder(context, L::kName, code, code_size);
    leaf_.fields(binder);
    binder.finish();
    leaf_.fields(LengthChecker(context.shape, L::kName, binder));
    // A leaf may refuse values: valid() returns what is wrong, or null.
    if constexpr (requires(const L& l) { l.valid(i32{}, i32{}); }) {
      // The lengths of packed sequences on a GPU are not known here.
      const Shape& s = context.shape;
      const bool unknown = s.device == DeviceType::kCUDA && s.cu_seqlens_q.given();
      const i32 Lq = unknown ? 0 : static_cast<i32>(s.Lq),
                Lk = unknown ? 0 : static_cast<i32>(s.Lk);
      if (const char* wrong = leaf_.valid(Lq, Lk)) {
        value_error(L::kName, ": ", wrong);
      }
    }
    varies_by_batch_ = binder.varies_by_batch;
    num_heads_ = binder.num_heads;
  }

  const L& leaf() const { return leaf_; }
  const char* name() const override { return L::kName; }
  int row_block_bytes() const override { return sizeof(RowBlock); }
  int col_block_bytes() const override { return sizeof(ColBlock); }
  bool rows_read_tables() const override { return L::kRowsReadTables; }
  bool cols_read_tables() const override { return L::kColsReadTables; }
  bool varies_by_batch() const override { return varies_by_batch_; }
  i32 num_heads() const override { return num_heads_; }

  const char* wrong_tables(const Frame& f) const override {
    if constexpr (requires(const L& l) { l.valid_tables(f); }) return leaf_.valid_tables(f);
    return nullptr;
  }
  void rows(const Frame& f, i32 i0, i32 i1, void* out) const override {
    functions_.rows(&leaf_, f, i0, i1, out);
  }
  void cols(const Frame& f, i32 j0, i32 j1, void* out) const override {
    functions_.cols(&leaf_, f, j0, j1, out);
  }
  void merge_rows(void* into, const void* block) const override {
    if constexpr (L::kRowsReadTables) merge_into<RowBlock>(into, block);
  }
  void merge_cols(void* into, const void* block) const override {
    if constexpr (L::kColsReadTables) merge_into<ColBlock>(into, block);
  }
  Tile classify(const Frame& f, const void* r, const void* c) const override {
    return leaf_.classify(f, *static_cast<const RowBlock*>(r), *static_cast<const ColBlock*>(c));
  }
  Span key_span(const Frame& f, const void* r) const override {
    return leaf_.key_span(f, *static_cast<const RowBlock*>(r));
  }
  Span row_span(const Frame& f, const void* c) const override {
    return leaf_.row_span(f, *static_cast<const ColBlock*>(c));
  }
  void fill(const Frame& f, i32 i0, i32 i1, i32 j0, i32 j1, u64* bits, i64 stride) const override {
    functions_.fill(&leaf_, f, i0, i1, j0, j1, bits, stride);
  }
  std::string device_type() const override {
    static const std::string type = "leaf::" + camel_case(L::kName);
    return type;
  }
  int device_light_row_bytes() const override { return IsLight<L> ? sizeof(typename L::Row) : 0; }
  bool device_mapped() const override {
    return requires { L::kMapped; };
  }
  bool device_unsure() const override {
    return requires { L::kUnsure; };
  }
  bool device_anywhere() const override {
    return requires { L::kAnywhere; };
  }
  bool device_even() const override {
    return requires { L::kEven; };
  }
  bool relative() const override {
    return requires { L::kRelative; };
  }
  const TokenTable<i32>* documents() const override {
    if constexpr (requires(const L& l) { l.documents(); }) return leaf_.documents();
    return nullptr;
  }
  std::string device_definition() const override {
    return std::string("#include \"mask/leaf/") + L::kName + ".h\"\n";
  }
  LeafBytes device_bytes() const override { return {&leaf_, sizeof(L), alignof(L)}; }

 private:
  /// key_interval is struct KeyInterval.
  static std::string camel_case(const char* name) {
    std::string text;
    for (bool up = true; *name; ++name) {
      if (*name != '_') text += up ? static_cast<char>(*name - 'a' + 'A') : *name;
      up = *name == '_';
    }
    return text;
  }
  // A leaf's own merge() wins over the free one for Range.
  template <class Block>
  static void merge_into(void* into, const void* block) {
    Block& a = *static_cast<Block*>(into);
    const Block& b = *static_cast<const Block*>(block);
    if constexpr (requires { L::merge(a, b); }) {
      a = L::merge(a, b);
    } else {
      a = merge(a, b);
    }
  }

  L leaf_;
  LeafFunctions functions_;
  bool varies_by_batch_ = false;
  i32 num_heads_ = 1;
};

}  // namespace jali
