// The bytes that kernels receive of a mask against the run-time mask: laid out as the compiler lays
// out the C++ type of the same name, with stored blocks found where they were put.
#include "cuda/device_mask.h"

#include <cstring>

#include "check.h"
#include "leaf_list.h"
#include "mask/combine.h"
#include "mask/leaf_generators.h"

using namespace jali;
using namespace random_mask;

namespace {

template <class L>
using OnDevice = std::conditional_t<L::kRowsReadTables || L::kColsReadTables, cuda::Stored<L>, L>;

TensorView on_gpu(TensorView t) {
  t.device = DeviceType::kCUDA;
  return t;
}
Mask on_gpu(const Mask& mask) {
  std::vector<TensorView> tables;
  for (const TensorView& t : mask.tables()) tables.push_back(on_gpu(t));
  return Mask(mask.program(), mask.scalars(), tables);
}
Shape on_gpu(Shape s) {
  s.device = DeviceType::kCUDA;
  for (TensorView* t : {&s.cu_seqlens_q, &s.cu_seqlens_k, &s.q_offset.table}) *t = on_gpu(*t);
  return s;
}

/// What a call's first map kernel does, for one (b, h).
struct Store {
  Frame f;
  template <class L>
  void operator()(const cuda::Stored<L>& leaf) const {
    using Device = cuda::Stored<L>;
    if constexpr (L::kRowsReadTables) {
      for (i32 i = 0; i < f.num_rows; i += 64) {
        *Device::template find<typename L::RowBlock>(leaf.row_blocks, f, f.q_start, i) =
            leaf.L::rows(f, i, min_of(i + 64, f.num_rows));
      }
    }
    if constexpr (L::kColsReadTables) {
      for (i32 j = 0; j < f.num_keys; j += 64) {
        *Device::template find<typename L::ColBlock>(leaf.col_blocks, f, f.k_start, j) =
            leaf.L::cols(f, j, min_of(j + 64, f.num_keys));
      }
    }
  }
};

template <class Tree>
void check_tree(const Mask& mask, const char* type, const Problem& p, Rng& rng) {
  const BoundMask host(mask, p.shape), gpu(on_gpu(mask), on_gpu(p.shape));
  const cuda::DeviceMask device(gpu);
  CHECK_EQ(device.type(), std::string(type));
  if (!CHECK_EQ(device.num_bytes(), static_cast<i32>(sizeof(Tree)))) return;
  std::vector<u64> memory(device.stored_bytes() / 8 + 1);
  const std::vector<u64> bytes = device.parameters(memory.data());
  Tree tree;
  std::memcpy(static_cast<void*>(&tree), bytes.data(), sizeof tree);
  const cuda::Sequences sequences = cuda::sequences_of(gpu);

  auto frame_of = [&](int b, int h) {
    return sequences.varlen() ? cuda::frame_of(sequences, 0, b, h)
                              : cuda::frame_of(sequences, b, 0, h);
  };
  for (int b = 0; b < p.B; ++b) {
    for (int h = 0; h < p.Hq; ++h) {
      const Store store{frame_of(b, h)};
      cuda::for_each_stored(tree, store);
    }
  }
  MaskCursor cursor(host);
  for (int b = 0; b < p.B; ++b) {
    const int m = p.lq[b], n = p.lk[b], h = rng.in(0, p.Hq - 1);
    if (m == 0 || n == 0) continue;
    cursor.set_frame(b, h);
    const Frame f = frame_of(b, h);
    CHECK_EQ(f.q_offset, cursor.frame().q_offset);
    for (int i0 = 0; i0 < m; i0 += 64) {
      for (int j0 = 0; j0 < n; j0 += 128) {
        const int i1 = std::min(i0 + 64, m), j1 = std::min(j0 + 128, n);
        cursor.set_rows(i0, i1);
        cursor.set_cols(j0, j1);
        const Tile said = tree.classify(f, tree.rows(f, i0, i1), tree.cols(f, j0, j1));
        if (!CHECK_EQ(said, cursor.classify())) return;
        const int i = rng.in(i0, i1 - 1), j = rng.in(j0, j1 - 1);
        u64 bits[64 * 2];
        cursor.fill(bits, 2);
        const bool visible = bits[2 * (i - i0) + (j - j0) / 64] >> (j - j0) % 64 & 1;
        if (!CHECK_EQ(tree.visible(tree.row(f, i), tree.col(f, j)), visible)) return;
      }
    }
  }
}

std::string device_name(const char* leaf, bool stored) {
  const std::string name = std::string("leaf::") + leaf;
  return stored ? "cuda::Stored<" + name + ">" : name;
}

/// ~(L | prefix) & L2 with a second draw of L, and causal & L.
template <class L>
void check_leaf(const char* name, const char* type) {
  using D = OnDevice<L>;
  const std::string leaf = device_name(type, !std::is_same_v<D, L>);
  for (unsigned seed = 0; seed < 40; ++seed) {
    Rng rng(80000 + seed);
    Problem p;
    draw_problem(rng, p);
    // On a GPU one row is packed, and covers all tokens, also those behind the last sequence.
    p.one_row_is_packed = true;
    if (p.varlen) {
      p.shape.Tq = p.tq = p.cu_q.back();
      p.shape.Tk = p.tk = p.cu_k.back();
    }
    Generator g(rng, p);
    const Sample one = leaf_generators().at(name)(g), two = leaf_generators().at(name)(g);
    const long before = check::num_failures;
    check_tree<And<Not<Or<D, jali::leaf::Prefix>>, D>>(
        ~(one.mask | prefix(9)) & two.mask,
        ("And<Not<Or<" + leaf + ", leaf::Prefix>>, " + leaf + ">").c_str(), p, rng);
    check_tree<And<jali::leaf::Causal, D>>(causal() & one.mask,
                                           ("And<leaf::Causal, " + leaf + ">").c_str(), p, rng);
    if (check::num_failures > before) {
      std::printf("%s fails with seed %u\n", name, seed);
      return;
    }
  }
}

}  // namespace

TEST(device_masks_are_laid_out_as_their_types) {
#define JALI_CHECK_LEAF(Struct, name) check_leaf<leaf::Struct>(#name, #Struct);
  JALI_FOR_EACH_LEAF(JALI_CHECK_LEAF)
#undef JALI_CHECK_LEAF
}

TEST(no_mask_has_a_type_of_its_own) {
  Shape shape;
  shape.device = DeviceType::kCUDA;
  shape.Lq = shape.Lk = 100;
  const BoundMask bound(Mask(), shape);
  const cuda::DeviceMask device(bound);
  CHECK_EQ(device.type(), std::string("cuda::NoMask"));
  CHECK_EQ(device.stored_bytes(), 0);
}
