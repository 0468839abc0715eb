// The options of the scores in the forward kernel: element 4 j + 2 e + x of a thread's tile is the cell
// (row + 8 e, key + 8 j + x).
//
// Scores are in a unit that makes the adjustments cheap: what the exponentials multiply by anyway
// turns it into log2(e).
#pragma once

#include "cuda/ptx/copy.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/shared.h"
#include "cuda/tile/scores.h"

namespace jali::tile {

/// A score is so many units; above 0.
template <cuda::ScoreOptions kOptions>
JALI_DEVICE float score_unit(const cuda::ScoreArgs& a) {
  if constexpr (kOptions.softcap) return a.softcap;
  return kOptions.any_scale ? 1.0f : a.scale;
}

/// ALiBi of a thread's cells.
struct Alibi {
  float distance, slope;  // from the first key to the row e = 0; less the slope of its head

  template <i32 kScores>
  JALI_DEVICE void add(float (&s)[kScores]) const {
#pragma unroll
    for (i32 n = 0; n < kScores; ++n) {
      const i32 further = 8 * (n / 2 % 2) - 8 * (n / 4) - n % 2;
      s[n] = __fmaf_rn(fabsf(distance + static_cast<float>(further)), slope, s[n]);
    }
  }
};

/// What is added for the keys of a thread's cells. PERF: loaded while the tensor cores make S, if the
/// registers hold it.
template <i32 kKeys>
struct OfKeys {
  u32 of[kKeys / 8][2];

  /// `shared`: that of this thread's first key.
  JALI_DEVICE void load(u32 shared) {
#pragma unroll
    for (i32 j = 0; j < kKeys / 8; ++j) ptx::load_array(shared + 32 * j, of[j]);
  }
  JALI_DEVICE void add(float (&s)[kKeys / 2]) const {
#pragma unroll
    for (i32 n = 0; n < kKeys / 2; ++n) s[n] += __uint_as_float(of[n / 4][n % 2]);
  }
};

/// A bias per row and key. PERF: some blocks of 8 keys are loaded while the tensor cores make S, the
/// others as these are used.
template <class T, cuda::ScoreOptions kOptions, i32 kKeys>
struct CellBias {
  static constexpr bool kFloat = kOptions.bias == cuda::BiasType::kFloat;
  static constexpr i32 kSize = kFloat ? 4 : 2, kBlocks = kKeys / 8;
  static constexpr i32 kWords = kFloat || !kOptions.bias_pairs ? 2 : 1;   // of two keys
  static constexpr i32 kAhead = kOptions.bias_pairs && !kFloat ? 16 : 2;  // blocks

  u64 line[2];  // addresses of the rows
  u64 row[2];   // of their cells of the first key
  i32 last;     // key that can be loaded, counted from the first one
  i64 stride;   // bytes from key to key
  u32 ring[kAhead][2][kWords];

  template <bool kClamps>
  JALI_DEVICE void load(i32 j) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      u32(&to)[kWords] = ring[j % kAhead][e];
      if constexpr (kOptions.bias_pairs) {
        const i64 at = i64{kClamps ? min_of(8 * j, last) : 8 * j} * kSize;
        if constexpr (kFloat) {
          asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
                       : "=r"(to[0]), "=r"(to[1])
                       : "l"(row[e] + at));
        } else {
          asm volatile("ld.global.b32 %0, [%1];" : "=r"(to[0]) : "l"(row[e] + at));
        }
      } else {
#pragma unroll
        for (i32 x = 0; x < 2; ++x) {
          const u64 at = row[e] + min_of(8 * j + x, last) * stride;
          if constexpr (kFloat) {
            asm volatile("ld.global.b32 %0, [%1];" : "=r"(to[x]) : "l"(at));
          } else {
            asm volatile("{\n.reg .b16 h;\nld.global.b16 h, [%1];\ncvt.u32.u16 %0, h;\n}"
                         : "=r"(to[x])
                         : "l"(at));
          }
        }
      }
    }
  }
  /// For row i of the frame, and the row 8 behind it.
  JALI_DEVICE void open(const cuda::Scores<T, kOptions>& scores, i32 i) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      line[e] = reinterpret_cast<u64>(scores.a.bias.data) + scores.bias_row(i + 8 * e) * kSize;
    }
  }
  /// For keys from `first` on.
  template <bool kClamps>
  JALI_DEVICE void begin(const cuda::BiasTable& t, i32 first) {
    stride = t.stride_k * kSize;
#pragma unroll
    for (i32 e = 0; e < 2; ++e) row[e] = line[e] + first * stride;
    last = t.keys - (kOptions.bias_pairs ? 2 : 1) - first;
#pragma unroll
    for (i32 j = 0; j < kAhead; ++j) load<kClamps>(j);
  }
  template <bool kClamps, i32 kScores>
  JALI_DEVICE void add(float (&s)[kScores], float factor) {
#pragma unroll
    for (i32 j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
#pragma unroll
        for (i32 x = 0; x < 2; ++x) {
          float& at = s[4 * j + 2 * e + x];
          const auto& from = ring[j % kAhead][e];
          float value;
          if constexpr (kFloat) {
            value = __uint_as_float(from[x]);
          } else if constexpr (kOptions.bias_pairs) {
            value = T::value(static_cast<u16>(from[0] >> 16 * x));
          } else {
            value = T::value(static_cast<u16>(from[x]));
          }
          at = __fmaf_rn(value, factor, at);
        }
      }
      if (j + kAhead < kBlocks) load<kClamps>(j + kAhead);
    }
  }
};

/// A bias over rows and keys, eight keys at a time by way of shared memory: [16 rows of a warp][kKeys], 16
/// bytes of row r where these are ^ r % 8. A warp copies its own rows.
template <class T, cuda::ScoreOptions kOptions, i32 kKeys>
struct StagedBias {
  static constexpr i32 kRowBytes = 2 * kKeys;
  u64 line[2];  // addresses of the rows that this lane copies

  /// For row i of the frame, and the row 8 behind it.
  JALI_DEVICE void open(const cuda::Scores<T, kOptions>& scores, i32 i) {
#pragma unroll
    for (i32 e = 0; e < 2; ++e) {
      line[e] = reinterpret_cast<u64>(scores.a.bias.data) + scores.bias_row(i + 8 * e) * 2;
    }
  }
  /// Begins to copy keys from `first` on, if `condition`.
  JALI_DEVICE void copy(const cuda::BiasTable& t, u32 shared, i32 first, i32 lane,
                        bool condition) const {
    const i32 row = lane / 4, eight = lane % 4, key = first + 8 * eight;
#pragma unroll
    for (i32 k = 0; k < kKeys / 32; ++k) {
      const i32 bytes = clamp_to(2 * (t.keys - key) - 64 * k, 0, 16);
      const u32 to = shared + row * kRowBytes + ((eight + 4 * k ^ row) << 4);
#pragma unroll
      for (i32 e = 0; e < 2; ++e) {
        ptx::copy_some_if(to + e * 8 * kRowBytes, line[e] + i64{key} * 2 + 64 * k, bytes,
                          condition);
      }
    }
    ptx::copy_commit();
  }
  /// Waits for what was copied, and adds it. Then the next may be.
  JALI_DEVICE void add(float (&s)[kKeys / 2], float factor, u32 shared, i32 lane) const {
    ptx::copy_wait<0>();
    __syncwarp();
    const u32 row = shared + (lane % 8 + (lane & 8)) * kRowBytes;
#pragma unroll
    for (i32 j = 0; j < kKeys / 8; j += 2) {
      u32 w[4];
      ptx::load_matrices(row + ((j + lane / 16 ^ lane % 8) << 4), w);
#pragma unroll
      for (i32 n = 0; n < 8; ++n) {
        float& at = s[4 * j + n];
        at = __fmaf_rn(T::value(static_cast<u16>(w[n / 2] >> n % 2 * 16)), factor, at);
      }
    }
    __syncwarp();
  }
};

/// What dropout keeps of a thread's cells. kKeeps: DropoutRule::keeps.
template <i32 kKeys, bool kKeeps>
struct Kept {
  DropoutLine rows[2];  // of this thread's two rows, in the block of 128 keys
  u32 shift;            // that has this; 0: in none
  bool upper;           // of tiles of 64 keys: whether they are the last of 128

  /// Calls Philox for kDropoutKeys keys, of which `key` is one, and for row i of the frame and the row 8 behind it.
  JALI_DEVICE void draw(u64 seed, const Frame& f, i32 i, i32 key) {
    const Philox x = dropout_call(seed, f.b, f.h, i, key);
#pragma unroll
    for (i32 e = 0; e < 2; ++e) rows[e] = DropoutLine::of_row(x, i + 8 * e);
    shift = 0;
  }
  /// For keys from `first` on, a multiple of kKeys, of the same call.
  JALI_DEVICE void take(i32 first) {
    const u32 last = shift;
    shift = dropout_shift_of_key(first);
    for (DropoutLine& line : rows) line = line.moved(last, shift);
    upper = first & 64;
  }
  /// Words of the key tile are made anew from here on. PERF: or ptxas holds all of them for work that seldom comes.
  JALI_DEVICE void forget() {
    for (DropoutLine& line : rows) line.plus = ptx::opaque(static_cast<i32>(line.plus));
  }
  /// Of pair j of row e, the cells 4 j + 2 e and the next one.
  JALI_DEVICE u32 word(i32 j, i32 e) const {
    const bool behind = kKeys == 64 && upper;
    return rows[e].word(behind ? dropout_factor((j + 8) % 16) : dropout_factor(j));
  }
  /// Of a word's two cells, ones where numbers are below the limit.
  JALI_DEVICE static u32 below(u32 word, const cuda::ScoreArgs& a) {
    return ptx::magnitudes_below(word, a.dropout_limit);
  }
  /// A pair of weights, cleared where it is dropped.
  JALI_DEVICE static u32 drop(u32 pair, u32 below) { return pair & (kKeeps ? below : ~below); }
};

}  // namespace jali::tile
