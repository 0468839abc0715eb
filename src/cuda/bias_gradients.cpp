#include "cuda/bias_gradients.h"

#include "cuda/score_arguments.h"

namespace jali::cuda {
namespace {

constexpr int kThreads = 256;

bool over_rows(const CellView& bias) { return bias.given() && bias.stride_j == 0; }
bool over_keys(const CellView& bias) {
  return bias.given() && bias.stride_j != 0 && bias.stride_i == 0;
}
bool over_cells(const CellView& bias) {
  return bias.given() && bias.stride_j != 0 && bias.stride_i != 0;
}

/// The sequences and heads of a bias.
i32 num_b(const AttentionProblem& p, i64 stride_b) { return stride_b ? p.B : 1; }
i64 num_cells(const AttentionProblem& p, const CellView& d) {
  return i64{num_b(p, d.stride_b)} * (p.Hq / d.head_div) * d.num_rows * d.num_keys;
}

}  // namespace

BiasGradients bias_gradients(const AttentionProblem& p, const BackwardViews& grads) {
  const CellView& d = grads.dbias;
  BiasGradients wanted;
  if (over_cells(d)) {
    const bool alone = (d.stride_b != 0 || p.B == 1) && d.head_div == 1;
    wanted.cells = !alone                   ? CellGradient::kAdd
                   : d.dtype == DType::kF32 ? CellGradient::kFloat
                   : in_groups(d, 4)        ? CellGradient::kFours
                   : in_groups(d, 2)        ? CellGradient::kPairs
                                            : CellGradient::kHalf;
  }
  wanted.keys = over_keys(d) || grads.dkey_bias.given();
  wanted.rows = over_rows(d);
  return wanted;
}

std::string text_of(const BiasGradients& wanted) {
  auto flag = [](bool x) { return x ? "true" : "false"; };
  return "BiasGradients{CellGradient(" + std::to_string(static_cast<int>(wanted.cells)) + "), " +
         flag(wanted.keys) + ", " + flag(wanted.rows) + "}";
}

// One block has a tile of keys of one KV head: only other KV heads and sequences are other blocks'.
bool cells_in_order(const AttentionProblem& p, const BackwardViews& grads) {
  const CellView& d = grads.dbias;
  return !over_cells(d) || ((d.stride_b != 0 || p.B == 1) && d.head_div <= p.Hq / p.Hkv);
}

std::string bias_gradient_kernels(const std::string& type) {
  return R"(
extern "C" __global__ void __launch_bounds__(256)
    sum_tokens(const __grid_constant__ TokenGradient a) {
  tile::sum_tokens<)" +
         type + R"(>(a);
}
extern "C" __global__ void __launch_bounds__(256)
    write_cells(const __grid_constant__ CellGradients a) {
  tile::write_cells<)" +
         type + R"(>(a);
}
)";
}

BiasGradientSums::BiasGradientSums(Call& call, const BackwardViews& grads, BackwardArgs& a)
    : call_(call), p_(call.problem()), grads_(grads), wanted_(bias_gradients(p_, grads)), a_(a) {
  auto floats = [&](i64 count) {
    return static_cast<float*>(call.allocate(count * static_cast<i64>(sizeof(float))));
  };
  const CellView& d = grads.dbias;
  const i32 group = p_.Hq / p_.Hkv;
  if (wanted_.cells != CellGradient::kNone) {
    a.dbias = {d.data,     d.stride_b, d.stride_h, d.stride_i,
               d.stride_j, d.head_div, d.num_rows, d.num_keys};
  }
  if (wanted_.cells == CellGradient::kAdd) {
    const i64 area = i64{d.num_rows} * d.num_keys;
    a.dbias.data = floats(num_cells(p_, d));
    a.dbias.stride_b = d.stride_b ? p_.Hq / d.head_div * area : 0;
    a.dbias.stride_h = area;
    a.dbias.stride_q = d.num_keys;
    a.dbias.stride_k = 1;
  }
  if (wanted_.keys) {
    // A block sums the query heads of its KV head, unless one gradient has them apart.
    const bool apart = (over_keys(d) && d.head_div < group) ||
                       (grads.dkey_bias.given() && grads.dkey_bias.head_div < group);
    a.key_sums.head_div = apart ? 1 : group;
    a.key_sums.tokens = p_.varlen ? p_.Tk : i64{p_.B} * p_.Lk;
    a.key_sums.data = floats(p_.Hq / a.key_sums.head_div * a.key_sums.tokens);
  }
  if (wanted_.rows) {
    a.row_sums.tokens = p_.varlen ? p_.Tq : i64{p_.B} * p_.Lq;
    a.row_sums.data = floats(p_.Hq * a.row_sums.tokens);
  }
  if (grads.dsinks.given()) a.sink_sums = floats(a.row_order().total());
}

void BiasGradientSums::begin(const KernelText& module) const {
  constexpr i64 kBytes = sizeof(float);
  if (wanted_.keys) {
    call_.clear(a_.key_sums.data, kBytes * (p_.Hq / a_.key_sums.head_div) * a_.key_sums.tokens);
  }
  if (wanted_.cells == CellGradient::kAdd) {
    call_.clear(a_.dbias.data, kBytes * num_cells(p_, grads_.dbias));
  } else if (wanted_.cells != CellGradient::kNone && !visits_all()) {
    write_cells(module, nullptr);
  }
}

bool BiasGradientSums::visits_all() const {
  const CellView& d = grads_.dbias;
  return p_.mask->trivial() && !p_.varlen && d.num_rows == p_.Lq && d.num_keys == p_.Lk;
}

void BiasGradientSums::finish(const KernelText& module) const {
  const CellView& d = grads_.dbias;
  if (wanted_.cells == CellGradient::kAdd) {
    write_cells(module, static_cast<const float*>(a_.dbias.data));
  }
  if (over_keys(d) || over_rows(d)) {
    const bool keys = over_keys(d);
    HeadView to;
    to.data = d.data;
    to.dtype = d.dtype;
    to.stride_b = d.stride_b;
    to.stride_h = d.stride_h;
    to.stride_l = keys ? d.stride_j : d.stride_i;
    to.head_div = d.head_div;
    TokenGradient g = token_gradient(keys ? a_.key_sums : a_.row_sums, to, num_b(p_, d.stride_b),
                                     keys ? d.num_keys : d.num_rows);
    g.B = p_.B;
    g.length = keys ? p_.Lk : p_.Lq;
    g.stride = g.length;
    g.cu = keys ? a_.seq.cu_k : a_.seq.cu_q;
    g.all_tokens = !keys && d.stride_i == 0;
    sum(module, g);
  }
  if (grads_.dkey_bias.given()) {
    const HeadView& to = grads_.dkey_bias;
    const i32 keys = static_cast<i32>(p_.varlen ? p_.Tk : p_.Lk);
    // Packed, it has the layout of the sums: one sequence of all tokens.
    TokenGradient g = token_gradient(a_.key_sums, to, p_.varlen ? 1 : num_b(p_, to.stride_b), keys);
    g.B = p_.varlen ? 1 : p_.B;
    g.length = keys;
    g.stride = keys;
    sum(module, g);
  }
  if (grads_.dsinks.given()) {
    const i32 parts = a_.row_parts / a_.seq.group;  // "tokens" of a head of one sequence
    TokenGradient g = token_gradient({a_.sink_sums, parts, 1}, grads_.dsinks, 1, 1);
    g.B = p_.varlen ? 1 : p_.B;
    g.length = parts;
    g.stride = i64{parts} * p_.Hq;
    g.all_tokens = true;
    sum(module, g);
  }
}

TokenGradient BiasGradientSums::token_gradient(const TokenSums& sums, const HeadView& to, i32 num_b,
                                               i32 num_l) const {
  TokenGradient g;
  g.sums = sums;
  g.to = to.data;
  g.is_float = to.dtype == DType::kF32;
  g.strides = {to.stride_b, to.stride_h, to.stride_l};
  g.num_b = num_b;
  g.num_h = p_.Hq / to.head_div;
  g.num_l = num_l;
  g.joined = to.head_div / sums.head_div;
  return g;
}

void BiasGradientSums::sum(const KernelText& module, const TokenGradient& gradient) const {
  const i64 elements = gradient.elements();
  if (elements == 0) return;
  call_.launch(call_.kernel(module, "sum_tokens", 0),
               gradient.all_tokens ? elements : ceil_div<i64>(elements, kThreads), kThreads, 0,
               {&gradient});
}

void BiasGradientSums::write_cells(const KernelText& module, const float* sums) const {
  const CellView& d = grads_.dbias;
  CellGradients g;
  g.sums = sums;
  g.to = d.data;
  g.is_float = d.dtype == DType::kF32;
  g.strides = {d.stride_b, d.stride_h, d.stride_i};
  g.stride_k = d.stride_j;
  g.num_h = p_.Hq / d.head_div;
  g.num_q = d.num_rows;
  g.num_k = d.num_keys;
  const i64 rows = i64{num_b(p_, d.stride_b)} * g.num_h * g.num_q;
  if (rows == 0 || g.num_k == 0) return;
  call_.launch(call_.kernel(module, "write_cells", 0), rows, kThreads, 0, {&g});
}

}  // namespace jali::cuda
