// A leaf at run time: what the host calls when it does not know the leaf's type.
#pragma once

#include <jali/jali.h>

#include <memory>
#include <string>
#include <vector>

#include "mask/leaf.h"

namespace jali {

/// The part of a mask's parameters that one leaf consumes, with the problem it is bound to.
struct BindContext {
  const Shape& shape;
  const std::int64_t* scalars;  // next unread scalar; advanced by the binder
  const TensorView* tables;     // next unread table
  const std::int64_t* scalars_end;
  const TensorView* tables_end;
};

/// One parameter of a leaf, for documentation, factories and tests.
struct FieldInfo {
  std::string name, type, dims, doc;
};

/// Bytes of a leaf's struct as kernels receive it.
struct LeafBytes {
  const void* data;
  i32 size, alignment;
};

/// A leaf bound to a problem. RowBlock and ColBlock are opaque bytes of the stated size.
class LeafNode {
 public:
  virtual ~LeafNode() = default;
  virtual const char* name() const = 0;
  virtual int row_block_bytes() const = 0;  // at most kMaxBlockBytes, aligned to 8
  virtual int col_block_bytes() const = 0;
  virtual bool rows_read_tables() const = 0;
  virtual bool cols_read_tables() const = 0;
  /// Whether cells may differ between sequences for a reason of the leaf's own (a table with a batch
  /// dim > 1; not the call's lengths and offsets).
  virtual bool varies_by_batch() const = 0;
  /// The number of different heads: 1, Hkv or Hq. Head h belongs to group h / (Hq / num_heads).
  virtual i32 num_heads() const = 0;
  /// What is wrong with the contents of its tables for one (b, h), or null.
  virtual const char* wrong_tables(const Frame& f) const = 0;
  virtual void rows(const Frame& f, i32 i0, i32 i1, void* out) const = 0;
  virtual void cols(const Frame& f, i32 j0, i32 j1, void* out) const = 0;
  virtual void merge_rows(void* into, const void* block) const = 0;
  virtual void merge_cols(void* into, const void* block) const = 0;
  virtual Tile classify(const Frame& f, const void* row_block, const void* col_block) const = 0;
  virtual Span key_span(const Frame& f, const void* row_block) const = 0;
  virtual Span row_span(const Frame& f, const void* col_block) const = 0;
  /// The cells of rows [i0, i1) and keys [j0, j1): bit c of word w of row r is the cell
  /// (i0 + r, j0 + 64 w + c); rows are `stride` words apart; bits beyond j1 are 0.
  virtual void fill(const Frame& f, i32 i0, i32 i1, i32 j0, i32 j1, u64* bits,
                    i64 stride) const = 0;

  // For kernels that are compiled for the mask: the leaf's type inside namespace jali (it depends on
  // the structure alone), the text that defines it, its parameters, and bounds of sizeof RowBlock
  // and ColBlock there.
  virtual std::string device_type() const = 0;
  // Of a light leaf's Row (mask/leaf.h, among()); 0: it is none.
  virtual int device_light_row_bytes() const { return 0; }
  virtual bool device_mapped() const { return false; }    // see kMapped there
  virtual bool device_unsure() const { return false; }    // see kUnsure there
  virtual bool device_anywhere() const { return false; }  // see kAnywhere there
  virtual bool device_even() const { return false; }      // see kEven there
  virtual bool relative() const { return false; }         // see kRelative there
  /// Of a leaf that is documents behind each other: where they begin, and the last one ends; or null.
  virtual const TokenTable<i32>* documents() const { return nullptr; }
  virtual std::string device_definition() const = 0;
  virtual LeafBytes device_bytes() const = 0;
  virtual int device_row_block_bytes() const { return row_block_bytes(); }
  virtual int device_col_block_bytes() const { return col_block_bytes(); }

  static constexpr int kMaxBlockBytes = 1024;
};

/// What is known of a leaf kind before it is bound.
struct LeafKind {
  std::string name;
  std::vector<FieldInfo> fields;
  /// `code`, `code_size`: the leaf's own part of the program, behind its kind and length.
  std::unique_ptr<LeafNode> (*bind)(BindContext&, const std::int64_t* code, std::int64_t code_size);
  std::int64_t number = leaf_kind(name.c_str());  // what stands for it in a program
};

/// All leaf kinds, sorted by name. The build generates the list from src/mask/leaf/*.h.
const std::vector<LeafKind>& leaf_kinds();
/// The kind with this leaf_kind() number, or null.
const LeafKind* find_leaf(std::int64_t kind);

}  // namespace jali
