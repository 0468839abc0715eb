// What binding a mask refuses: wrong parameters of every leaf, malformed programs, wrong shapes; and
// that the message says what was wrong and what was expected.
#include "mask/bound.h"

#include "check.h"

using namespace jali;

namespace {

/// B 2, Hq 4, Hkv 2, Lq 6, Lk 10.
Shape shape() {
  Shape s;
  s.B = 2;
  s.Hq = 4;
  s.Hkv = 2;
  s.Lq = 6;
  s.Lk = 10;
  return s;
}

i32 zeros[1000] = {};

TensorView ints(std::initializer_list<i64> dims) { return TensorView(zeros, DType::kI32, dims); }
TensorView bools(std::initializer_list<i64> dims) { return TensorView(zeros, DType::kBool, dims); }

#define CHECK_REFUSED(mask, text) CHECK_THROWS(BoundMask(mask, shape()), Error, text)
#define CHECK_BINDS(mask) CHECK_EQ(BoundMask(mask, shape()).leaves().size(), std::size_t{1})

}  // namespace

TEST(token_tables) {
  CHECK_BINDS(key_padding(bools({10})));
  CHECK_BINDS(key_padding(bools({1, 10})));
  CHECK_BINDS(key_padding(bools({2, 10})));
  CHECK_REFUSED(key_padding(bools({2, 9})), "keep has 9 entries per sequence; expected Lk = 10");
  CHECK_REFUSED(key_padding(bools({3, 10})), "batch dim is 3; expected 1 or 2");
  CHECK_REFUSED(key_padding(ints({2, 10})), "dtype int32; expected bool");
  CHECK_REFUSED(key_padding({}), "keep is required");
  CHECK_BINDS(row_interval(ints({2, 4, 6}), ints({6})));
  CHECK_REFUSED(row_interval(ints({10}), {}), "start has 10 entries per sequence; expected Lq = 6");
  CHECK_BINDS(key_interval(ints({2, 2, 10}), ints({1, 10})));
  CHECK_REFUSED(key_interval(ints({3, 10}), {}), "has 3 heads; expected 1, Hkv = 2 or Hq = 4");
  TensorView elsewhere = bools({10});
  elsewhere.device = DeviceType::kCUDA;
  CHECK_REFUSED(key_padding(elsewhere), "is on GPU 0, the call's tensors on the CPU");
}

TEST(one_row_of_packed_tokens) {
  i32 cu[] = {0, 5, 9};
  Shape s = shape();
  s.cu_seqlens_q = s.cu_seqlens_k = TensorView(cu, DType::kI32, {3});
  s.Tq = s.Tk = 12;
  auto binds = [&](i64 rows, i64 length) {
    TensorView keep = bools({rows, length});
    keep.device = s.device;
    return BoundMask(key_padding(keep), s).leaves().size() == 1;
  };
  for (i64 length : {12, 9, 5}) CHECK(binds(1, length));  // all tokens; those of sequences; shared
  s.device = DeviceType::kCUDA;
  s.cu_seqlens_q.device = s.cu_seqlens_k.device = s.device;
  CHECK(binds(1, 12));
  CHECK(binds(2, 5));
  CHECK_THROWS(binds(1, 9), Error, "has one row of 9 entries, but there are 12 tokens");
}

TEST(numbers) {
  CHECK_REFUSED(dilated(0), "step must be at least 1");
  CHECK_REFUSED(prefix({}), "length is required");
  CHECK_REFUSED(causal(ints({3})), "expected 1 or B = 2 entries");
  CHECK_REFUSED(window(ints({3}), {}), "has 3 heads");
  i32 far[] = {0, (1 << 30) + 1};
  CHECK_REFUSED(causal(TensorView(far, DType::kI32, {2})), "beyond");
}

TEST(documents) {
  CHECK_BINDS(document(ints({10})));
  CHECK_BINDS(document(ints({6}), ints({10})));
  CHECK_REFUSED(document(ints({6})), "Lk entries are needed");
  CHECK_REFUSED(document(ints({10}), ints({10})), "q_ids has 10 entries");
}

TEST(packed_documents) {
  CHECK_BINDS(packed_document(ints({4})));
  CHECK_BINDS(packed_document(ints({2, 1})));
  CHECK_REFUSED(packed_document(ints({3, 4})), "batch dim is 3; expected 1 or 2");
  i32 falling[] = {0, 7, 5}, late[] = {1, 5};
  CHECK_REFUSED(packed_document(TensorView(falling, DType::kI32, {3})), "decreases");
  CHECK_REFUSED(packed_document(TensorView(late, DType::kI32, {2})), "must begin with 0");
}

TEST(documents_are_taken_where_the_others_know_no_places) {
  const Mask documents = packed_document(ints({2, 4})), others = causal() & window(3, 1);
  auto taken = [](const Mask& mask, i64 most) {
    BoundMask bound(mask, shape());
    const std::size_t before = bound.nodes().size();
    const auto table = bound.take_documents(most);
    if (!table) CHECK_EQ(bound.nodes().size(), before);
    if (table) CHECK_EQ(table->length, 4);
    return table.has_value();
  };
  CHECK(taken(documents, 3));
  CHECK(!taken(documents, 2));
  CHECK(taken(others & documents, 3));
  CHECK(taken(documents & others, 3));
  CHECK(taken(causal() & (documents & window(3, 1)), 3));
  CHECK(!taken(Mask(), 3));
  CHECK(!taken(others, 3));
  CHECK(!taken(documents & documents, 3));
  CHECK(!taken(documents | others, 3));
  CHECK(!taken(~documents, 3));
  CHECK(!taken(documents & prefix(3), 3));
  CHECK(!taken(documents & causal(ints({2})), 3));
  CHECK(taken(documents & causal(ints({1})), 3));

  BoundMask bound(causal() & (documents & window(3, 1)), shape());
  CHECK(bound.varies_by_batch());
  CHECK(bound.take_documents(3).has_value());
  CHECK_EQ(bound.leaves().size(), std::size_t{2});
  CHECK_EQ(bound.nodes().size(), std::size_t{3});
  CHECK_EQ(std::string(bound.leaves()[1]->name()), std::string("window"));
  Shape on_gpu = shape();
  TensorView there = ints({2, 4});
  on_gpu.device = there.device = DeviceType::kCUDA;
  BoundMask gpu(causal() & packed_document(there), on_gpu);
  CHECK(gpu.varies_by_batch());
  CHECK(gpu.take_documents(3).has_value());
  CHECK(!gpu.varies_by_batch());
  CHECK_EQ(gpu.num_batches(), 2);
  // On the CPU they become the sequences.
  i32 cuts[] = {0, 4, 4, 20};
  BoundMask two(causal() & packed_document(TensorView(cuts, DType::kI32, {4})), shape());
  CHECK(two.take_documents(3).has_value());
  CHECK_EQ(two.num_batches(), 6);
  CHECK_EQ(two.longest_keys(), 6);
  for (i32 b : {0, 3}) {
    CHECK_EQ(two.frame(b, 0).num_rows, 4);
    CHECK_EQ(two.frame(b + 1, 0).num_keys, 0);
    CHECK_EQ(two.frame(b + 2, 1).k_start, 4);
    CHECK_EQ(two.frame(b + 2, 1).num_keys, 6);  // the sequence ends
  }
  BoundMask alone(documents, shape());
  CHECK(alone.take_documents(3).has_value());
  CHECK(alone.trivial());
}

TEST(numbers_alone) {
  Shape on_gpu = shape();
  on_gpu.device = DeviceType::kCUDA;
  TensorView there = ints({2});
  there.device = DeviceType::kCUDA;
  auto alone = [&](const Mask& mask) { return BoundMask(mask, on_gpu).numbers_alone(); };
  CHECK(alone(Mask()));
  CHECK(alone(causal() & ~window(3, 1, 2)));
  CHECK(!alone(causal() & window(3, 1, there)));
  // Then a cursor of a frame can be asked on a GPU, too.
  Frame f;
  f.num_rows = 6;
  f.num_keys = 10;
  f.q_offset = 4;
  const BoundMask bound(causal() & window(3, 1), on_gpu);
  MaskCursor cursor(bound, f);
  cursor.set_cols(5, 6);
  const Span rows = cursor.row_span();  // positions 5 to 8
  CHECK_EQ(rows.begin, 1);
  CHECK_EQ(rows.end, 5);
}

TEST(grids) {
  CHECK_BINDS(dense(bools({6, 10})));
  CHECK_BINDS(dense(bools({2, 4, 1, 10})));
  CHECK_REFUSED(dense(bools({10, 6})), "expected 1 or Lq = 6 rows and 1 or Lk = 10 keys");
  CHECK_REFUSED(dense(bools({3, 1, 6, 10})), "batch dim is 3");
  CHECK_BINDS(block_sparse(bools({2, 4}), 3, 3));
  CHECK_REFUSED(block_sparse(bools({2, 3}), 3, 3), "too few block columns");
  CHECK_REFUSED(block_sparse(bools({2, 4}), 0, 3), "at least 1 row by 1 key");
}

TEST(lists) {
  i32 row_ptr[] = {0, 2, 3}, col_idx[] = {0, 3, 1};
  auto mask = [&] {
    return block_csr(TensorView(row_ptr, DType::kI32, {3}), TensorView(col_idx, DType::kI32, {3}),
                     3, 3);
  };
  CHECK_BINDS(mask());
  CHECK_REFUSED(block_csr(ints({2}), ints({3}), 3, 3), "row_ptr is too short");
  row_ptr[1] = 4;
  CHECK_REFUSED(mask(), "row_ptr must not decrease");
  row_ptr[1] = 2;
  col_idx[1] = 0;
  CHECK_REFUSED(mask(), "increase strictly");
  col_idx[0] = -1;
  CHECK_REFUSED(mask(), "must not be negative");
  i32 none[] = {0, 0, 0};
  CHECK_BINDS(block_csr(TensorView(none, DType::kI32, {3}), ints({0}), 3, 3));
}

TEST(neighborhoods) {
  CHECK_BINDS(neighborhood({2, 3}, {2, 1}));
  CHECK_REFUSED(neighborhood({2, 3}, {2, 4}), "must not exceed the grid's shape");
  CHECK_REFUSED(neighborhood({2, 3}, {2, 0}), "at least 1");
  CHECK_REFUSED(neighborhood({1 << 20, 1 << 20}, {1, 1}), "more points");
  CHECK_THROWS(neighborhood({2, 3}, {2}), Error, "kernel has 1 entries; expected 2");
  CHECK_THROWS(neighborhood({2, 2, 2, 2}, {1, 1, 1, 1}), Error, "expected 1 to 3");
  CHECK_THROWS(neighborhood({}, {}), Error, "expected 1 to 3");
}

TEST(malformed_programs) {
  const i64 kCausal = leaf_kind("causal");
  CHECK_REFUSED(Mask({Mask::kAnd}, {}, {}), "lacks its operand");
  CHECK_REFUSED(Mask({kCausal, 1, 0, Mask::kAnd}, {}, {}), "lacks its operand");
  CHECK_REFUSED(Mask({12345, 0}, {}, {}), "no known leaf");
  CHECK_REFUSED(Mask({kCausal, 3, 0}, {}, {}), "cut short");
  CHECK_REFUSED(Mask({kCausal}, {}, {}), "cut short");
  CHECK_REFUSED(Mask({kCausal, 0}, {}, {}), "ends before its field offset");
  CHECK_REFUSED(Mask({kCausal, 2, 0, 0}, {}, {}), "too many");
  CHECK_REFUSED(Mask({kCausal, 1, 1}, {}, {}), "no scalar left");
  CHECK_REFUSED(Mask({kCausal, 1, 2}, {}, {}), "no table left");
  CHECK_REFUSED(Mask({kCausal, 1, 7}, {}, {}), "has code 7");
  CHECK_REFUSED(Mask({kCausal, 1, 0}, {5}, {}), "left over");
  CHECK_REFUSED(Mask({kCausal, 1, 0, kCausal, 1, 0}, {}, {}), "expressions left");
}

TEST(shapes) {
  auto refuses = [](Shape s, const char* text) {
    CHECK_THROWS(BoundMask(causal(), s), Error, text);
  };
  Shape s = shape();
  s.Hq = 3;
  refuses(s, "a multiple of Hkv");
  s = shape();
  s.Lq = -1;
  refuses(s, "Lq = -1");
  s = shape();
  i32 cu[] = {0, 5, 3}, good[] = {0, 5, 9};
  s.cu_seqlens_q = TensorView(cu, DType::kI32, {3});
  refuses(s, "must be given together");
  s.cu_seqlens_k = TensorView(good, DType::kI32, {3});
  refuses(s, "decreases");
  cu[0] = 1;
  refuses(s, "expected 0");
  s = shape();
  s.q_offset = ints({3});
  refuses(s, "q_offset");
}
