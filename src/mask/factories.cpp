// The public mask factories. Each lists its leaf's fields in the order of the leaf's fields().
#include "base/error.h"
#include "mask/leaf_node.h"

namespace jali {
namespace {

/// Collects the fields of one leaf into a mask.
class LeafBuilder {
 public:
  explicit LeafBuilder(const char* name) { program_ = {leaf_kind(name), 0}; }
  LeafBuilder& add(const IntParam& p) {
    if (p.tag == IntParam::Tag::kTable) return add(p.table);
    program_.push_back(p.tag == IntParam::Tag::kNumber ? 1 : 0);
    if (p.tag == IntParam::Tag::kNumber) scalars_.push_back(p.number);
    return *this;
  }
  LeafBuilder& add(const TensorView& table) {
    program_.push_back(table.given() ? 2 : 0);
    if (table.given()) tables_.push_back(table);
    return *this;
  }
  Mask mask() {
    program_[1] = static_cast<std::int64_t>(program_.size()) - 2;
    return Mask(std::move(program_), std::move(scalars_), std::move(tables_));
  }

 private:
  std::vector<std::int64_t> program_, scalars_;
  std::vector<TensorView> tables_;
};

}  // namespace

Mask causal(IntParam offset) { return LeafBuilder("causal").add(offset).mask(); }

Mask window(IntParam left, IntParam right, IntParam offset) {
  return LeafBuilder("window").add(left).add(right).add(offset).mask();
}

Mask prefix(IntParam length) { return LeafBuilder("prefix").add(length).mask(); }

Mask key_padding(const TensorView& keep) { return LeafBuilder("key_padding").add(keep).mask(); }

Mask document(const TensorView& q_ids, const TensorView& k_ids) {
  return LeafBuilder("document").add(q_ids).add(k_ids).mask();
}

Mask packed_document(const TensorView& cu_seqlens) {
  return LeafBuilder("packed_document").add(cu_seqlens).mask();
}

Mask key_interval(const TensorView& start, const TensorView& end, IntParam offset) {
  return LeafBuilder("key_interval").add(start).add(end).add(offset).mask();
}

Mask row_interval(const TensorView& start, const TensorView& end) {
  return LeafBuilder("row_interval").add(start).add(end).mask();
}

Mask dilated(std::int64_t step, IntParam offset) {
  return LeafBuilder("dilated").add(step).add(offset).mask();
}

Mask neighborhood(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& kernel,
                  const std::vector<std::int64_t>& dilation, const std::vector<bool>& causal) {
  const std::size_t dims = shape.size();
  if (dims < 1 || dims > 3) value_error("neighborhood: shape has ", dims, " dims; expected 1 to 3");
  auto check = [&](const char* name, std::size_t size, bool optional) {
    if (size != dims && !(optional && size == 0)) {
      value_error("neighborhood: ", name, " has ", size, " entries; expected ", dims,
                  ", one per dim of shape");
    }
  };
  check("kernel", kernel.size(), false);
  check("dilation", dilation.size(), true);
  check("causal", causal.size(), true);
  // Missing dims lead and have one point.
  auto padded = [&](const auto& values, std::int64_t rest) {
    std::vector<std::int64_t> all(3, rest);
    for (std::size_t d = 0; d < values.size(); ++d) all[3 - dims + d] = values[d];
    return all;
  };
  LeafBuilder leaf("neighborhood");
  for (const auto& field :
       {padded(shape, 1), padded(kernel, 1), padded(dilation, 1), padded(causal, 0)}) {
    for (std::int64_t value : field) leaf.add(value);
  }
  return leaf.mask();
}

Mask block_sparse(const TensorView& blocks, std::int64_t block_rows, std::int64_t block_keys) {
  return LeafBuilder("block_bitset").add(blocks).add(block_rows).add(block_keys).mask();
}

Mask block_csr(const TensorView& row_ptr, const TensorView& col_idx, std::int64_t block_rows,
               std::int64_t block_keys) {
  return LeafBuilder("block_csr").add(row_ptr).add(col_idx).add(block_rows).add(block_keys).mask();
}

Mask dense(const TensorView& tensor) { return LeafBuilder("dense").add(tensor).mask(); }

}  // namespace jali
