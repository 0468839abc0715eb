// The forward on the CPU. A task is a few row tiles of one head; it walks the key tiles that its
// rows reach and skips the empty ones. K (transposed) and V (if need be) are packed once per
// call and shared: O(L D) memory. Few query rows per head of K (decoding) take a second way: one
// task per head of K, nothing packed, K and V read once for all query heads that share them.
#include <atomic>
#include <limits>

#include "cpu/call.h"
#include "cpu/tile_rules.h"

namespace jali::cpu {
namespace {

/// Up to this many query rows per head of K, transposing K costs more than it saves.
constexpr i64 kDirectRows = 16;

/// One tile of query rows on its way through the key tiles, in a worker's scratch.
template <class T>
class RowTile {
 public:
  /// s: [rows][kTileKeys], shared by tiles that take turns.
  RowTile(const Call<T>& call, T* s, Bump& scratch)
      : call_(call),
        rules_(call, scratch),
        q_(scratch.take<T>(i64{call.max_rows} * call.D)),
        tile_{} {
    const i32 rows = call.max_rows;
    tile_.D = call.p.D;
    tile_.Dv = call.p.Dv;
    tile_.s = s;
    tile_.o = scratch.take<T>(i64{rows} * call.Dv);
    tile_.top = scratch.take<T>(call.padded(rows));
    tile_.factor = scratch.take<T>(call.padded(rows));
    tile_.sum = scratch.take<T>(i64{rows} * call.kernels.lanes);
  }
  TileRules<T>& rules() { return rules_; }

  /// direct: K will come by rows, unscaled.
  void begin(i32 b, i32 h, i32 i0, bool direct) {
    const AttentionProblem& p = call_.p;
    rules_.set_head(b, h);
    const Frame& f = rules_.frame();
    i0_ = i0;
    tile_.rows = min_of(kTileRows, f.num_rows - i0);
    rules_.set_rows(i0, tile_.rows);
    const Rows q = rows_at(p.q, b, h, f.q_start + i64{i0});
    if (!direct && q.dtype == kDTypeOf<T> && q.stride_d == 1) {
      tile_.q = static_cast<const T*>(q.data);
      tile_.q_stride = q.stride;
    } else {
      call_.kernels.pack(q, tile_.rows, p.D, q_, call_.D);
      if (direct) call_.kernels.scale(q_, i64{tile_.rows} * call_.D, call_.score_factor());
      tile_.q = q_;
      tile_.q_stride = call_.D;
    }
    // A sink is a first key with weight 1 and no value.
    const T top = p.sinks.given() ? static_cast<T>(load_element(rows_at(p.sinks, 0, h, 0), 0, 0))
                                  : -std::numeric_limits<T>::infinity();
    std::fill_n(tile_.top, call_.padded(tile_.rows), top);
    std::fill_n(tile_.o, i64{tile_.rows} * call_.Dv, T(0));
    std::fill_n(tile_.sum, i64{tile_.rows} * call_.kernels.lanes, T(0));
    for (i32 r = 0; p.sinks.given() && r < tile_.rows; ++r) tile_.sum[r * call_.kernels.lanes] = 1;
  }

  /// Fixes the key tile; false if the rows see nothing of it.
  bool look(i32 j0, i32 keys) {
    tile_.keys = keys;
    rules_.set_keys(j0, keys);
    return rules_.prepare(tile_.rules);
  }
  void step(const T* k, i64 k_stride, const T* v, i64 v_stride) {
    tile_.k = k;
    tile_.k_stride = k_stride;
    tile_.v = v;
    tile_.v_stride = v_stride;
    call_.kernels.forward_tile(tile_);
  }

  void end(const HeadView& out, const HeadView& lse) {
    const Frame& f = rules_.frame();
    call_.kernels.forward_end(tile_);
    call_.kernels.unpack(tile_.o, call_.Dv, tile_.rows, call_.p.Dv, tile_.factor,
                         rows_at(out, f.b, f.h, f.q_start + i64{i0_}));
    if (!lse.given()) return;
    const Rows to = rows_at(lse, f.b, f.h, f.q_start + i64{i0_});
    for (i32 r = 0; r < tile_.rows; ++r) {
      static_cast<T*>(to.data)[r * to.stride] = tile_.top[r];
    }
  }

 private:
  const Call<T>& call_;
  TileRules<T> rules_;
  T* q_;
  ForwardTile<T> tile_;
  i32 i0_ = 0;
};

/// The work of a call: row tiles with the keys that they reach, longest first. Sequences and heads
/// that the mask does not tell apart share one entry.
class RowTasks {
 public:
  struct Task {
    i32 b, h, i0, i1;
    Span keys;
  };
  RowTasks(const BoundMask& mask, i32 rows_per_task)
      : num_heads_(mask.num_heads() / mask.num_mask_heads()) {
    const bool by_batch = mask.varies_by_batch();
    num_batches_ = by_batch ? 1 : mask.num_batches();
    std::optional<MaskCursor> cursor;
    if (!mask.trivial()) cursor.emplace(mask);
    for (i32 b = 0; b < (by_batch ? mask.num_batches() : 1); ++b) {
      for (i32 m = 0; m < mask.num_mask_heads(); ++m) {
        const Frame f = mask.frame(b, m * num_heads_);
        if (cursor) cursor->set_frame(b, f.h);
        for (i32 i0 = 0; i0 < f.num_rows; i0 += rows_per_task) {
          const i32 end = min_of(i0 + rows_per_task, f.num_rows);
          Span keys{0, f.num_keys};
          if (cursor) {
            cursor->set_rows(i0, end);
            keys = cursor->key_span();
          }
          entries_.push_back({b, f.h, i0, end, keys});
          cells_ += static_cast<double>(keys.end - keys.begin) * (end - i0);
        }
      }
    }
    auto length = [](const Task& t) { return t.keys.end - t.keys.begin; };
    std::stable_sort(entries_.begin(), entries_.end(),
                     [&](const Task& x, const Task& y) { return length(x) > length(y); });
    cells_ *= shares();
  }
  i64 size() const { return static_cast<i64>(entries_.size()) * shares(); }
  double cells() const { return cells_; }
  const std::vector<Task>& entries() const { return entries_; }
  Task operator[](i64 n) const {
    // PERF: head after head, so that K and V of one head stay in the cache (56 -> 45 ms).
    const i64 num_entries = static_cast<i64>(entries_.size());
    Task task = entries_[n % num_entries];
    const i32 share = static_cast<i32>(n / num_entries);
    task.b += share / num_heads_;
    task.h += share % num_heads_;
    return task;
  }

 private:
  i64 shares() const { return i64{num_batches_} * num_heads_; }
  i32 num_batches_, num_heads_;  // that one entry stands for
  std::vector<Task> entries_;
  double cells_ = 0;
};

/// PERF: row tiles that share each key tile while it is in the cache; enough tasks for all threads
/// come first. Results do not depend on it.
template <class T>
i32 row_tiles_per_task(const Call<T>& call) {
  constexpr i64 kMost = 4;
  const AttentionProblem& p = call.p;
  const i64 all = i64{ceil_div(p.Lq, kTileRows)} * p.B * p.Hq;
  const int threads = call.threads(double(p.B) * p.Hq * p.Lq * p.Lk * (p.D + p.Dv), all);
  return static_cast<i32>(
      clamp_to<i64>(min_of<i64>(all / (4 * threads), ceil_div(p.Lq, kTileRows)), 1, kMost));
}

template <class T>
void forward_tiled(const Call<T>& call, const HeadView& out, const HeadView& lse) {
  const AttentionProblem& p = call.p;
  const i32 tiles_per_task = row_tiles_per_task(call);
  const RowTasks tasks(*p.mask, tiles_per_task * kTileRows);
  const TileIndex key_tiles(*p.mask, TileIndex::Of::kKeys);
  // Only the keys that anyone reaches are packed.
  std::vector<Span> reach(p.B, Span{p.Lk, 0});
  for (const RowTasks::Task& t : tasks.entries()) {
    if (t.keys.end <= t.keys.begin) continue;
    reach[t.b] = {min_of(reach[t.b].begin, t.keys.begin), max_of(reach[t.b].end, t.keys.end)};
  }
  if (!p.mask->varies_by_batch()) std::fill(reach.begin(), reach.end(), reach[0]);

  TransposedTiles<T> k(call, key_tiles, p.k, p.D, call.score_factor());
  TiledRows<T> v(call, key_tiles, p.v, p.Hkv, p.Dv);
  const i64 num_packs = p.Hkv * key_tiles.total();
  const int threads = call.threads(tasks.cells() * (p.D + p.Dv), max_of(tasks.size(), num_packs));
  for_each(threads, num_packs, [&](i64 n) {
    const i32 h = static_cast<i32>(n / key_tiles.total()) * call.group;
    const i32 b = key_tiles.sequence(n % key_tiles.total());
    const i32 tile = static_cast<i32>(n % key_tiles.total() - key_tiles.first(b));
    const i32 j0 = tile * kTileKeys;
    if (j0 >= reach[b].end || j0 + kTileKeys <= reach[b].begin) return;
    const Frame f = p.mask->frame(b, h);
    const i32 keys = min_of(kTileKeys, f.num_keys - j0);
    k.pack(b, h, tile, f.k_start, keys);
    v.pack(b, h, tile, f.k_start, keys);
  });
  std::atomic<i64> next_task{0};
  parallel(threads, [&](int) {
    with_scratch([&](Bump& scratch) {
      T* s = scratch.take<T>(i64{call.max_rows} * kTileKeys);
      std::vector<RowTile<T>> tiles;
      tiles.reserve(tiles_per_task);
      for (i32 n = 0; n < tiles_per_task; ++n) tiles.emplace_back(call, s, scratch);
      if (scratch.counts()) return;
      for (i64 n; (n = next_task.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
        const RowTasks::Task task = tasks[n];
        const i32 num_tiles = ceil_div(task.i1 - task.i0, kTileRows);
        for (i32 r = 0; r < num_tiles; ++r) {
          tiles[r].begin(task.b, task.h, task.i0 + r * kTileRows, false);
        }
        const Frame f = tiles[0].rules().frame();
        const i32 end = ceil_div(task.keys.end, kTileKeys);
        for (i32 j = task.keys.begin / kTileKeys; j < end; ++j) {
          i32 next = end;
          for (i32 r = 0; r < num_tiles; ++r) {
            next = min_of(next, tiles[r].rules().next_key_tile(j, end));
          }
          j = next;
          if (j == end) break;
          const i32 keys = min_of(kTileKeys, f.num_keys - j * kTileKeys);
          for (i32 r = 0; r < num_tiles; ++r) {
            if (!tiles[r].look(j * kTileKeys, keys)) continue;
            tiles[r].step(k.tile(task.b, task.h, j), 0, v.tile(task.b, task.h, j, f.k_start),
                          v.stride());
          }
        }
        for (i32 r = 0; r < num_tiles; ++r) tiles[r].end(out, lse);
      }
    });
  });
}

/// K or V of one head by rows of the compute type: in place, or through a tile of scratch.
template <class T>
struct DirectRows {
  DirectRows(const Call<T>& call, const HeadView& view, i32 width, Bump& scratch)
      : call(call),
        view(view),
        width(width),
        in_place(view.dtype == kDTypeOf<T> && view.stride_d == 1 && view.stride_l != 0 &&
                 width % call.kernels.lanes == 0),
        copy(in_place ? nullptr : scratch.take<T>(i64{kTileKeys} * call.padded(width))) {}
  const T* get(i32 b, i32 h, i64 token, i32 rows, i64& stride) const {
    const Rows from = rows_at(view, b, h, token);
    stride = in_place ? from.stride : call.padded(width);
    if (in_place) return static_cast<const T*>(from.data);
    call.kernels.pack(from, rows, width, copy, stride);
    return copy;
  }
  const Call<T>& call;
  const HeadView& view;
  i32 width;
  bool in_place;
  T* copy;
};

template <class T>
void forward_direct(const Call<T>& call, const HeadView& out, const HeadView& lse) {
  const AttentionProblem& p = call.p;
  const i64 num_tasks = i64{p.B} * p.Hkv;
  const double work = double(p.B) * p.Hq * p.Lq * p.Lk * (p.D + p.Dv);
  std::atomic<i64> next{0};
  parallel(call.threads(work, num_tasks), [&](int) {
    with_scratch([&](Bump& scratch) {
      T* s = scratch.take<T>(i64{call.max_rows} * kTileKeys);
      std::vector<RowTile<T>> heads;
      heads.reserve(call.group);
      for (i32 g = 0; g < call.group; ++g) heads.emplace_back(call, s, scratch);
      const DirectRows<T> k(call, p.k, p.D, scratch), v(call, p.v, p.Dv, scratch);
      if (scratch.counts()) return;
      for (i64 n; (n = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
        const i32 b = static_cast<i32>(n / p.Hkv), h0 = static_cast<i32>(n % p.Hkv) * call.group;
        const Frame f = p.mask->frame(b, h0);
        if (f.num_rows == 0) continue;
        Span reach{f.num_keys, 0};
        for (i32 g = 0; g < call.group; ++g) {
          heads[g].begin(b, h0 + g, 0, true);
          const Span keys = heads[g].rules().key_span();
          if (keys.end <= keys.begin) continue;
          reach = {min_of(reach.begin, keys.begin), max_of(reach.end, keys.end)};
        }
        const i32 end = ceil_div(reach.end, kTileKeys);
        for (i32 j = reach.begin / kTileKeys; j < end; ++j) {
          i32 next = end;
          for (RowTile<T>& head : heads) next = min_of(next, head.rules().next_key_tile(j, end));
          j = next;
          if (j == end) break;
          const i32 j0 = j * kTileKeys;
          const i32 keys = min_of(kTileKeys, f.num_keys - j0);
          const T *k_rows = nullptr, *v_rows = nullptr;
          i64 k_stride = 0, v_stride = 0;
          for (RowTile<T>& head : heads) {
            if (!head.look(j0, keys)) continue;
            if (!k_rows) {
              k_rows = k.get(b, h0, f.k_start + i64{j0}, keys, k_stride);
              v_rows = v.get(b, h0, f.k_start + i64{j0}, keys, v_stride);
            }
            head.step(k_rows, k_stride, v_rows, v_stride);
          }
        }
        for (RowTile<T>& head : heads) head.end(out, lse);
      }
    });
  });
}

}  // namespace

template <class T>
void forward(const AttentionProblem& p, const HeadView& out, const HeadView& lse) {
  if (p.B == 0 || p.Lq == 0) return;
  const Call<T> call(p);
  if (i64{p.Lq} * call.group <= kDirectRows) {
    forward_direct(call, out, lse);
  } else {
    forward_tiled(call, out, lse);
  }
}

template void forward<float>(const AttentionProblem&, const HeadView&, const HeadView&);
template void forward<double>(const AttentionProblem&, const HeadView&, const HeadView&);

}  // namespace jali::cpu
