// The operators of attention itself. All are functional; structure in `program`, numbers in
// `scalars`, so that neither a graph nor a kernel is specialised to a length or a width.
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "gpu.h"

namespace jali::binding {
namespace {

// dq, dk, dv; those of bias, key_bias and sinks that are needed.
using Grads = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>>;

// The arguments that forward, backward and truth share, in the schema's order.
#define JALI_OPTIONS_SCHEMA                                                                   \
  "Tensor? bias=None, Tensor? key_bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, " \
  "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? q_offsets=None, "            \
  "SymInt? q_offset=None, Tensor? seed=None, Tensor[]? tables=None, SymInt[]? scalars=None, " \
  "int[]? program=None, float? scale=None, float softcap=0., float dropout_p=0., "            \
  "bool deterministic=False"
#define JALI_OPTIONS_PARAMETERS                                                                    \
  const MaybeTensor &bias, const MaybeTensor &key_bias, const MaybeTensor &alibi_slopes,           \
      const MaybeTensor &sinks, const MaybeTensor &cu_seqlens_q, const MaybeTensor &cu_seqlens_k,  \
      const MaybeTensor &q_offsets, std::optional<std::int64_t> q_offset, const MaybeTensor &seed, \
      const std::optional<std::vector<Tensor>>&tables, const MaybeInts &scalars,                   \
      const MaybeInts &program, std::optional<double> scale, double softcap, double dropout_p,     \
      bool deterministic
#define JALI_OPTIONS_SEEN(see)                                                                  \
  make_options(see, bias, key_bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, q_offsets, \
               q_offset, seed, scale, softcap, dropout_p, deterministic)
#define JALI_MASK_SEEN(see) make_mask(see, program, scalars, tables)
#define JALI_OPTIONS JALI_OPTIONS_SEEN(&view)
#define JALI_MASK JALI_MASK_SEEN(&view)

using MaybeInts = std::optional<std::vector<std::int64_t>>;

// Empty lists may be given as None: that is cheaper to hand over.
Mask make_mask(Viewer see, const MaybeInts& program, const MaybeInts& scalars,
               const std::optional<std::vector<Tensor>>& tables) {
  if (!program) return Mask();
  return Mask(*program, scalars.value_or(std::vector<std::int64_t>()),
              tables ? views(*tables, see) : std::vector<TensorView>());
}

// A mask as one int64 tensor on the CPU: the length of its program, the program, its scalars.
Mask unpack_mask(const MaybeTensor& numbers, const std::optional<std::vector<Tensor>>& tables) {
  if (!numbers) return Mask();
  const TensorView view = binding::view(*numbers);
  const bool taken = view.dtype == DType::kI64 && view.rank == 1 && view.shape[0] > 0 &&
                     view.stride[0] == 1 && view.device == DeviceType::kCPU;
  const auto* first = taken ? static_cast<const std::int64_t*>(view.data) : nullptr;
  if (!taken || *first < 0 || *first >= view.shape[0]) {
    throw Error(Error::Kind::kType,
                "a mask's numbers must be an int64 tensor on the CPU: the length of its program, "
                "the program, its scalars");
  }
  const std::int64_t *program = first + 1, *scalars = program + *first;
  return Mask({program, scalars}, {scalars, first + view.shape[0]},
              tables ? views(*tables) : std::vector<TensorView>());
}

AttentionOptions make_options(Viewer see, const MaybeTensor& bias, const MaybeTensor& key_bias,
                              const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
                              const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                              const MaybeTensor& q_offsets, std::optional<std::int64_t> q_offset,
                              const MaybeTensor& seed, std::optional<double> scale, double softcap,
                              double dropout_p, bool deterministic) {
  auto seen = [&](const MaybeTensor& tensor) { return tensor ? see(*tensor) : TensorView(); };
  AttentionOptions options;
  options.bias = seen(bias);
  options.key_bias = seen(key_bias);
  options.alibi_slopes = seen(alibi_slopes);
  options.sinks = seen(sinks);
  options.cu_seqlens_q = seen(cu_seqlens_q);
  options.cu_seqlens_k = seen(cu_seqlens_k);
  if (q_offsets) options.q_offset = seen(q_offsets);
  if (q_offset) options.q_offset = *q_offset;
  if (seed) {
    TensorView number = see(*seed);
    if (number.dtype != DType::kI64 || number.num_elements() != 1) {
      throw Error(Error::Kind::kType, "seed must be an int or an int64 tensor of one element");
    }
    if (number.device == DeviceType::kCUDA) {
      options.seed_on_gpu = static_cast<const std::int64_t*>(number.data);
    } else {
      options.seed = *static_cast<const std::int64_t*>(number.data);
    }
  }
  if (scale) options.scale = *scale;
  options.softcap = softcap;
  options.dropout_p = dropout_p;
  options.deterministic = deterministic;
  options.num_threads = static_cast<int>(torch::stable::get_num_threads());
  return options;
}

AttentionOptions scale_alone(std::optional<double> scale) {
  AttentionOptions options;
  if (scale) options.scale = *scale;
  options.deterministic = false;
  options.num_threads = static_cast<int>(torch::stable::get_num_threads());
  return options;
}

// q's shape with another last dim.
std::vector<std::int64_t> shape_like(const Tensor& q, std::int64_t last) {
  auto sizes = q.sizes();
  std::vector<std::int64_t> shape(sizes.begin(), sizes.end());
  if (!shape.empty()) shape.back() = last;
  return shape;
}

// [B, Hq, Lq], or [Hq, Tq] of a varlen call.
std::vector<std::int64_t> lse_shape(const Tensor& q) {
  auto s = q.sizes();
  if (s.size() == 4) return {s[0], s[1], s[2]};
  return {s[1], s[0]};
}

// The core checks ranks fully; this much is needed to make the outputs.
void check_ranks(const Tensor& q, const Tensor& v, bool varlen) {
  std::int64_t rank = varlen ? 3 : 4;
  if (q.dim() != rank || v.dim() != rank) {
    throw Error(Error::Kind::kValue,
                std::string("q, k and v must be ") +
                    (varlen ? "[tokens, heads, D] with cu_seqlens" : "[B, H, L, D]") +
                    ", got q with " + std::to_string(q.dim()) + " and v with " +
                    std::to_string(v.dim()) + " dims");
  }
}

// Packed tokens that the core does not touch: on the CPU those behind the last sequence, on a GPU all, if
// there is no sequence.
bool has_tail(const MaybeTensor& cu_seqlens, const Tensor& tokens) {
  if (!cu_seqlens) return false;
  if (cu_seqlens->is_cuda()) return cu_seqlens->size(0) < 2;
  TensorView cu = view(*cu_seqlens);
  if (cu.rank != 1 || cu.dtype != DType::kI32 || cu.shape[0] < 1) return true;  // refused later
  auto last = static_cast<const std::int32_t*>(cu.data)[(cu.shape[0] - 1) * cu.stride[0]];
  return last != tokens.size(0);
}

std::int64_t width_of(const Tensor& t) { return t.size(t.dim() - 1); }

// Without the columns that were added to suit the GPU.
Tensor cut(Tensor padded, std::int64_t width) {
  if (width_of(padded) == width) return padded;
  Tensor exact = empty_in_order(view(padded), width);
  torch::stable::copy_(exact, torch::stable::narrow(padded, padded.dim() - 1, 0, width));
  return exact;
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Mask& mask, AttentionOptions options,
                                   std::optional<double> scale, const MaybeTensor& cu_seqlens_q) {
  const Input q_in(q), k_in(k), v_in(v);
  std::optional<GpuCall> gpu;
  if (q_in.given.device == DeviceType::kCUDA) gpu.emplace(q, options);
  // What was padded does not count.
  if (!scale) options.scale = 1 / std::sqrt(static_cast<double>(q_in.given.size(-1)));
  Tensor out = empty_in_order(q_in.given, v_in.taken.size(-1));
  const bool wide = q_in.given.dtype == DType::kF64;
  Tensor lse = empty(lse_shape(q), wide ? ScalarType::Double : ScalarType::Float, &q);
  if (has_tail(cu_seqlens_q, q)) {
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  }
  jali::attention_forward(q_in.taken, k_in.taken, v_in.taken, mask, options, view(out), view(lse));
  return {cut(std::move(out), v_in.given.size(-1)), std::move(lse)};
}

std::tuple<Tensor, Tensor> attention_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                             JALI_OPTIONS_PARAMETERS, bool expect_backward) {
  check_ranks(q, v, cu_seqlens_q.has_value());
  AttentionOptions options = JALI_OPTIONS;
  options.expect_backward = expect_backward;
  return forward(q, k, v, JALI_MASK, options, scale, cu_seqlens_q);
}

// PERF: attention_forward with a mask and a scale alone, to which 15 arguments less and no lists of numbers are handed
// over.
std::tuple<Tensor, Tensor> masked_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                          const MaybeTensor& mask,
                                          const std::optional<std::vector<Tensor>>& tables,
                                          std::optional<double> scale, bool expect_backward) {
  check_ranks(q, v, false);
  AttentionOptions options = scale_alone(scale);
  options.expect_backward = expect_backward;
  return forward(q, k, v, unpack_mask(mask, tables), options, scale, std::nullopt);
}

Tensor with_contiguous_rows(const Tensor& tensor) {
  bool dense = tensor.size(tensor.dim() - 1) <= 1 || tensor.stride(tensor.dim() - 1) == 1;
  return dense ? tensor : torch::stable::contiguous(tensor);
}

MaybeTensor gradient_of(const MaybeTensor& input, bool needed) {
  if (!input || !needed) return std::nullopt;
  auto sizes = input->sizes();
  return empty({sizes.begin(), sizes.end()}, input->scalar_type(), &*input);
}
void clear(MaybeTensor& tensor) {
  if (tensor) torch::stable::zero_(*tensor);
}

// Of which inputs beside q, k and v gradients are wanted.
struct Wanted {
  const MaybeTensor &bias, &key_bias, &sinks;
  bool need_bias, need_key_bias, need_sinks;
};

Grads backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& lse, const Tensor& dout, const MaybeTensor& dlse, const Mask& mask,
               AttentionOptions options, std::optional<double> scale,
               const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
               const Wanted& wanted, bool gradients_together) {
  const Tensor dout_rows = with_contiguous_rows(dout);
  const Input q_in(q), k_in(k), v_in(v), out_in(out), dout_in(dout_rows);
  std::optional<GpuCall> gpu;
  if (q_in.given.device == DeviceType::kCUDA) gpu.emplace(q, options);
  if (!scale) options.scale = 1 / std::sqrt(static_cast<double>(q_in.given.size(-1)));
  const auto width = [](const Input& input) { return input.taken.size(-1); };
  auto [dq, dk, dv] = three_in_order({&q_in.given, &k_in.given, &v_in.given},
                                     {width(q_in), width(k_in), width(v_in)}, gradients_together);
  MaybeTensor dbias = gradient_of(wanted.bias, wanted.need_bias);
  MaybeTensor dkey_bias = gradient_of(wanted.key_bias, wanted.need_key_bias);
  MaybeTensor dsinks = gradient_of(wanted.sinks, wanted.need_sinks);
  if (has_tail(cu_seqlens_q, q)) torch::stable::zero_(dq);
  if (has_tail(cu_seqlens_k, k)) {
    torch::stable::zero_(dk);
    torch::stable::zero_(dv);
    clear(dkey_bias);
  }
  if (gpu) {  // what no kernel visits
    const bool no_sequence = cu_seqlens_q && cu_seqlens_q->size(0) < 2;
    const bool nothing = no_sequence || k.size(cu_seqlens_k ? 0 : 2) == 0 || q.size(0) == 0;
    if (nothing || cu_seqlens_q) clear(dbias);
    if (nothing || cu_seqlens_k) clear(dkey_bias);
    if (nothing) clear(dsinks);
  }
  const AttentionGrads grads{view(dq),    view(dk),        view(dv),
                             view(dbias), view(dkey_bias), view(dsinks)};
  jali::attention_backward(q_in.taken, k_in.taken, v_in.taken, out_in.taken, view(lse),
                           dout_in.taken, view(dlse), mask, options, grads);
  std::vector<Tensor> others;
  for (const MaybeTensor* given : {&dbias, &dkey_bias, &dsinks}) {
    if (*given) others.push_back(**given);
  }
  return {cut(std::move(dq), q_in.given.size(-1)), cut(std::move(dk), k_in.given.size(-1)),
          cut(std::move(dv), v_in.given.size(-1)), std::move(others)};
}

Grads attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                         const Tensor& lse, const Tensor& dout, const MaybeTensor& dlse,
                         JALI_OPTIONS_PARAMETERS, bool need_bias, bool need_key_bias,
                         bool need_sinks, bool gradients_together) {
  check_ranks(q, v, cu_seqlens_q.has_value());
  const Wanted wanted{bias, key_bias, sinks, need_bias, need_key_bias, need_sinks};
  return backward(q, k, v, out, lse, dout, dlse, JALI_MASK, JALI_OPTIONS, scale, cu_seqlens_q,
                  cu_seqlens_k, wanted, gradients_together);
}

// PERF: see masked_forward. The gradients may share a storage.
std::tuple<Tensor, Tensor, Tensor> masked_backward(const Tensor& q, const Tensor& k,
                                                   const Tensor& v, const Tensor& out,
                                                   const Tensor& lse, const Tensor& dout,
                                                   const MaybeTensor& dlse, const MaybeTensor& mask,
                                                   const std::optional<std::vector<Tensor>>& tables,
                                                   std::optional<double> scale) {
  check_ranks(q, v, false);
  const MaybeTensor none;
  auto [dq, dk, dv, others] =
      backward(q, k, v, out, lse, dout, dlse, unpack_mask(mask, tables), scale_alone(scale), scale,
               none, none, {none, none, none, false, false, false}, true);
  return {std::move(dq), std::move(dk), std::move(dv)};
}

// Of each module: name, compiler's log, bytes, whether it was compiled now, each ended by a zero. Texts
// travel as their bytes.
std::vector<std::int64_t> prebuild(const Tensor& q, const Tensor& k, const Tensor& v,
                                   JALI_OPTIONS_PARAMETERS, bool backward, bool need_bias,
                                   bool need_key_bias, std::vector<std::int64_t> arch) {
  check_ranks(q, v, cu_seqlens_q.has_value());
  AttentionOptions options = JALI_OPTIONS_SEEN(&view_as_if_on_gpu);
  if (!scale) options.scale = 1 / std::sqrt(static_cast<double>(width_of(q)));
  AttentionGrads grads;  // as gradient_of would make them
  if (need_bias) grads.dbias = with_dense_strides(options.bias);
  if (need_key_bias) grads.dkey_bias = with_dense_strides(options.key_bias);
  const std::vector<BuiltModule> built = jali::prebuild(
      view_suited_to_gpu(q), view_suited_to_gpu(k), view_suited_to_gpu(v),
      JALI_MASK_SEEN(&view_as_if_on_gpu), options, backward, grads, {arch.begin(), arch.end()});
  std::vector<std::int64_t> text;
  for (const BuiltModule& module : built) {
    for (const std::string& field : {module.name, module.log, std::to_string(module.bytes),
                                     std::string(module.compiled ? "1" : "0")}) {
      text.insert(text.end(), field.begin(), field.end());
      text.push_back(0);
    }
  }
  return text;
}

// (out, lse, dq, dk, dv, dbias, dkey_bias, dsinks), fp64; gradients are [0] without dout.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_truth(
    const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& dout,
    const MaybeTensor& dlse, JALI_OPTIONS_PARAMETERS) {
  check_ranks(q, v, cu_seqlens_q.has_value());
  AttentionOptions options = JALI_OPTIONS;
  constexpr ScalarType f64 = ScalarType::Double;
  auto like = [&](const MaybeTensor& input) {
    if (!dout || !input) return empty({0}, f64);
    auto sizes = input->sizes();
    return empty({sizes.begin(), sizes.end()}, f64);
  };
  Tensor out = empty(shape_like(q, v.size(v.dim() - 1)), f64);
  Tensor lse = empty(lse_shape(q), f64);
  Tensor dq = like(q), dk = like(k), dv = like(v);
  Tensor dbias = like(bias), dkey_bias = like(key_bias), dsinks = like(sinks);
  AttentionGrads grads;
  if (dout) grads = {view(dq), view(dk), view(dv), {}, {}, {}};
  if (dout && bias) grads.dbias = view(dbias);
  if (dout && key_bias) grads.dkey_bias = view(dkey_bias);
  if (dout && sinks) grads.dsinks = view(dsinks);
  jali::attention_truth(view(q), view(k), view(v), JALI_MASK, options, view(out), view(lse),
                        view(dout), view(dlse), grads);
  return {out, lse, dq, dk, dv, dbias, dkey_bias, dsinks};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(jali, m) {
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " JALI_OPTIONS_SCHEMA
        ", bool expect_backward=False) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, "
      "Tensor? dlse, " JALI_OPTIONS_SCHEMA
      ", bool need_bias=False, bool need_key_bias=False, bool need_sinks=False, "
      "bool gradients_together=False) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] others)");
  m.def(
      "masked_forward(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[]? tables, float? scale, "
      "bool expect_backward) -> (Tensor out, Tensor lse)");
  m.def(
      "masked_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, "
      "Tensor? dlse, Tensor? mask, Tensor[]? tables, float? scale) -> (Tensor dq, Tensor dk, "
      "Tensor dv)");
  m.def(
      "attention_truth(Tensor q, Tensor k, Tensor v, Tensor? dout, Tensor? "
      "dlse, " JALI_OPTIONS_SCHEMA
      ") -> (Tensor out, Tensor lse, Tensor dq, Tensor dk, Tensor dv, Tensor dbias, "
      "Tensor dkey_bias, Tensor dsinks)");
  m.def("prebuild(Tensor q, Tensor k, Tensor v, " JALI_OPTIONS_SCHEMA
        ", *, bool backward, bool need_bias=False, bool need_key_bias=False, int[] arch) -> int[]");
}

// Reads no memory: tensors may be anywhere.
STABLE_TORCH_LIBRARY_IMPL(jali, CompositeExplicitAutograd, m) {
  m.impl("prebuild", JALI_KERNEL(prebuild));
}

STABLE_TORCH_LIBRARY_IMPL(jali, CPU, m) {
  m.impl("attention_forward", JALI_KERNEL(attention_forward));
  m.impl("attention_backward", JALI_KERNEL(attention_backward));
  m.impl("masked_forward", JALI_KERNEL(masked_forward));
  m.impl("masked_backward", JALI_KERNEL(masked_backward));
  m.impl("attention_truth", JALI_KERNEL(attention_truth));
}

// The core chooses the backend by the device of the tensors; the truth refuses GPUs.
STABLE_TORCH_LIBRARY_IMPL(jali, CUDA, m) {
  m.impl("attention_forward", JALI_KERNEL(attention_forward));
  m.impl("attention_backward", JALI_KERNEL(attention_backward));
  m.impl("masked_forward", JALI_KERNEL(masked_forward));
  m.impl("masked_backward", JALI_KERNEL(masked_backward));
  m.impl("attention_truth", JALI_KERNEL(attention_truth));
}

}  // namespace jali::binding
