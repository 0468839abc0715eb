// A bound mask as kernels know it: a C++ type, compiled once per structure, and the bytes of its
// parameters. Leaves that read tables are wrapped in Stored<> (kernel/stored.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cuda/kernel/sequences.h"
#include "cuda/kernel/stored.h"
#include "mask/bound.h"

namespace jali::cuda {

class DeviceMask {
 public:
  /// `mask` must outlive it.
  explicit DeviceMask(const BoundMask& mask);

  /// In namespace jali: "And<leaf::Causal, cuda::Stored<leaf::Document>>"; depends on the structure
  /// alone. Without a mask "cuda::NoMask".
  const std::string& type() const { return type_; }
  /// What a source must hold before the type can be named.
  std::string definitions() const;
  /// sizeof the type.
  i32 num_bytes() const { return num_bytes_; }

  /// Stored blocks of all leaves, and the bytes of device memory that they take.
  i64 num_stored_blocks() const { return num_stored_blocks_; }
  i64 stored_bytes() const { return stored_bytes_; }
  /// The parameters, with the stored blocks at `stored`, aligned to 8.
  std::vector<u64> parameters(void* stored) const;

 private:
  i32 alignment_of(i32 node) const;
  i32 place(i32 node, i32 at);
  i32 place_leaf(i32 leaf, i32 at);
  void add_type(i32 node);
  StoredBlocks blocks(const LeafNode& leaf, bool rows, int block_bytes);

  struct Piece {  // of a leaf
    i32 leaf, at;
    i32 stored_at = -1;       // where its two StoredBlocks stand; -1: none
    StoredBlocks rows, keys;  // with offsets into the stored memory instead of addresses
  };

  const BoundMask* mask_;
  std::vector<Piece> pieces_;
  std::string type_;
  i32 num_bytes_ = 1;
  i64 num_stored_blocks_ = 0, stored_bytes_ = 0;
};

/// The sequences of the problem that a mask is bound to; documents: of AttentionProblem.
Sequences sequences_of(const BoundMask& mask, const std::optional<TokenTable<i32>>& documents = {});

}  // namespace jali::cuda
