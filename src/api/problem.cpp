#include "api/problem.h"

#include <cmath>

#include "base/error.h"
#include "base/tensor.h"

namespace jali {
namespace {

constexpr i64 kMaxHeadDim = 1024;
// How long documents must be on average so that tiles of their own pay, without and with a backward, which
// has scratch for up to 64 rows more of each, too. PERF: forward of causal documents that tiles fit, H16
// D128 2 x 8K: of 32 tokens 192 us, looked up by cells 120; 64 114, 113; 128 81, 106; 256 82, 101. Backward:
// 64 491, 409; 128 430, 412; 256 405, 422; of 100, which fit no tile, 500, 426; 200 472, 424.
constexpr i64 kLeastMeanDocument = 64, kLeastMeanDocumentBackward = 256;

bool is_float(DType t) {
  return t == DType::kF64 || t == DType::kF32 || t == DType::kBF16 || t == DType::kF16;
}

void check_range(const char* name, i64 n, i64 low, i64 high) {
  if (n < low || n > high) {
    value_error(name, " = ", n, "; expected ", low, " to ", high);
  }
}

}  // namespace

std::optional<TokenTable<i32>> take_documents(BoundMask& mask, bool backward) {
  const Shape& s = mask.shape();
  const bool at_zero = s.q_offset.tag == IntParam::Tag::kAbsent ||
                       (s.q_offset.tag == IntParam::Tag::kNumber && s.q_offset.number == 0);
  if (s.cu_seqlens_q.given() || s.Lq != s.Lk || !at_zero) return {};
  return mask.take_documents(s.Lk / (backward ? kLeastMeanDocumentBackward : kLeastMeanDocument));
}

CheckedProblem::CheckedProblem(const TensorView& q, const TensorView& k, const TensorView& v,
                               const Mask& mask, const AttentionOptions& options, bool backward)
    : q_(q), k_(k), v_(v), options_(options) {
  AttentionProblem& p = problem_;
  p.varlen = options.cu_seqlens_q.given() || options.cu_seqlens_k.given();
  const char* want = p.varlen ? "[tokens, heads, dim]" : "[B, heads, L, dim]";
  const TensorView* inputs[] = {&q, &k, &v};
  const char* names[] = {"q", "k", "v"};
  for (int n = 0; n < 3; ++n) {
    const TensorView& t = *inputs[n];
    if (t.rank != (p.varlen ? 3 : 4)) {
      value_error(names[n], " has shape ", shape_text(t), "; expected ", want,
                  p.varlen ? " (varlen)" : "");
    }
    if (!is_float(t.dtype)) {
      type_error(names[n], " has dtype ", dtype_name(t.dtype),
                 "; expected float64, float32, bfloat16 or float16");
    }
    if (t.dtype != q.dtype) {
      type_error(names[n], " has dtype ", dtype_name(t.dtype), " but q has ", dtype_name(q.dtype),
                 "; convert them to one dtype");
    }
    if (t.device != q.device || t.device_index != q.device_index) {
      type_error(names[n], " is on another device than q; move them to one device");
    }
  }
  const int heads = 1, tokens = p.varlen ? 0 : 2;
  p.dtype = q.dtype;
  check_range("Hq", q.shape[heads], 1, kMaxLength);
  check_range("Hkv", k.shape[heads], 1, kMaxLength);
  check_range("D", q.size(-1), 1, kMaxHeadDim);
  check_range("Dv", v.size(-1), 1, kMaxHeadDim);
  if (q.shape[heads] % k.shape[heads] != 0) {
    value_error("q has ", q.shape[heads], " heads and k has ", k.shape[heads],
                "; the heads of k must divide those of q");
  }
  if (v.shape[heads] != k.shape[heads] || v.shape[tokens] != k.shape[tokens]) {
    value_error("k is ", shape_text(k), " but v is ", shape_text(v),
                "; all but the last dim must agree");
  }
  if (k.size(-1) != q.size(-1)) {
    value_error("q has head dim ", q.size(-1), " but k has ", k.size(-1), "; they must be equal");
  }
  if (!p.varlen && (k.shape[0] != q.shape[0] || v.shape[0] != q.shape[0])) {
    value_error("q is ", shape_text(q), ", k ", shape_text(k), ", v ", shape_text(v),
                "; the batch dims must agree");
  }
  p.Hq = static_cast<i32>(q.shape[heads]);
  p.Hkv = static_cast<i32>(k.shape[heads]);
  p.D = static_cast<i32>(q.size(-1));
  p.Dv = static_cast<i32>(v.size(-1));

  Shape shape;
  shape.Hq = p.Hq;
  shape.Hkv = p.Hkv;
  shape.q_offset = options.q_offset;
  shape.device = p.device = q.device;
  shape.device_index = p.device_index = q.device_index;
  if (p.varlen) {
    shape.B = options.cu_seqlens_q.rank == 1 ? options.cu_seqlens_q.shape[0] - 1 : 0;
    shape.cu_seqlens_q = options.cu_seqlens_q;
    shape.cu_seqlens_k = options.cu_seqlens_k;
    p.Tq = shape.Tq = q.shape[0];
    p.Tk = shape.Tk = k.shape[0];
  } else {
    shape.B = q.shape[0];
    shape.Lq = q.shape[2];
    shape.Lk = k.shape[2];
  }
  check_range("B", shape.B, 0, kMaxLength);
  mask_ = std::make_unique<BoundMask>(mask, shape);
  const bool no_cells = p.varlen ? p.Tq == 0 || p.Tk == 0 : shape.Lq == 0 || shape.Lk == 0;
  // NOTE: a table without elements has no address that a GPU could read; here no mask matters.
  if (no_cells && mask_->on_gpu()) mask_ = std::make_unique<BoundMask>(Mask(), shape);
  p.mask = mask_.get();
  p.B = static_cast<i32>(shape.B);
  p.Lq = mask_->longest_rows();
  p.Lk = mask_->longest_keys();
  // One tile row alone reads each table once anyway.
  if (p.Lq > kSummary && !mask_->on_gpu()) mask_->summarize();
  if (p.varlen && !mask_->on_gpu()) {
    const Frame last = shape.B > 0 ? mask_->frame(p.B - 1, 0) : Frame{};
    if (last.q_start + last.num_rows > p.Tq || last.k_start + last.num_keys > p.Tk) {
      value_error("cu_seqlens end at ", last.q_start + last.num_rows, " and ",
                  last.k_start + last.num_keys, " but q has ", p.Tq, " tokens and k has ", p.Tk);
    }
  }

  p.scale = std::isnan(options.scale) ? 1.0 / std::sqrt(static_cast<double>(p.D)) : options.scale;
  if (!std::isfinite(p.scale)) value_error("scale = ", p.scale, "; expected a finite number");
  if (!(options.softcap >= 0) || !std::isfinite(options.softcap)) {
    value_error("softcap = ", options.softcap, "; expected 0 (off) or a positive number");
  }
  if (!(options.dropout_p >= 0 && options.dropout_p <= 1)) {
    value_error("dropout_p = ", options.dropout_p, "; expected 0 to 1");
  }
  p.softcap = options.softcap;
  p.dropout_p = options.dropout_p;
  p.seed = static_cast<u64>(options.seed);
  p.deterministic = options.deterministic;
  p.num_threads = options.num_threads;
  p.stream = options.stream;
  p.seed_on_gpu = reinterpret_cast<const i64*>(options.seed_on_gpu);
  p.allocate = options.allocate;
  p.allocate_context = options.allocate_context;
  p.expect_backward = options.expect_backward;
  p.q = tokens_view("q", q, p.Hq, p.varlen ? p.Tq : p.Lq, p.D, p.dtype);
  p.k = tokens_view("k", k, p.Hkv, p.varlen ? p.Tk : p.Lk, p.D, p.dtype);
  p.v = tokens_view("v", v, p.Hkv, p.varlen ? p.Tk : p.Lk, p.Dv, p.dtype);
  p.bias = bias_view("bias", options.bias);
  p.key_bias = key_bias_view("key_bias", options.key_bias);
  p.sinks = sinks_view("sinks", options.sinks);
  const TensorView& slopes = options.alibi_slopes;
  if (slopes.given()) {
    check_place("alibi_slopes", slopes);
    if (slopes.dtype != DType::kF32 || slopes.rank != 1 || slopes.shape[0] != p.Hq ||
        (slopes.stride[0] != 1 && p.Hq > 1)) {
      value_error("alibi_slopes is ", dtype_name(slopes.dtype), " ", shape_text(slopes),
                  "; expected contiguous float32 [Hq = ", p.Hq, "]");
    }
    p.alibi_slopes = data_of<const float>(slopes);
  }
  // Kernels read a bias over rows and keys, and draw dropout, by places in the sequence.
  const bool by_place = p.bias.given() || p.dropout_p > 0;
  if (mask_->on_gpu()) p.forced_source = forced_source();
  if (mask_->on_gpu() && !by_place && !p.forces_map()) {
    p.documents = take_documents(*mask_, backward || options.expect_backward);
  }
}

void CheckedProblem::check_place(const char* name, const TensorView& t) const {
  if (t.device != q_.device || t.device_index != q_.device_index) {
    type_error(name, " is on another device than q; move it to q's device");
  }
}

void CheckedProblem::check_bias_dtype(const char* name, const TensorView& t) const {
  check_place(name, t);
  if (t.dtype != problem_.dtype && t.dtype != DType::kF32) {
    type_error(name, " has dtype ", dtype_name(t.dtype), "; expected q's ",
               dtype_name(problem_.dtype), " or float32");
  }
}

i32 CheckedProblem::head_divisor(const char* name, const TensorView& t, i64 heads) const {
  if (heads != 1 && heads != problem_.Hkv && heads != problem_.Hq) {
    value_error(name, " ", shape_text(t), " has ", heads,
                " heads; expected 1, Hkv = ", problem_.Hkv, " or Hq = ", problem_.Hq);
  }
  return static_cast<i32>(problem_.Hq / heads);
}

HeadView CheckedProblem::tokens_view(const char* name, const TensorView& t, i64 heads, i64 tokens,
                                     i64 width, DType dtype) const {
  const AttentionProblem& p = problem_;
  check_place(name, t);
  if (t.dtype != dtype) {
    type_error(name, " has dtype ", dtype_name(t.dtype), "; expected ", dtype_name(dtype));
  }
  const bool shaped =
      p.varlen ? t.rank == 3 && t.shape[0] == tokens && t.shape[1] == heads && t.shape[2] == width
               : t.rank == 4 && t.shape[0] == p.B && t.shape[1] == heads && t.shape[2] == tokens &&
                     t.shape[3] == width;
  if (!shaped) {
    if (p.varlen) {
      value_error(name, " is ", shape_text(t), "; expected [", tokens, ", ", heads, ", ", width,
                  "]");
    }
    value_error(name, " is ", shape_text(t), "; expected [", p.B, ", ", heads, ", ", tokens, ", ",
                width, "]");
  }
  const int last = t.rank - 1;
  if (t.stride[last] != 1 && t.shape[last] > 1 && t.num_elements() > 0) {
    value_error(name, " has stride ", t.stride[last],
                " in its last dim; expected 1: call .contiguous() on it");
  }
  HeadView view;
  view.data = t.data;
  view.dtype = t.dtype;
  view.stride_b = p.varlen ? 0 : t.stride[0];
  view.stride_h = t.stride[1];
  view.stride_l = t.stride[p.varlen ? 0 : 2];
  view.head_div = static_cast<i32>(p.Hq / heads);
  return view;
}

HeadView CheckedProblem::output_view(const char* name, const TensorView& t, i32 width) const {
  return tokens_view(name, t, problem_.Hq, problem_.varlen ? problem_.Tq : problem_.Lq, width,
                     problem_.dtype);
}

HeadView CheckedProblem::lse_view(const char* name, const TensorView& t) const {
  const AttentionProblem& p = problem_;
  HeadView view;
  if (!t.given()) return view;
  check_place(name, t);
  const DType dtype = p.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (t.dtype != dtype) {
    type_error(name, " has dtype ", dtype_name(t.dtype), "; expected ", dtype_name(dtype));
  }
  const bool shaped =
      p.varlen ? t.rank == 2 && t.shape[0] == p.Hq && t.shape[1] == p.Tq
               : t.rank == 3 && t.shape[0] == p.B && t.shape[1] == p.Hq && t.shape[2] == p.Lq;
  if (!shaped) {
    value_error(name, " is ", shape_text(t), "; expected ",
                p.varlen ? "[Hq, tokens of q]" : "[B, Hq, Lq]");
  }
  view.data = t.data;
  view.dtype = t.dtype;
  view.stride_b = p.varlen ? 0 : t.stride[0];
  view.stride_h = t.stride[p.varlen ? 0 : 1];
  view.stride_l = t.stride[p.varlen ? 1 : 2];
  return view;
}

CellView CheckedProblem::bias_view(const char* name, const TensorView& t) const {
  const AttentionProblem& p = problem_;
  CellView view;
  if (!t.given()) return view;
  check_bias_dtype(name, t);
  const i64 want[4] = {p.B, 0, p.Lq, p.Lk};
  bool shaped = t.rank == 4;
  for (int dim : {0, 2, 3}) {
    // A padded bias of a varlen call may be longer than the longest sequence, whose length is not
    // known on a GPU.
    const bool padded =
        p.varlen && dim > 0 && (t.shape[dim] > want[dim] || p.device == DeviceType::kCUDA);
    shaped = shaped && (t.shape[dim] == 1 || t.shape[dim] == want[dim] || padded);
  }
  if (!shaped) {
    value_error(name, " is ", shape_text(t), "; expected [1 or ", p.B, ", 1, Hkv or Hq, 1 or ",
                p.Lq, ", 1 or ", p.Lk, "]");
  }
  view.data = t.data;
  view.dtype = t.dtype;
  view.head_div = head_divisor(name, t, t.shape[1]);
  view.stride_b = t.shape[0] > 1 ? t.stride[0] : 0;
  view.stride_h = t.shape[1] > 1 ? t.stride[1] : 0;
  view.stride_i = t.shape[2] > 1 ? t.stride[2] : 0;
  view.stride_j = t.shape[3] > 1 ? t.stride[3] : 0;
  view.num_rows = static_cast<i32>(t.shape[2]);
  view.num_keys = static_cast<i32>(t.shape[3]);
  return view;
}

HeadView CheckedProblem::key_bias_view(const char* name, const TensorView& t) const {
  const AttentionProblem& p = problem_;
  HeadView view;
  if (!t.given()) return view;
  check_bias_dtype(name, t);
  const i64 tokens = p.varlen ? p.Tk : p.Lk;
  const int head_dim = p.varlen ? 0 : 1;
  const bool shaped = t.rank == (p.varlen ? 2 : 3) && t.size(-1) == tokens &&
                      (p.varlen || t.shape[0] == 1 || t.shape[0] == p.B);
  if (!shaped) {
    value_error(name, " is ", shape_text(t), "; expected ",
                p.varlen ? "[1, Hkv or Hq, tokens of k = " : "[1 or B, 1, Hkv or Hq, Lk = ", tokens,
                "]");
  }
  view.data = t.data;
  view.dtype = t.dtype;
  view.head_div = head_divisor(name, t, t.shape[head_dim]);
  view.stride_b = !p.varlen && t.shape[0] > 1 ? t.stride[0] : 0;
  view.stride_h = t.shape[head_dim] > 1 ? t.stride[head_dim] : 0;
  view.stride_l = t.stride[t.rank - 1];
  return view;
}

HeadView CheckedProblem::sinks_view(const char* name, const TensorView& t) const {
  HeadView view;
  if (!t.given()) return view;
  check_bias_dtype(name, t);
  if (t.rank != 1 || t.shape[0] != problem_.Hq) {
    value_error(name, " is ", shape_text(t), "; expected [Hq = ", problem_.Hq, "]");
  }
  view.data = t.data;
  view.dtype = t.dtype;
  view.stride_h = t.stride[0];
  return view;
}

void CheckedProblem::check_like(const char* name, const TensorView& grad,
                                const TensorView& of) const {
  bool same = of.given() && grad.rank == of.rank && grad.dtype == of.dtype;
  for (int dim = 0; same && dim < grad.rank; ++dim) same = grad.shape[dim] == of.shape[dim];
  if (!same) {
    value_error(name, " is ", dtype_name(grad.dtype), " ", shape_text(grad),
                "; expected its input's ",
                of.given() ? std::string(dtype_name(of.dtype)) + " " + shape_text(of)
                           : "shape, but that input is absent");
  }
}

BackwardViews CheckedProblem::grad_views(const AttentionGrads& grads) const {
  const AttentionProblem& p = problem_;
  BackwardViews views = bias_grad_views(grads);
  const i64 rows = p.varlen ? p.Tq : p.Lq, keys = p.varlen ? p.Tk : p.Lk;
  views.dq = tokens_view("dq", grads.dq, p.Hq, rows, p.D, p.dtype);
  views.dk = tokens_view("dk", grads.dk, p.Hkv, keys, p.D, p.dtype);
  views.dv = tokens_view("dv", grads.dv, p.Hkv, keys, p.Dv, p.dtype);
  return views;
}

BackwardViews CheckedProblem::bias_grad_views(const AttentionGrads& grads) const {
  BackwardViews views;
  if (grads.dbias.given()) {
    check_like("dbias", grads.dbias, options_.bias);
    views.dbias = bias_view("dbias", grads.dbias);
  }
  if (grads.dkey_bias.given()) {
    check_like("dkey_bias", grads.dkey_bias, options_.key_bias);
    views.dkey_bias = key_bias_view("dkey_bias", grads.dkey_bias);
  }
  if (grads.dsinks.given()) {
    check_like("dsinks", grads.dsinks, options_.sinks);
    views.dsinks = sinks_view("dsinks", grads.dsinks);
  }
  return views;
}

}  // namespace jali
