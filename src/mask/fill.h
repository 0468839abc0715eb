// Evaluates the cells of a tile for every leaf, once per instruction set: fill.cpp (baseline),
// fill_v3.cpp and fill_v4.cpp instantiate the same template with other compiler flags.
#pragma once

#include "base/isa.h"
#include "mask/leaf.h"

namespace jali {

/// See LeafNode::fill. `leaf` points at the leaf's POD struct.
using FillFunction = void (*)(const void* leaf, const Frame& f, i32 i0, i32 i1, i32 j0, i32 j1,
                              u64* bits, i64 stride);

/// The fill functions of all leaves in the order of JALI_FOR_EACH_LEAF.
const FillFunction* fill_functions(Isa isa);
const FillFunction* fill_functions_v3();
const FillFunction* fill_functions_v4();

/// 64 bytes of 0 or 1 to 64 bits, byte k to bit k.
JALI_HD u64 pack_bits(const u8* bytes) {
  u64 bits = 0;
  for (int k = 0; k < 8; ++k) {
    u64 eight;
    __builtin_memcpy(&eight, bytes + 8 * k, 8);
    bits |= ((eight * 0x0102040810204080ull) >> 56) << (8 * k);
  }
  return bits;
}

/// `kIsa` only keeps the instances of different translation units apart.
template <Isa kIsa, class Leaf>
void fill_cells(const void* pointer, const Frame& frame, i32 i0, i32 i1, i32 j0, i32 j1, u64* bits,
                i64 stride) {
  const Leaf leaf = *static_cast<const Leaf*>(pointer);
  const Frame f = frame;
  typename Leaf::Col cols[64];
  alignas(64) u8 cells[64];
  for (i32 j = j0; j < j1; j += 64) {
    const i32 count = min_of(64, j1 - j);
    const u64 tail = count == 64 ? ~u64{0} : (u64{1} << count) - 1;
    for (i32 c = 0; c < 64; ++c) cols[c] = leaf.col(f, min_of(j + c, j1 - 1));
    u64* out = bits + (j - j0) / 64;
    for (i32 i = i0; i < i1; ++i, out += stride) {
      const typename Leaf::Row row = leaf.row(f, i);
      for (i32 c = 0; c < 64; ++c) cells[c] = leaf.visible(row, cols[c]);
      *out = pack_bits(cells) & tail;
    }
  }
}

}  // namespace jali
