// The operator behind DynamicMask: selection by score, for CPU tensors (others: jali/_dynamic_ends.py).
#include "convert.h"

namespace jali::binding {
namespace {

// scores fp32 [B|1, H, Lk], documents int32 and keep_keys bool [B|1, Lk] -> ends int32 [B, H, Lk]
// (varlen: all packed, ends [1, H, Tk]). A negative keep means no limit.
Tensor dynamic_ends(Tensor scores, std::vector<Tensor> documents, std::vector<Tensor> keep_keys,
                    MaybeTensor cu_seqlens_k, std::int64_t keep, bool causal) {
  DynamicOptions options;
  options.keep = keep;
  options.causal = causal;
  options.documents = views(documents);
  options.keep_keys = views(keep_keys);
  options.cu_seqlens_k = view(cu_seqlens_k);
  TensorView from = view(scores);
  if (from.rank < 1 || from.rank > 3) {
    throw Error(Error::Kind::kValue, "dynamic_ends: scores must be [B|1, H, Lk], [H, Lk] or [Lk]");
  }
  std::int64_t batch = from.rank == 3 ? from.size(0) : 1;
  std::int64_t heads = from.rank >= 2 ? from.size(-2) : 1;
  if (!options.cu_seqlens_k.given()) {
    for (const auto& tables : {options.documents, options.keep_keys}) {
      for (const TensorView& t : tables) {
        if (t.rank == 2 && t.size(0) != 1) batch = t.size(0);
      }
    }
  }
  Tensor ends = empty({batch, heads, from.size(-1)}, ScalarType::Int);
  jali::dynamic_ends(from, options, view(ends));
  return ends;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(jali, m) {
  m.def(
      "dynamic_ends(Tensor scores, Tensor[] documents, Tensor[] keep_keys, Tensor? cu_seqlens_k, "
      "SymInt keep, bool causal) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(jali, CPU, m) { m.impl("dynamic_ends", JALI_KERNEL(dynamic_ends)); }

}  // namespace jali::binding
