// What of every leaf is compiled once per instruction set, because it loops: the cells of a tile and
// the blocks of a range. leaf_functions.cpp (baseline), fill_v3.cpp and fill_v4.cpp instantiate the same
// templates with other compiler flags.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/isa.h"
#include "mask/leaf.h"

namespace jali {

/// See LeafNode::fill. `leaf` points at the leaf's POD struct.
using FillFunction = void (*)(const void* leaf, const Frame& f, i32 i0, i32 i1, i32 j0, i32 j1,
                              u64* bits, i64 stride);

/// See LeafNode::rows and LeafNode::cols.
using BlockFunction = void (*)(const void* leaf, const Frame& f, i32 begin, i32 end, void* out);

struct LeafFunctions {
  FillFunction fill;
  BlockFunction rows, cols;
};

/// The functions of all leaves in the order of JALI_FOR_EACH_LEAF.
const LeafFunctions* leaf_functions(Isa isa);
const LeafFunctions* leaf_functions_v3();
const LeafFunctions* leaf_functions_v4();

/// 64 bytes of 0 or 1 to 64 bits, byte k to bit k.
JALI_HD u64 pack_bits(const u8* bytes) {
  u64 bits = 0;
#if defined(__SSE2__)
  for (int k = 0; k < 4; ++k) {  // the instruction collects the highest bit of each byte
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * k));
    bits |= u64{static_cast<u16>(_mm_movemask_epi8(_mm_slli_epi16(x, 7)))} << (16 * k);
  }
#else
  for (int k = 0; k < 8; ++k) {
    u64 eight;
    __builtin_memcpy(&eight, bytes + 8 * k, 8);
    bits |= ((eight * 0x0102040810204080ull) >> 56) << (8 * k);
  }
#endif
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
    u64* out = bits + (j - j0) / 64;
    if constexpr (requires { leaf.word(leaf.row(f, i0), j, count); }) {
      for (i32 i = i0; i < i1; ++i, out += stride) *out = leaf.word(leaf.row(f, i), j, count);
      continue;
    }
    for (i32 c = 0; c < 64; ++c) cols[c] = leaf.col(f, min_of(j + c, j1 - 1));
    for (i32 i = i0; i < i1; ++i, out += stride) {
      const typename Leaf::Row row = leaf.row(f, i);
      for (i32 c = 0; c < 64; ++c) cells[c] = leaf.visible(row, cols[c]);
      *out = pack_bits(cells) & tail;
    }
  }
}

template <Isa kIsa, class Leaf>
void row_block(const void* leaf, const Frame& f, i32 i0, i32 i1, void* out) {
  *static_cast<typename Leaf::RowBlock*>(out) = static_cast<const Leaf*>(leaf)->rows(f, i0, i1);
}
template <Isa kIsa, class Leaf>
void col_block(const void* leaf, const Frame& f, i32 j0, i32 j1, void* out) {
  *static_cast<typename Leaf::ColBlock*>(out) = static_cast<const Leaf*>(leaf)->cols(f, j0, j1);
}

template <Isa kIsa, class Leaf>
constexpr LeafFunctions functions_of() {
  return {fill_cells<kIsa, Leaf>, row_block<kIsa, Leaf>, col_block<kIsa, Leaf>};
}

}  // namespace jali
