#include "mask/binder.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/tensor.h"

namespace jali {
namespace {

bool has(const char* dims, char letter) { return std::strchr(dims, letter) != nullptr; }

// What an empty table points at: its reads are clamped to element 0 and never used.
constexpr std::int64_t kNothing = 0;

template <class T>
const T* data_or_nothing(const TensorView& t) {
  return t.num_elements() ? static_cast<const T*>(t.data) : reinterpret_cast<const T*>(&kNothing);
}

}  // namespace

Binder::How Binder::next(const char* name, const char* dims, bool scalar_allowed) {
  if (code_ == code_end_) {
    value_error("mask program: leaf ", leaf_, " ends before its field ", name);
  }
  switch (*code_++) {
    case 0:
      if (!has(dims, '?')) value_error(leaf_, ": ", name, " is required");
      return How::kAbsent;
    case 1:
      if (!scalar_allowed) value_error(leaf_, ": ", name, " must be a tensor, got a number");
      if (context_.scalars == context_.scalars_end) {
        value_error("mask program: no scalar left for ", leaf_, ".", name);
      }
      return How::kScalar;
    case 2:
      return How::kTable;
    default:
      value_error("mask program: field ", leaf_, ".", name, " has code ", code_[-1],
                  "; expected 0 (absent), 1 (scalar) or 2 (table)");
  }
}

const TensorView& Binder::take_table(const char* name, DType dtype) {
  if (context_.tables == context_.tables_end) {
    value_error("mask program: no table left for ", leaf_, ".", name);
  }
  const TensorView& table = *context_.tables++;
  if (table.dtype != dtype) {
    type_error(leaf_, ": ", name, " has dtype ", dtype_name(table.dtype), "; expected ",
               dtype_name(dtype));
  }
  const Shape& s = context_.shape;
  check_device(name, table, s.device, s.device_index, leaf_);
  return table;
}

i32 Binder::head_divisor(const char* name, const TensorView& table, std::int64_t heads) {
  const Shape& s = context_.shape;
  if (heads != 1 && heads != s.Hkv && heads != s.Hq) {
    value_error(leaf_, ": ", name, " ", shape_text(table), " has ", heads,
                " heads; expected 1, Hkv = ", s.Hkv, " or Hq = ", s.Hq);
  }
  num_heads = std::max(num_heads, static_cast<i32>(heads));
  return static_cast<i32>(s.Hq / heads);
}

void Binder::operator()(const char* name, Scalar& out, const char* dims, const char*) {
  How how = next(name, dims, true);
  if (how == How::kAbsent) return;
  out.given = 1;
  if (how == How::kScalar) {
    // Positions are limited so that i + offset fits; a width beyond that means "unlimited".
    i32 value = saturate(*context_.scalars++);
    out.value = has(dims, 'B') ? clamp_to(value, -kMaxLength, kMaxLength) : value;
    return;
  }
  const TensorView& table = take_table(name, DType::kI32);
  if (table.rank > 1 || (table.rank == 1 && dims[0] != 'B' && dims[0] != 'H')) {
    value_error(leaf_, ": ", name, " has shape ", shape_text(table), "; expected a number",
                dims[0] == 'B'   ? " or an int tensor [B]"
                : dims[0] == 'H' ? " or one [H]"
                                 : "");
  }
  std::int64_t size = table.num_elements();
  out.data = data_or_nothing<i32>(table);
  out.size = static_cast<i32>(size);
  out.stride = table.rank == 1 && size > 1 ? table.stride[0] : 0;
  if (dims[0] == 'H') {
    out.head_div = head_divisor(name, table, size);
  } else {
    if (size != 1 && size != context_.shape.B) {
      value_error(leaf_, ": ", name, " ", shape_text(table),
                  ": expected 1 or B = ", context_.shape.B, " entries");
    }
    varies_by_batch |= size > 1;
    const bool readable = context_.shape.device == DeviceType::kCPU;
    for (std::int64_t b = 0; readable && b < size; ++b) {
      i32 value = out.data[b * out.stride];
      if (value < -kMaxLength || value > kMaxLength) {
        value_error(leaf_, ": ", name, "[", b, "] = ", value, " is beyond ±2^30");
      }
    }
  }
}

template <class T>
void Binder::bind_tokens(const char* name, TokenTable<T>& out, const char* dims, DType dtype) {
  if (next(name, dims, false) == How::kAbsent) return;
  const TensorView& t = take_table(name, dtype);
  const Shape& s = context_.shape;
  const bool heads = has(dims, 'H');
  if (t.rank < 1 || t.rank > (heads ? 3 : 2)) {
    value_error(leaf_, ": ", name, " has shape ", shape_text(t), "; expected [length] with ",
                heads ? "up to two dims (batch, heads)" : "at most a batch dim", " before it");
  }
  const int last = t.rank - 1;
  out.data = data_or_nothing<T>(t);
  out.length = static_cast<i32>(std::max<std::int64_t>(t.shape[last], 1));
  out.stride_l = t.shape[last] > 1 ? t.stride[last] : 0;
  if (heads && t.rank >= 2) {
    out.head_div = head_divisor(name, t, t.shape[last - 1]);
    out.stride_h = t.shape[last - 1] > 1 ? t.stride[last - 1] : 0;
  } else {
    out.head_div = static_cast<i32>(s.Hq);
  }
  const int batch_dim = last - (heads ? 2 : 1);
  const std::int64_t batches = batch_dim >= 0 ? t.shape[batch_dim] : 1;
  if (batches != 1 && batches != s.B) {
    value_error(leaf_, ": ", name, " ", shape_text(t), ": its batch dim is ", batches,
                "; expected 1 or ", s.B);
  }
  if (batches > 1) {
    out.stride_b = t.stride[batch_dim];
    varies_by_batch = true;
  } else if (s.cu_seqlens_q.given()) {
    out.packed = 1;  // perhaps: LengthChecker settles it
  }
}

void LengthChecker::check(const char* name, std::int64_t length, i32& packed,
                          const char* dims) const {
  if (has(dims, 'N')) {
    packed = 0;
    return;
  }
  if (packed) {
    const std::int64_t tokens = has(dims, 'Q') ? shape_.Tq : shape_.Tk;
    packed = length == tokens;
    if (shape_.device == DeviceType::kCPU) {
      const TensorView& cu = has(dims, 'Q') ? shape_.cu_seqlens_q : shape_.cu_seqlens_k;
      const std::int64_t covered = data_of<const i32>(cu)[shape_.B * cu.stride[0]];
      packed |= length == covered;
      if (!packed && tokens < 0 && length > covered && shape_.B > 1) {
        value_error(leaf_, ": ", name, " has ", length, " entries, but the sequences cover ",
                    covered, " tokens; cut what lies behind the last one off");
      }
    } else if (!packed && tokens >= 0 && shape_.B > 1 && !has(dims, 'P')) {
      value_error(leaf_, ": ", name, " has one row of ", length, " entries, but there are ", tokens,
                  " tokens; expected an entry for each, those behind the last sequence too (a GPU "
                  "call does not wait to read how many these are), or a row per sequence, [",
                  shape_.B, ", longest]");
    }
    binder_.varies_by_batch |= packed != 0;
  }
  if (packed || has(dims, 'P')) return;
  const bool rows = has(dims, 'Q');
  const std::int64_t want = std::max<std::int64_t>(rows ? shape_.Lq : shape_.Lk, 1);
  const bool varlen = shape_.cu_seqlens_q.given();
  if (varlen && shape_.device != DeviceType::kCPU) return;  // the longest length is not known
  if (varlen ? length < want : length != want) {
    value_error(leaf_, ": ", name, " has ", length, " entries per sequence; expected ",
                rows ? "Lq = " : "Lk = ", want, varlen ? " (or one packed row of all tokens)" : "");
  }
}

template <class T>
void Binder::bind_grid(const char* name, GridTable<T>& out, const char* dims, DType dtype) {
  if (next(name, dims, false) == How::kAbsent) return;
  const TensorView& t = take_table(name, dtype);
  if (t.rank < 2 || t.rank > 4) {
    value_error(leaf_, ": ", name, " has shape ", shape_text(t),
                "; expected [rows, keys] with up to two dims (batch, heads) before it");
  }
  const int last = t.rank - 1;
  out.data = data_or_nothing<T>(t);
  out.num_rows = static_cast<i32>(std::max<std::int64_t>(t.shape[last - 1], 1));
  out.num_cols = static_cast<i32>(std::max<std::int64_t>(t.shape[last], 1));
  out.stride_r = t.shape[last - 1] > 1 ? t.stride[last - 1] : 0;
  out.stride_c = t.shape[last] > 1 ? t.stride[last] : 0;
  if (has(dims, 'K')) {
    const Shape& s = context_.shape;
    const bool varlen = s.cu_seqlens_q.given();
    auto fits = [&](std::int64_t n, std::int64_t want) {
      return n == 1 || n == want || (varlen && (n > want || s.device != DeviceType::kCPU));
    };
    if (!fits(t.shape[last - 1], s.Lq) || !fits(t.shape[last], s.Lk)) {
      value_error(leaf_, ": ", name, " is ", shape_text(t), "; expected 1 or Lq = ", s.Lq,
                  " rows and 1 or Lk = ", s.Lk, " keys", varlen ? " (padded)" : "");
    }
  }
  const std::int64_t heads = t.rank >= 3 ? t.shape[last - 2] : 1;
  out.head_div = head_divisor(name, t, heads);
  out.stride_h = heads > 1 ? t.stride[last - 2] : 0;
  const std::int64_t batches = t.rank >= 4 ? t.shape[0] : 1;
  if (batches != 1 && batches != context_.shape.B) {
    value_error(leaf_, ": ", name, " ", shape_text(t), ": its batch dim is ", batches,
                "; expected 1 or ", context_.shape.B);
  }
  out.stride_b = batches > 1 ? t.stride[0] : 0;
  varies_by_batch |= batches > 1;
}

void Binder::operator()(const char* name, TokenTable<i32>& out, const char* dims, const char*) {
  bind_tokens(name, out, dims, DType::kI32);
}
void Binder::operator()(const char* name, TokenTable<u8>& out, const char* dims, const char*) {
  bind_tokens(name, out, dims, DType::kBool);
}
void Binder::operator()(const char* name, GridTable<i32>& out, const char* dims, const char*) {
  bind_grid(name, out, dims, DType::kI32);
}
void Binder::operator()(const char* name, GridTable<u8>& out, const char* dims, const char*) {
  bind_grid(name, out, dims, DType::kBool);
}

void Binder::finish() const {
  if (code_ != code_end_) {
    value_error("mask program: leaf ", leaf_, " has ", code_end_ - code_, " codes too many");
  }
}

}  // namespace jali
