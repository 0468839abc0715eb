// Fills a leaf's parameters from a mask's scalars and tables, checking each against the problem.
#pragma once

#include <jali/jali.h>

#include <string>

#include "mask/leaf_node.h"

namespace jali {

/// The visitor that LeafOf hands to Leaf::fields().
class Binder {
 public:
  Binder(BindContext& context, const char* leaf, const std::int64_t* code, std::int64_t num_codes)
      : context_(context), leaf_(leaf), code_(code), code_end_(code + num_codes) {}

  void operator()(const char* name, Scalar& out, const char* dims, const char*);
  void operator()(const char* name, TokenTable<i32>& out, const char* dims, const char*);
  void operator()(const char* name, TokenTable<u8>& out, const char* dims, const char*);
  void operator()(const char* name, GridTable<i32>& out, const char* dims, const char*);
  void operator()(const char* name, GridTable<u8>& out, const char* dims, const char*);
  /// To be called after the last field.
  void finish() const;

  /// Whether a table with more than one entry along batch / heads was bound.
  bool varies_by_batch = false;
  i32 num_heads = 1;  // the largest head dim of any table: 1, Hkv or Hq

 private:
  enum class How { kAbsent, kScalar, kTable };
  How next(const char* name, const char* dims, bool scalar_allowed);
  const TensorView& take_table(const char* name, DType dtype);
  i32 head_divisor(const char* name, const TensorView& table, std::int64_t heads);
  template <class T>
  void bind_tokens(const char* name, TokenTable<T>& out, const char* dims, DType dtype);
  template <class T>
  void bind_grid(const char* name, GridTable<T>& out, const char* dims, DType dtype);

  BindContext& context_;
  const char* leaf_;
  const std::int64_t* code_;
  const std::int64_t* code_end_;
};

/// Once all fields are bound: settles which token tables are packed and checks the lengths of the
/// others. The dims may depend on which other tables are given ("BQ": per row, "BK": per key, "BP":
/// any length, read at positions).
class LengthChecker {
 public:
  LengthChecker(const Shape& shape, const char* leaf, Binder& binder)
      : shape_(shape), leaf_(leaf), binder_(binder) {}
  template <class T>
  void operator()(const char* name, TokenTable<T>& table, const char* dims, const char*) const {
    if (table.given()) check(name, table.length, table.packed, dims);
  }
  template <class Other>
  void operator()(const char*, Other&, const char*, const char*) const {}

 private:
  void check(const char* name, std::int64_t length, i32& packed, const char* dims) const;
  const Shape& shape_;
  const char* leaf_;
  Binder& binder_;
};

/// The visitor that describes a leaf's fields.
class FieldLister {
 public:
  std::vector<FieldInfo> fields;
  void operator()(const char* name, Scalar&, const char* dims, const char* doc) {
    fields.push_back({name, "int", dims, doc});
  }
  void operator()(const char* name, TokenTable<i32>&, const char* dims, const char* doc) {
    fields.push_back({name, "int32", dims, doc});
  }
  void operator()(const char* name, TokenTable<u8>&, const char* dims, const char* doc) {
    fields.push_back({name, "bool", dims, doc});
  }
  void operator()(const char* name, GridTable<i32>&, const char* dims, const char* doc) {
    fields.push_back({name, "int32", dims, doc});
  }
  void operator()(const char* name, GridTable<u8>&, const char* dims, const char* doc) {
    fields.push_back({name, "bool", dims, doc});
  }
};

}  // namespace jali
