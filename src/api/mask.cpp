// The functions of jali.h that look at a mask alone.
#include <cstring>

#include "base/error.h"
#include "base/tensor.h"
#include "mask/bound.h"
#include "plan/tiles.h"

namespace jali {
namespace {

struct Grid {
  i32 batches, heads;  // of the output: all, or 1 where the mask does not vary
};

Grid check_output(const char* name, const BoundMask& mask, const TensorView& out, i64 rows,
                  i64 cols, bool may_share) {
  if (out.dtype != DType::kBool || out.device != DeviceType::kCPU || out.rank != 4) {
    type_error(name, ": out is ", dtype_name(out.dtype), " ", shape_text(out),
               "; expected bool [B, H, rows, keys] on the CPU");
  }
  auto fits = [&](i64 n, i64 all, bool varies) {
    return n == all || (may_share && n == 1 && !varies);
  };
  if (!fits(out.shape[0], mask.num_batches(), mask.varies_by_batch()) ||
      !fits(out.shape[1], mask.num_heads(), mask.varies_by_head()) || out.shape[2] != rows ||
      out.shape[3] != cols) {
    value_error(name, ": out is ", shape_text(out), "; expected [", mask.num_batches(), ", ",
                mask.num_heads(), ", ", rows, ", ", cols, "]");
  }
  return {static_cast<i32>(out.shape[0]), static_cast<i32>(out.shape[1])};
}

/// Calls work(cursor, pointer to out[b, h]) with the cursor standing at (b, h).
template <class Work>
void for_each_head(const BoundMask& mask, const TensorView& out, Grid grid, Work work) {
  MaskCursor cursor(mask);
  for (i32 b = 0; b < grid.batches; ++b) {
    for (i32 h = 0; h < grid.heads; ++h) {
      cursor.set_frame(b, h);
      work(cursor, data_of<u8>(out) + b * out.stride[0] + h * out.stride[1]);
    }
  }
}

}  // namespace

void mask_dense(const Mask& mask, const Shape& shape, const TensorView& out) {
  const BoundMask bound(mask, shape);
  const Grid grid =
      check_output("mask_dense", bound, out, bound.longest_rows(), bound.longest_keys(), false);
  constexpr i32 kRows = 64, kKeys = 256;
  u64 bits[kRows * kKeys / 64];
  for_each_head(bound, out, grid, [&](MaskCursor& cursor, u8* at) {
    const Frame f = cursor.frame();
    for (i64 i = 0; i < out.shape[2];
         ++i) {  // a shorter sequence leaves cells outside: not visible
      for (i64 j = 0; j < out.shape[3]; ++j) at[i * out.stride[2] + j * out.stride[3]] = 0;
    }
    for (i32 i0 = 0; i0 < f.num_rows; i0 += kRows) {
      const i32 i1 = min_of(i0 + kRows, f.num_rows);
      cursor.set_rows(i0, i1);
      for (i32 j0 = 0; j0 < f.num_keys; j0 += kKeys) {
        const i32 j1 = min_of(j0 + kKeys, f.num_keys);
        cursor.set_cols(j0, j1);
        cursor.fill(bits, kKeys / 64);
        for (i32 i = i0; i < i1; ++i) {
          const u64* row = bits + (i - i0) * (kKeys / 64);
          for (i32 j = j0; j < j1; ++j) {
            at[i * out.stride[2] + j * out.stride[3]] = row[(j - j0) / 64] >> ((j - j0) % 64) & 1;
          }
        }
      }
    }
  });
}

void mask_tiles(const Mask& mask, const Shape& shape, std::int64_t tile_rows,
                std::int64_t tile_keys, const TensorView& out) {
  if (tile_rows < 1 || tile_keys < 1 || tile_rows > kMaxLength || tile_keys > kMaxLength) {
    value_error("mask_tiles: tile ", tile_rows, " x ", tile_keys, "; expected at least 1 x 1");
  }
  BoundMask bound(mask, shape);
  const i64 rows = ceil_div<i64>(bound.longest_rows(), tile_rows);
  const i64 cols = ceil_div<i64>(bound.longest_keys(), tile_keys);
  const Grid grid = check_output("mask_tiles", bound, out, rows, cols, true);
  bound.summarize();
  for_each_head(bound, out, grid, [&](MaskCursor& cursor, u8* at) {
    for (i64 r = 0; r < rows; ++r) {
      if (out.stride[3] == 1) {
        std::memset(at + r * out.stride[2], 0, cols);
      } else {
        for (i64 c = 0; c < cols; ++c) at[r * out.stride[2] + c * out.stride[3]] = 0;
      }
    }
    tile_classes(cursor, static_cast<i32>(tile_rows), static_cast<i32>(tile_keys), at,
                 out.stride[2], out.stride[3]);
  });
}

std::pair<bool, bool> mask_varies(const Mask& mask, const Shape& shape) {
  const BoundMask bound(mask, shape);
  return {bound.varies_by_batch(), bound.varies_by_head()};
}

}  // namespace jali
