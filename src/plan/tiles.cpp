#include "plan/tiles.h"

#include <bit>

namespace jali {
namespace {

/// Calls visit(tile row, tile column) for every tile of the frame inside the tile rows' spans; the
/// cursor then stands at that tile. Tiles outside are surely empty.
template <class Visit>
void for_each_reachable(MaskCursor& cursor, i32 tile_rows, i32 tile_keys, Visit visit) {
  const Frame f = cursor.frame();
  if (f.num_keys == 0) return;
  for (i32 i0 = 0, r = 0; i0 < f.num_rows; i0 += tile_rows, ++r) {
    cursor.set_rows(i0, min_of(i0 + tile_rows, f.num_rows));
    const Span keys = cursor.key_span();
    for (i32 c = keys.begin / tile_keys; c * tile_keys < keys.end; ++c) {
      const i32 j0 = c * tile_keys;
      cursor.set_cols(j0, min_of(j0 + tile_keys, f.num_keys));
      visit(r, c);
    }
  }
}

}  // namespace

void tile_classes(MaskCursor& cursor, i32 tile_rows, i32 tile_keys, u8* out, i64 stride_r,
                  i64 stride_c) {
  for_each_reachable(cursor, tile_rows, tile_keys, [&](i32 r, i32 c) {
    out[r * stride_r + c * stride_c] = static_cast<u8>(cursor.exact_class());
  });
}

TileCounts count_tiles(const BoundMask& mask, i32 tile_rows, i32 tile_keys) {
  TileCounts total;
  MaskCursor cursor(mask);
  const i32 words = ceil_div(tile_keys, 64);
  std::vector<u64> bits(i64{tile_rows} * words);
  const i32 batches = mask.varies_by_batch() ? mask.num_batches() : 1;
  const i32 heads = mask.num_mask_heads();
  for (i32 b = 0; b < batches; ++b) {
    for (i32 h = 0; h < heads; ++h) {
      cursor.set_frame(b, h * (mask.num_heads() / heads));
      const Frame f = cursor.frame();
      TileCounts one;
      for_each_reachable(cursor, tile_rows, tile_keys, [&](i32 r, i32 c) {
        const i32 rows = min_of(tile_rows, f.num_rows - r * tile_rows);
        const i32 keys = min_of(tile_keys, f.num_keys - c * tile_keys);
        const Tile said = cursor.classify();
        if (said == Tile::kFull) {
          ++one.num_full;
          one.num_visible += i64{rows} * keys;
        } else if (said == Tile::kPartial) {
          const Tile exact = cursor.fill(bits.data(), words);
          one.num_full += exact == Tile::kFull;
          one.num_partial += exact == Tile::kPartial;
          for (i32 i = 0; exact != Tile::kEmpty && i < rows; ++i) {
            for (i32 w = 0; w < ceil_div(keys, 64); ++w) {
              one.num_visible += std::popcount(bits[i64{i} * words + w]);
            }
          }
        }
      });
      const i64 tiles = i64{ceil_div(f.num_rows, tile_rows)} * ceil_div(f.num_keys, tile_keys);
      one.num_empty = tiles - one.num_partial - one.num_full;
      const i64 times =
          i64{mask.varies_by_batch() ? 1 : mask.num_batches()} * (mask.num_heads() / heads);
      total.num_empty += times * one.num_empty;
      total.num_partial += times * one.num_partial;
      total.num_full += times * one.num_full;
      total.num_visible += times * one.num_visible;
    }
  }
  return total;
}

std::vector<Span> key_spans(MaskCursor& cursor, i32 tile_rows) {
  const Frame f = cursor.frame();
  std::vector<Span> spans;
  spans.reserve(ceil_div(f.num_rows, tile_rows));
  for (i32 i0 = 0; i0 < f.num_rows; i0 += tile_rows) {
    cursor.set_rows(i0, min_of(i0 + tile_rows, f.num_rows));
    spans.push_back(cursor.key_span());
  }
  return spans;
}

}  // namespace jali
