#include "cuda/score_arguments.h"

#include <bit>
#include <cmath>

#include "base/error.h"

namespace jali::cuda {
namespace {

BiasType type_of(DType dtype, bool given) {
  if (!given) return BiasType::kNone;
  return dtype == DType::kF32 ? BiasType::kFloat : BiasType::kHalf;
}

}  // namespace

bool in_groups(const CellView& cells, i64 count) {
  const i64 bytes = count * (cells.dtype == DType::kF32 ? 4 : 2);
  const bool strides =
      cells.stride_b % count == 0 && cells.stride_h % count == 0 && cells.stride_i % count == 0;
  return cells.given() && cells.stride_j == 1 && cells.num_keys % count == 0 && strides &&
         reinterpret_cast<u64>(cells.data) % bytes == 0;
}

ScoreOptions score_options(const AttentionProblem& p) {
  ScoreOptions o;
  o.any_scale = !(p.scale > 1e-20);  // kernels divide by others
  o.softcap = p.softcap > 0;
  o.bias = type_of(p.bias.dtype, p.bias.given());
  o.bias_pairs = in_groups(p.bias, 2);
  o.bias_eights = o.bias == BiasType::kHalf && in_groups(p.bias, 8);
  o.key_bias = type_of(p.key_bias.dtype, p.key_bias.given());
  o.alibi = p.alibi_slopes != nullptr;
  o.sinks = p.sinks.given();
  o.dropout = p.dropout_p > 0;
  o.keeps = o.dropout && DropoutRule(dropout_threshold(p.dropout_p)).keeps;
  return o;
}

std::string text_of(const ScoreOptions& o) {
  auto flag = [](bool x) { return x ? "true" : "false"; };
  auto type = [](BiasType t) { return "BiasType(" + std::to_string(static_cast<int>(t)) + ")"; };
  std::string text;
  text.reserve(128);
  text.append("ScoreOptions{").append(flag(o.any_scale)).append(", ").append(flag(o.softcap));
  text.append(", ").append(type(o.bias)).append(", ").append(flag(o.bias_pairs));
  text.append(", ").append(flag(o.bias_eights));
  text.append(", ").append(type(o.key_bias)).append(", ").append(flag(o.alibi));
  text.append(", ").append(flag(o.sinks)).append(", ").append(flag(o.dropout));
  text.append(", ").append(flag(o.keeps)).append(", ").append(flag(o.saturates));
  text.append(", ").append(flag(o.bounded)).append("}");
  return text;
}

u32 bf16_pair(double power) {
  const u32 bits = std::bit_cast<u32>(static_cast<float>(power));  // bf16 is the upper half
  return bits | bits >> 16;
}

void terms_of_tanh(double end, double (&terms)[2]) {
  // Of z = x², tanh(end x) / (end x) is nearly the line that it meets at these two.
  const double root = std::sqrt(0.125);
  auto quotient = [end](double z) {
    const double x = end * std::sqrt(z);
    return std::fabs(x) > 1e-6 ? std::tanh(x) / x : 1;
  };
  const double low = quotient(0.5 - root), high = quotient(0.5 + root);
  const double rise = (high - low) / (2 * root);
  terms[0] = end * 0.5 * (low + high - rise);
  terms[1] = end * rise;
}

ScoreArgs score_arguments(Call& call) {
  const AttentionProblem& p = call.problem();
  ScoreArgs a;
  a.scale = static_cast<float>(p.scale);
  a.softcap = static_cast<float>(p.softcap);
  if (p.bias.given()) {
    a.bias = {p.bias.data,     p.bias.stride_b, p.bias.stride_h, p.bias.stride_i,
              p.bias.stride_j, p.bias.head_div, p.bias.num_rows, p.bias.num_keys};
  }
  if (p.key_bias.given()) {
    const HeadView& b = p.key_bias;
    const i64 keys = p.varlen ? p.Tk : p.Lk;
    a.key_bias = {b.data,     b.stride_b, b.stride_h, 0,
                  b.stride_l, b.head_div, 1,          static_cast<i32>(max_of<i64>(keys, 1))};
  }
  a.alibi_slopes = p.alibi_slopes;
  if (p.sinks.given()) {
    if (p.sinks.dtype != DType::kF32 || p.sinks.stride_h != 1) {
      type_error("sinks must be contiguous float32 on a GPU; convert them with .float()");
    }
    a.sinks = static_cast<const float*>(p.sinks.data);
  }
  if (p.dropout_p > 0) {
    const u32 threshold = dropout_threshold(p.dropout_p);
    const u32 limit = DropoutRule(threshold).limit;
    a.dropout_limit = limit * 0x10001;
    a.dropout_end = std::bit_cast<float>((0x8000 - limit) << 16);
    a.keep_scale = static_cast<float>(dropout_scale(threshold));
    a.seed = p.seed_on_gpu ? reinterpret_cast<const u64*>(p.seed_on_gpu) : call.upload(p.seed);
  }
  return a;
}

}  // namespace jali::cuda
