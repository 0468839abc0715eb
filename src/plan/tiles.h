// Tile classes of a whole mask, and what a plan knows before any attention is computed.
#pragma once

#include "mask/bound.h"

namespace jali {

/// Counts over every (b, h) of the problem.
struct TileCounts {
  i64 num_empty = 0, num_partial = 0, num_full = 0;
  i64 num_visible = 0;  // cells
};

/// Exact classes of the tiles of one (b, h): out[r * stride_r + c * stride_c].
void tile_classes(MaskCursor& cursor, i32 tile_rows, i32 tile_keys, u8* out, i64 stride_r,
                  i64 stride_c);

/// Exact counts, without storing classes: O(active tiles), cells counted where a tile is partial.
TileCounts count_tiles(const BoundMask& mask, i32 tile_rows, i32 tile_keys);

/// The keys that each tile row of one (b, h) can reach at all: what the inline source knows.
std::vector<Span> key_spans(MaskCursor& cursor, i32 tile_rows);

}  // namespace jali
