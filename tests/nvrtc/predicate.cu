// Generated predicates (tests/mask/predicate_codegen_test.cpp), alone and in a tree with a leaf.
#include "mask/combine.h"
#include "mask/leaf/causal.h"
#include "mask/predicate_generated.h"

using namespace jali;

template <class M>
__device__ __forceinline__ void evaluate(const M& mask, Frame f, u8* cells, u8* classes) {
  const i32 i0 = 64 * blockIdx.x, j0 = 64 * threadIdx.x;
  const typename M::RowBlock rows = mask.rows(f, i0, min_of(i0 + 64, f.num_rows));
  const typename M::ColBlock cols = mask.cols(f, j0, min_of(j0 + 64, f.num_keys));
  classes[blockIdx.x * blockDim.x + threadIdx.x] = static_cast<u8>(mask.classify(f, rows, cols));
  const typename M::Row row = mask.row(f, i0);
  for (i32 j = j0; j < min_of(j0 + 64, f.num_keys); ++j) {
    cells[i64(i0) * f.num_keys + j] = mask.visible(row, mask.col(f, j));
  }
}

#define PROBE(name, ...)                                                                        \
  extern "C" __global__ void name(const __grid_constant__ __VA_ARGS__ mask, Frame f, u8* cells, \
                                  u8* classes) {                                                \
    evaluate(mask, f, cells, classes);                                                          \
  }
PROBE(documents, predicate::Documents)
PROBE(neighborhood, predicate::Neighborhood)
PROBE(ragged, predicate::Ragged)
PROBE(scores, predicate::Scores)
using Tree = And<leaf::Causal, Or<predicate::Neighborhood, Not<predicate::Documents>>>;
PROBE(tree, Tree)
