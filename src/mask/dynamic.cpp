// Dynamic selection: which of its candidates a row keeps by their scores.
//
// The interval theorem: give the keys a strict total order, and let rows see their own past. Then
// the `keep` best keys of the row at position p include key j exactly for j <= p < e_j, where e_j
// is the keep-th smallest position among the keys that rank above j: the number of better keys at
// or before a position never falls from one position to the next. So one int32 a key stands for the
// whole L x L mask. It holds for each segment (document) apart.
//
// Order: the higher score (fp32, -0 = +0) ranks above; of equal scores the newer key does.
#include <jali/jali.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <unordered_map>

#include "base/error.h"
#include "base/hd.h"
#include "base/pool.h"
#include "base/tensor.h"

namespace jali {
namespace {

using Kind = Error::Kind;

/// The keys of one sequence: where they lie in tables, and how many there are.
struct Sequence {
  i32 b, start, length;
};

/// One row of a per-token table.
template <class T>
struct Strip {
  T* data;
  i64 stride;
  T& operator[](i64 j) const { return data[j * stride]; }
};

/// The sequences of a call, and how per-token tables ([B?, H?, L], dims right-aligned; varlen:
/// packed [1?, H?, Tk] or padded) are read in it.
struct Layout {
  std::vector<Sequence> sequences;
  i64 covered = -1, total = -1;  // varlen: tokens of all sequences, and with those behind them
  i32 longest = 0;

  bool packed(const TensorView& t) const { return t.size(-1) == covered || t.size(-1) == total; }

  void check(const TensorView& t, const char* name, DType dtype, int max_rank) const {
    if (t.device != DeviceType::kCPU) {
      fail(Kind::kUnsupported, "dynamic_ends: ", name,
           " is a CUDA tensor; only CPU tensors work yet");
    }
    if (t.dtype != dtype) {
      type_error("dynamic_ends: ", name, " is ", dtype_name(t.dtype), "; expected ",
                 dtype_name(dtype), ": convert it first");
    }
    i64 batch = t.rank == max_rank ? t.size(0) : 1;
    bool varlen = total >= 0;
    bool ok = t.rank >= 1 && t.rank <= max_rank &&
              (t.size(-1) == longest || (varlen && (packed(t) || t.size(-1) > longest))) &&
              (batch == 1 || batch == static_cast<i64>(sequences.size()));
    if (!ok) {
      value_error("dynamic_ends: ", name, " has shape ", shape_text(t), "; expected ",
                  max_rank == 3 ? "[B|1, H, Lk]" : "[B|1, Lk]", " with B = ", sequences.size(),
                  ", Lk = ", longest,
                  varlen ? ", or packed with Lk = " + std::to_string(total) : "");
    }
  }

  template <class T>
  Strip<T> strip(const TensorView& t, const Sequence& s, i64 h, int max_rank) const {
    T* data = data_of<T>(t);
    if (t.rank == max_rank && t.size(0) > 1) data += s.b * t.stride[0];
    if (max_rank == 3 && t.rank >= 2) data += h * t.stride[t.rank - 2];
    if (packed(t) && (t.rank < max_rank || t.size(0) == 1)) data += s.start * t.stride[t.rank - 1];
    return {data, t.stride[t.rank - 1]};
  }
};

Layout layout_of(const TensorView& scores, const TensorView& ends, const TensorView& cu) {
  if (scores.rank < 1 || scores.rank > 3 || ends.rank < 1 || ends.rank > 3) {
    value_error("dynamic_ends: scores ", shape_text(scores), " and ends ", shape_text(ends),
                " must be [B|1, H, Lk], [H, Lk] or [Lk]");
  }
  Layout l;
  i64 total = ends.size(-1);
  if (total > kMaxLength) value_error("dynamic_ends: ", total, " keys; at most ", i64{kMaxLength});
  if (!cu.given()) {
    l.longest = static_cast<i32>(total);
    i64 batch = ends.rank == 3 ? ends.size(0) : 1;
    for (i64 b = 0; b < batch; ++b) l.sequences.push_back({static_cast<i32>(b), 0, l.longest});
    return l;
  }
  if (cu.rank != 1 || cu.dtype != DType::kI32 || cu.device != DeviceType::kCPU || cu.size(0) < 1) {
    value_error("dynamic_ends: cu_seqlens_k must be an int32 CPU tensor [N + 1], got ",
                dtype_name(cu.dtype), " ", shape_text(cu));
  }
  l.total = total;
  Strip<const i32> at{data_of<const i32>(cu), cu.stride[0]};
  i64 n = cu.size(0) - 1;
  if (at[0] != 0 || at[n] > total) {
    value_error("dynamic_ends: cu_seqlens_k must go from 0 to at most the ", total, " keys, got ",
                at[0], " to ", at[n]);
  }
  l.covered = at[n];
  for (i64 b = 0; b < n; ++b) {
    i32 length = at[b + 1] - at[b];
    if (length < 0) {
      value_error("dynamic_ends: cu_seqlens_k falls from ", at[b], " to ", at[b + 1], " at index ",
                  b + 1, "; it must not decrease");
    }
    l.longest = std::max(l.longest, length);
    l.sequences.push_back({static_cast<i32>(b), at[b], length});
  }
  return l;
}

/// The segment of each key of a sequence: keys of one segment agree in all document tables;
/// -1: never a candidate. No tables: all keys are segment 0, and `of` stays empty.
struct Segments {
  std::vector<i32> of;
  i32 count = 1;
  i32 at(i32 j) const { return of.empty() ? 0 : of[j]; }
};

Segments segments_of(const Layout& l, const Sequence& s, const DynamicOptions& options) {
  Segments x;
  if (options.documents.empty() && options.keep_keys.empty()) return x;
  x.of.assign(s.length, 0);
  for (const TensorView& table : options.keep_keys) {
    Strip<const u8> keep = l.strip<const u8>(table, s, 0, 2);
    for (i32 j = 0; j < s.length; ++j) x.of[j] = keep[j] ? x.of[j] : -1;
  }
  for (const TensorView& table : options.documents) {
    Strip<const i32> id = l.strip<const i32>(table, s, 0, 2);
    std::unordered_map<u64, i32> number;  // (segment so far, id) -> segment
    u64 last = ~u64{0};                   // documents come in runs: look up only their first key
    i32 run = -1;
    for (i32 j = 0; j < s.length; ++j) {
      if (x.of[j] < 0) continue;
      if (id[j] < 0) {
        x.of[j] = -1;
        continue;
      }
      u64 pair = u64(u32(x.of[j])) << 32 | u32(id[j]);
      if (pair != last)
        run = number.try_emplace(pair, static_cast<i32>(number.size())).first->second;
      last = pair;
      x.of[j] = run;
    }
    x.count = std::max<i32>(1, static_cast<i32>(number.size()));
  }
  return x;
}

/// A score as an unsigned number that grows with its rank; 0 is never kept.
u32 rank_of(float score, float threshold) {
  if (!(score >= threshold) || score == -INFINITY) return 0;  // NaN is not >= anything
  u32 bits = std::bit_cast<u32>(score + 0.0f);                // -0 becomes +0
  return bits ^ (bits >> 31 ? ~u32{0} : u32{1} << 31);
}

/// Stable radix sort by the high half of each entry, in three passes.
void sort_by_rank(std::vector<u64>& entries, std::vector<u64>& other) {
  other.resize(entries.size());
  for (int shift : {32, 43, 54}) {
    std::array<u32, 2048> at{};
    for (u64 e : entries) ++at[(e >> shift) & 2047];
    u32 sum = 0;
    for (u32& n : at) sum += std::exchange(n, sum);
    for (u64 e : entries) other[at[(e >> shift) & 2047]++] = e;
    entries.swap(other);
  }
}

/// Selection for one sequence and head; its vectors are kept from one to the next.
class Selector {
 public:
  void run(Strip<const float> score, Strip<i32> end, i32 length, const Segments& segments,
           const DynamicOptions& options) {
    worst_first_.clear();
    for (i32 j = 0; j < length; ++j) {
      u32 rank = segments.at(j) < 0 ? 0 : rank_of(score[j], options.threshold);
      end[j] = 0;
      if (rank != 0) worst_first_.push_back(u64{rank} << 32 | u32(j));
    }
    if (options.keep == 0) return;
    if (options.keep < 0 || static_cast<i64>(worst_first_.size()) <= options.keep) {
      for (u64 entry : worst_first_) end[u32(entry)] = kFar;  // there is room for all
    } else if (options.causal) {
      causal(end, length, segments, options.keep);
    } else {
      fixed(end, segments, options.keep);
    }
  }

 private:
  static constexpr i32 kNone = kFar;  // beyond the last key: as a position, and as an e_j

  /// Deletes key after key, the worst first, from lists of the keys of each segment by position.
  /// What remains when j goes is what ranks above j: its keep-th key, the pivot, is e_j.
  void causal(Strip<i32> end, i32 length, const Segments& segments, i64 keep) {
    next_.resize(length);
    previous_.resize(length);
    count_.assign(segments.count, 0);
    last_.assign(segments.count, -1);
    pivot_.assign(segments.count, kNone);
    for (u64 entry : worst_first_) {  // still by position
      i32 j = static_cast<i32>(u32(entry)), s = segments.at(j);
      previous_[j] = last_[s];
      next_[j] = kNone;
      if (last_[s] >= 0) next_[last_[s]] = j;
      last_[s] = j;
      if (++count_[s] == keep) pivot_[s] = j;
    }
    sort_by_rank(worst_first_, swap_);  // stable: the older of equal scores goes first
    for (u64 entry : worst_first_) {
      i32 j = static_cast<i32>(u32(entry));
      i32& pivot = pivot_[segments.at(j)];
      if (pivot != kNone && j <= pivot) pivot = next_[pivot];
      end[j] = pivot > j ? pivot : 0;
      if (previous_[j] >= 0) next_[previous_[j]] = next_[j];
      if (next_[j] != kNone) previous_[next_[j]] = previous_[j];
    }
  }

  /// One set for all rows: a key is kept when fewer than `keep` of its segment rank above it.
  void fixed(Strip<i32> end, const Segments& segments, i64 keep) {
    count_.assign(segments.count, 0);
    for (u64 entry : worst_first_) ++count_[segments.at(static_cast<i32>(u32(entry)))];
    sort_by_rank(worst_first_, swap_);
    for (u64 entry : worst_first_) {
      i32 j = static_cast<i32>(u32(entry));
      end[j] = --count_[segments.at(j)] < keep ? kFar : 0;
    }
  }

  std::vector<u64> worst_first_, swap_;    // rank << 32 | key
  std::vector<i32> next_, previous_;       // per key
  std::vector<i32> count_, last_, pivot_;  // per segment
};

}  // namespace

void dynamic_ends(const TensorView& scores, const DynamicOptions& options, const TensorView& ends) {
  for (const TensorView* t : {&scores, &ends, &options.cu_seqlens_k}) {
    if (t->given() && t->device != DeviceType::kCPU) {
      unsupported(
          "dynamic_ends: selection by score runs on the CPU; copy the scores there, and the ends "
          "back");
    }
  }
  Layout l = layout_of(scores, ends, options.cu_seqlens_k);
  l.check(scores, "scores", DType::kF32, 3);
  l.check(ends, "ends", DType::kI32, 3);
  for (const TensorView& t : options.documents) l.check(t, "a document table", DType::kI32, 2);
  for (const TensorView& t : options.keep_keys) l.check(t, "a keep_keys table", DType::kBool, 2);
  i64 num_heads = ends.rank >= 2 ? ends.size(-2) : 1;
  if ((scores.rank >= 2 ? scores.size(-2) : 1) != num_heads) {
    value_error("dynamic_ends: scores ", shape_text(scores), " and ends ", shape_text(ends),
                " differ in their number of heads");
  }
  if (std::isnan(options.threshold)) value_error("dynamic_ends: threshold is NaN");

  // PERF: a key takes about 15 ns, to hand work to a thread some microseconds.
  int threads = options.num_threads > 0 ? options.num_threads : num_cores();
  threads = static_cast<int>(std::min<i64>(threads, 1 + ends.num_elements() / 2048));
  i64 num_sequences = static_cast<i64>(l.sequences.size());
  std::vector<Segments> segments(num_sequences);
  std::atomic<i64> next_sequence{0}, next{0};
  for (i64 h = 0; h < num_heads && l.covered < l.total; ++h) {
    Strip<i32> behind = l.strip<i32>(ends, {0, 0, 0}, h, 3);
    for (i64 j = l.covered; j < l.total; ++j) behind[j] = 0;
  }
  parallel(threads, [&](int) {
    for (i64 b; (b = next_sequence++) < num_sequences;) {
      segments[b] = segments_of(l, l.sequences[b], options);
    }
  });
  parallel(threads, [&](int) {
    Selector selector;
    for (i64 item; (item = next++) < num_sequences * num_heads;) {
      i64 b = item / num_heads, h = item % num_heads;
      const Sequence& s = l.sequences[b];
      selector.run(l.strip<const float>(scores, s, h, 3), l.strip<i32>(ends, s, h, 3), s.length,
                   segments[b], options);
    }
  });
}

Mask dynamic(const TensorView& ends, bool causal, IntParam offset) {
  if (!causal) return key_interval({}, ends, 0);
  return jali::causal(offset) & key_interval({}, ends, offset);
}

}  // namespace jali
