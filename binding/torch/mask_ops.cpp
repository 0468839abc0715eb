// The operators that look at a mask alone.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <tuple>

#include "gpu.h"

namespace jali::binding {
namespace {

#define JALI_SHAPE_SCHEMA                                                               \
  "Tensor[] tables, SymInt[] scalars, int[] program, SymInt B, SymInt Hq, SymInt Hkv, " \
  "SymInt Lq, SymInt Lk, Tensor? q_offsets, SymInt? q_offset, Tensor? cu_seqlens_q, "   \
  "Tensor? cu_seqlens_k, SymInt Tq, SymInt Tk"
#define JALI_SHAPE_PARAMETERS                                                                   \
  std::vector<Tensor> tables, std::vector<std::int64_t> scalars,                                \
      std::vector<std::int64_t> program, std::int64_t B, std::int64_t Hq, std::int64_t Hkv,     \
      std::int64_t Lq, std::int64_t Lk, MaybeTensor q_offsets,                                  \
      std::optional<std::int64_t> q_offset, MaybeTensor cu_seqlens_q, MaybeTensor cu_seqlens_k, \
      std::int64_t Tq, std::int64_t Tk
#define JALI_SHAPE \
  make_shape(B, Hq, Hkv, Lq, Lk, q_offsets, q_offset, cu_seqlens_q, cu_seqlens_k, Tq, Tk)
#define JALI_MASK Mask(std::move(program), std::move(scalars), views(tables))

Shape make_shape(std::int64_t B, std::int64_t Hq, std::int64_t Hkv, std::int64_t Lq,
                 std::int64_t Lk, const MaybeTensor& q_offsets,
                 std::optional<std::int64_t> q_offset, const MaybeTensor& cu_seqlens_q,
                 const MaybeTensor& cu_seqlens_k, std::int64_t Tq, std::int64_t Tk) {
  Shape shape;
  shape.B = B, shape.Hq = Hq, shape.Hkv = Hkv, shape.Lq = Lq, shape.Lk = Lk;
  if (q_offsets) shape.q_offset = view(q_offsets);
  if (q_offset) shape.q_offset = *q_offset;
  shape.cu_seqlens_q = view(cu_seqlens_q);
  shape.cu_seqlens_k = view(cu_seqlens_k);
  shape.Tq = Tq, shape.Tk = Tk;
  return shape;
}

void check_sizes(std::initializer_list<std::int64_t> sizes) {
  for (std::int64_t size : sizes) {
    if (size < 0) throw Error(Error::Kind::kValue, "B, H, Lq and Lk must not be negative");
  }
}

Tensor mask_dense(JALI_SHAPE_PARAMETERS) {
  check_sizes({B, Hq, Lq, Lk});
  Tensor out = empty({B, Hq, Lq, Lk}, ScalarType::Bool);
  jali::mask_dense(JALI_MASK, JALI_SHAPE, view(out));
  return out;
}

// How many of the n classes are 0, 1 and 2. Eight at a time: at a million tokens there are 67 million.
std::array<std::int64_t, 3> count_classes(const std::uint8_t* classes, std::int64_t n) {
  constexpr std::uint64_t kPartial = 0x0101010101010101, kFull = 0x0202020202020202;
  std::int64_t partial = 0, full = 0, at = 0;
  for (; at + 8 <= n; at += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, classes + at, 8);
    partial += std::popcount(eight & kPartial);
    full += std::popcount(eight & kFull);
  }
  for (; at < n; ++at) {
    partial += classes[at] == 1;
    full += classes[at] == 2;
  }
  return {n - partial - full, partial, full};
}

// Classes [batches, heads, ...], where `batches` is 1 or B and `heads` 1 or Hq as mask_varies said,
// and how many there are of each.
std::tuple<Tensor, Tensor> mask_tiles(JALI_SHAPE_PARAMETERS, std::int64_t tile_rows,
                                      std::int64_t tile_keys, std::int64_t batches,
                                      std::int64_t heads) {
  check_sizes({B, Hq, Lq, Lk, batches, heads});
  if (tile_rows < 1 || tile_keys < 1) {
    throw Error(Error::Kind::kValue, "tile must be (rows, keys), both at least 1, got (" +
                                         std::to_string(tile_rows) + ", " +
                                         std::to_string(tile_keys) + ")");
  }
  std::int64_t rows = (Lq + tile_rows - 1) / tile_rows, keys = (Lk + tile_keys - 1) / tile_keys;
  Tensor out = empty({batches, heads, rows, keys}, ScalarType::Char);
  TensorView classes = view(out);
  jali::mask_tiles(JALI_MASK, JALI_SHAPE, tile_rows, tile_keys, classes);
  Tensor counts = empty({3}, ScalarType::Long);
  auto found =
      count_classes(static_cast<const std::uint8_t*>(classes.data), classes.num_elements());
  std::copy(found.begin(), found.end(), static_cast<std::int64_t*>(counts.mutable_data_ptr()));
  return {out, counts};
}

// (by batch, by head)
std::tuple<bool, bool> mask_varies(JALI_SHAPE_PARAMETERS) {
  auto [by_batch, by_head] = jali::mask_varies(JALI_MASK, JALI_SHAPE);
  return {by_batch, by_head};
}

// A text as its bytes: str results leak in torch 2.13.
std::vector<std::int64_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// (tile rows, tile keys, empty, partial, full tiles, visible cells, plan bytes), plan seconds, and
// the text "backend source".
std::tuple<std::vector<std::int64_t>, double, std::vector<std::int64_t>> explain(
    JALI_SHAPE_PARAMETERS, Tensor q, std::int64_t Dv) {
  const TensorView like = view(q);
  std::int64_t D = like.size(-1);
  if (like.device == DeviceType::kCUDA) {  // as attention pads them
    D = suited_width(D);
    Dv = suited_width(Dv);
  }
  Explanation e =
      jali::explain(JALI_MASK, JALI_SHAPE, D, Dv, like.dtype, like.device, like.device_index);
  return {{e.tile_rows, e.tile_keys, e.num_empty, e.num_partial, e.num_full, e.num_visible,
           e.plan_bytes},
          e.plan_seconds,
          bytes_of(e.backend + " " + e.source)};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(jali, m) {
  m.def("mask_dense(" JALI_SHAPE_SCHEMA ") -> Tensor");
  m.def("mask_tiles(" JALI_SHAPE_SCHEMA
        ", SymInt tile_rows, SymInt tile_keys, SymInt batches, SymInt heads) -> (Tensor classes, "
        "Tensor counts)");
  m.def("mask_varies(" JALI_SHAPE_SCHEMA ") -> (bool, bool)");
  m.def("explain(" JALI_SHAPE_SCHEMA ", Tensor q, SymInt Dv) -> (int[], float, int[])");
}

// A mask may hold no tensor that could tell a device.
STABLE_TORCH_LIBRARY_IMPL(jali, CompositeExplicitAutograd, m) {
  m.impl("mask_dense", JALI_KERNEL(mask_dense));
  m.impl("mask_tiles", JALI_KERNEL(mask_tiles));
  m.impl("mask_varies", JALI_KERNEL(mask_varies));
  m.impl("explain", JALI_KERNEL(explain));
}

}  // namespace jali::binding
