// The backward on the CPU, bitwise the same for any number of threads.
//
// A task is a few neighbouring key tiles of a group of heads: it walks the group's heads in order,
// and for each the row tiles that reach its keys. dK and dV are summed in the worker's scratch and
// written once. dQ is summed in memory over the key tiles in ascending order: before a task adds to
// a row tile, all earlier tasks of its group must have passed it. Tasks of a group are handed out
// in ascending order, so whom a task waits for is done or at work: no deadlock. As many groups are
// under way as there are threads, so that waiting is rare.
//
// A group is the query heads of one head of K; where heads or sequences share a bias gradient that
// is summed cell by cell, all that share it. Gradients of biases over keys or rows alone are summed
// per head first (BiasGradient) and over heads at the end. Memory: O(L D) per head.
#include <cmath>
#include <limits>
#include <thread>

#include "cpu/bias_gradient.h"
#include "cpu/call.h"
#include "cpu/tile_rules.h"

namespace jali::cpu {
namespace {

/// How far each task is, so that later ones of its group may follow.
class Progress {
 public:
  static constexpr i64 kDone = i64{1} << 62;
  Progress(i64 num_groups, i64 tasks) : tasks_(tasks), at_(num_groups * tasks), low_(num_groups) {}

  /// Waits until tasks 0 .. n - 1 of the group have passed a position of the walk.
  void wait(i64 group, i64 n, i64 position) {
    const std::atomic<i64>* at = &at_[group * tasks_];
    // Only ever set to what has been true: all below are done.
    i64 low = low_[group].load(std::memory_order_acquire);
    while (low < n && at[low].load(std::memory_order_acquire) == kDone) ++low;
    low_[group].store(low, std::memory_order_release);
    for (i64 other = low; other < n; ++other) {
      for (int spins = 0; at[other].load(std::memory_order_acquire) <= position; ++spins) {
        if (spins > 100) std::this_thread::yield();
      }
    }
  }
  /// Positions up to this one are passed.
  void pass(i64 group, i64 n, i64 position) {
    at_[group * tasks_ + n].store(position + 1, std::memory_order_release);
  }
  void done(i64 group, i64 n) { at_[group * tasks_ + n].store(kDone, std::memory_order_release); }

 private:
  i64 tasks_;  // of a group
  std::vector<std::atomic<i64>> at_, low_;
};

template <class T>
class Backward {
 public:
  Backward(const Call<T>& call, const HeadView& out, const HeadView& lse, const HeadView& dout,
           const HeadView& dlse, const BackwardViews& grads)
      : call_(call),
        p_(call.p),
        out_(out),
        lse_(lse),
        dlse_(dlse),
        grads_(grads),
        row_tiles_(*p_.mask, TileIndex::Of::kRows),
        key_tiles_(*p_.mask, TileIndex::Of::kKeys),
        q_(call, row_tiles_, p_.q, p_.Hq, p_.D),
        dout_(call, row_tiles_, dout, p_.Hq, p_.Dv),
        dq_(call, row_tiles_, grads.dq, p_.Hq, p_.D),
        k_(call, key_tiles_, p_.k, p_.Hkv, p_.D),
        kt_(call, key_tiles_, p_.k, p_.D, call.score_factor()),
        vt_(call, key_tiles_, p_.v, p_.Dv, T(1)),
        row_lse_(p_.Hq * row_tiles_.total() * kTileRows),
        row_delta_(p_.Hq * row_tiles_.total() * kTileRows),
        bias_(call, grads, row_tiles_, key_tiles_),
        num_b_(bias_.joins_batches() ? p_.B : 1),
        num_hkv_(bias_.joins_heads() ? p_.Hkv : 1),
        num_groups_(i64{p_.B / num_b_} * (p_.Hkv / num_hkv_)),
        threads_(call.threads(2.5 * p_.B * p_.Hq * p_.Lq * p_.Lk * (p_.D + p_.Dv),
                              max_of(p_.Hq * row_tiles_.total(), p_.Hkv * key_tiles_.total()))),
        keys_per_task_(choose_keys_per_task()),
        tasks_each_(ceil_div(p_.Lk, keys_per_task_)),
        progress_(num_groups_, tasks_each_) {}

  void run() {
    const i64 num_rows = p_.Hq * row_tiles_.total(), num_keys = p_.Hkv * key_tiles_.total();
    const int threads = threads_;
    for_each(threads, num_keys, [&](i64 n) { prepare_keys(n); });
    for_each(threads, num_rows, [&](i64 n) { prepare_rows(n); });
    std::atomic<i64> next{0};
    parallel(threads, [&](int) {
      with_scratch([&](Bump& scratch) {
        Worker worker(call_, scratch, bias_.wanted(), keys_per_task_);
        if (scratch.counts()) return;
        const i64 num_tasks = num_groups_ * tasks_each_;
        for (i64 n; (n = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
          // PERF: as many groups at a time as there are threads, so that each thread keeps the
          // rows of one group in its cache and rarely waits (170 -> 110 ms).
          const i64 first = n / (threads * tasks_each_) * threads;
          const i64 together = min_of<i64>(threads, num_groups_ - first);
          n -= first * tasks_each_;
          walk_group(worker, first + n % together, n / together);
        }
      });
    });
    if (!dq_.in_place()) for_each(threads, num_rows, [&](i64 n) { store_dq(n); });
    bias_.finish(threads);
    if (grads_.dsinks.given()) for_each(threads, p_.Hq, [&](i64 h) { store_dsink(h); });
  }

 private:
  struct Worker {
    Worker(const Call<T>& call, Bump& scratch, bool want_dscore, i32 keys_per_task)
        : rules(call, scratch), tile{} {
      tile.D = call.p.D;
      tile.Dv = call.p.Dv;
      tile.scale = static_cast<T>(call.p.scale);
      tile.p = scratch.take<T>(i64{call.max_rows} * kTileKeys);
      tile.ds = scratch.take<T>(i64{call.max_rows} * kTileKeys);
      if (want_dscore) tile.dscore = scratch.take<T>(i64{call.max_rows} * kTileKeys);
      dk = scratch.take<T>(i64{keys_per_task} * call.D);
      dv = scratch.take<T>(i64{keys_per_task} * call.Dv);
    }
    TileRules<T> rules;
    BackwardTile<T> tile;
    T *dk, *dv;  // [keys_per_task][D], [keys_per_task][Dv]
  };

  /// One row tile or key tile of one head, by its number.
  struct Place {
    i32 b, h, n;
    Frame f;
  };
  Place place(const TileIndex& tiles, i64 number, i32 heads_each) const {
    Place at;
    at.h = static_cast<i32>(number / tiles.total()) * heads_each;
    at.b = tiles.sequence(number % tiles.total());
    at.n = static_cast<i32>(number % tiles.total() - tiles.first(at.b));
    at.f = p_.mask->frame(at.b, at.h);
    return at;
  }

  /// PERF: the more keys stay in the cache while rows stream by, the less memory is read; enough
  /// tasks for all threads come first. Results do not depend on it.
  i32 choose_keys_per_task() const {
    constexpr i64 kCache = 512 << 10;
    const i64 bytes = kTileKeys * (3 * call_.D + 2 * call_.Dv) * sizeof(T);
    i64 tiles = clamp_to<i64>(kCache / bytes, 1, 8);
    const i64 all = ceil_div(p_.Lk, kTileKeys) * num_groups_;
    tiles = clamp_to<i64>(all / (4 * threads_), 1, tiles);
    return static_cast<i32>(tiles) * kTileKeys;
  }

  void prepare_keys(i64 number) {
    const Place at = place(key_tiles_, number, call_.group);
    const i32 keys = min_of(kTileKeys, at.f.num_keys - at.n * kTileKeys);
    k_.pack(at.b, at.h, at.n, at.f.k_start, keys);
    kt_.pack(at.b, at.h, at.n, at.f.k_start, keys);
    vt_.pack(at.b, at.h, at.n, at.f.k_start, keys);
  }

  /// delta = rowsum(dO O) - dLSE: what the gradient of every score is measured against.
  void prepare_rows(i64 number) {
    const Place at = place(row_tiles_, number, 1);
    const i32 rows = min_of(kTileRows, at.f.num_rows - at.n * kTileRows);
    const i64 first = at.f.q_start + i64{at.n} * kTileRows;
    q_.pack(at.b, at.h, at.n, at.f.q_start, rows);
    dout_.pack(at.b, at.h, at.n, at.f.q_start, rows);
    std::fill_n(dq_.tile(at.b, at.h, at.n, at.f.q_start), rows * dq_.stride(), T(0));
    T* delta = row_delta_.get() + number * kTileRows;
    T* lse = row_lse_.get() + number * kTileRows;
    with_scratch([&](Bump& scratch) {
      T* out = scratch.take<T>(i64{kTileRows} * call_.Dv);
      if (scratch.counts()) return;
      call_.kernels.pack(rows_at(out_, at.b, at.h, first), rows, p_.Dv, out, call_.Dv);
      call_.kernels.row_dots(out, call_.Dv, dout_.tile(at.b, at.h, at.n, at.f.q_start),
                             dout_.stride(), rows, p_.Dv, delta);
    });
    const Rows from = rows_at(lse_, at.b, at.h, first);
    for (i32 r = 0; r < rows; ++r) {
      const T x = static_cast<const T*>(from.data)[r * from.stride];
      // A row that saw nothing: +inf makes every weight exp(s - lse) zero.
      lse[r] = x == -std::numeric_limits<T>::infinity() ? -x : x;
      if (dlse_.given()) {
        const Rows d = rows_at(dlse_, at.b, at.h, first);
        delta[r] -= static_cast<const T*>(d.data)[r * d.stride];
      }
    }
  }

  /// Task n of a group: its heads in order, for the task's key tiles.
  void walk_group(Worker& worker, i64 group, i64 n) {
    const i32 b0 = static_cast<i32>(group / (p_.Hkv / num_hkv_)) * num_b_;
    const i32 hkv0 = static_cast<i32>(group % (p_.Hkv / num_hkv_)) * num_hkv_;
    i64 walked = 0;  // heads
    for (i32 b = b0; b < b0 + num_b_; ++b) {
      for (i32 hkv = hkv0; hkv < hkv0 + num_hkv_; ++hkv, walked += call_.group) {
        walk_heads(worker, group, n, b, hkv, walked);
      }
    }
    progress_.done(group, n);
  }

  /// All query heads of one head of K.
  void walk_heads(Worker& worker, i64 group, i64 n, i32 b, i32 hkv, i64 walked) {
    const i32 h0 = hkv * call_.group;
    const Frame f = p_.mask->frame(b, h0);
    const i32 j0 = static_cast<i32>(n) * keys_per_task_;
    if (j0 >= f.num_keys) return;
    const i32 keys = min_of(keys_per_task_, f.num_keys - j0);
    std::fill_n(worker.dk, i64{keys_per_task_} * call_.D, T(0));
    std::fill_n(worker.dv, i64{keys_per_task_} * call_.Dv, T(0));
    for (i32 h = h0; h < h0 + call_.group; ++h, ++walked) {
      worker.rules.set_head(b, h);
      worker.rules.set_keys(j0, keys);
      const Span rows = worker.rules.row_span();
      const i32 end = ceil_div(rows.end, kTileRows);
      for (i32 r = rows.begin / kTileRows; r < end; ++r) {
        worker.rules.set_keys(j0, keys);
        r = worker.rules.next_row_tile(r, end);
        if (r == end) break;
        walk_keys(worker, f, h, r, j0, keys,
                  [&] { progress_.wait(group, n, walked * ceil_div(p_.Lq, kTileRows) + r); });
        progress_.pass(group, n, walked * ceil_div(p_.Lq, kTileRows) + r);
      }
    }
    call_.kernels.unpack(worker.dk, call_.D, keys, p_.D, nullptr,
                         rows_at(grads_.dk, b, h0, f.k_start + i64{j0}));
    call_.kernels.unpack(worker.dv, call_.Dv, keys, p_.Dv, nullptr,
                         rows_at(grads_.dv, b, h0, f.k_start + i64{j0}));
  }

  /// One row tile against the task's keys. wait() returns when dQ may be added to.
  template <class Wait>
  void walk_keys(Worker& worker, const Frame& f, i32 h, i32 r, i32 j0, i32 keys, Wait wait) {
    BackwardTile<T>& t = worker.tile;
    const i32 i0 = r * kTileRows;
    t.rows = min_of(kTileRows, f.num_rows - i0);
    t.q = q_.tile(f.b, h, r, f.q_start);
    t.q_stride = q_.stride();
    t.dout = dout_.tile(f.b, h, r, f.q_start);
    t.dout_stride = dout_.stride();
    t.dq = dq_.tile(f.b, h, r, f.q_start);
    t.dq_stride = dq_.stride();
    const i64 number = (h * row_tiles_.total() + row_tiles_.first(f.b) + r) * kTileRows;
    t.lse = row_lse_.get() + number;
    t.delta = row_delta_.get() + number;
    worker.rules.set_rows(i0, t.rows);
    bool waited = false;
    for (i32 at = 0; at < keys; at += kTileKeys) {
      const i32 n = (j0 + at) / kTileKeys;
      t.keys = min_of(kTileKeys, keys - at);
      worker.rules.set_keys(j0 + at, t.keys);
      if (!worker.rules.prepare(t.rules)) continue;
      t.kt = kt_.tile(f.b, h, n);
      t.vt = vt_.tile(f.b, h, n);
      t.k = k_.tile(f.b, h, n, f.k_start);
      t.k_stride = k_.stride();
      t.dk = worker.dk + i64{at} * call_.D;
      t.dv = worker.dv + i64{at} * call_.Dv;
      call_.kernels.backward_tile(t);
      bias_.add_cells(t, f.b, h, i0, j0 + at);
      if (!waited) wait();
      waited = true;
      call_.kernels.backward_dq(t);
      bias_.add_rows(t, f.b, h, r);
    }
  }

  void store_dq(i64 number) {
    const Place at = place(row_tiles_, number, 1);
    const i32 rows = min_of(kTileRows, at.f.num_rows - at.n * kTileRows);
    call_.kernels.unpack(dq_.tile(at.b, at.h, at.n, at.f.q_start), dq_.stride(), rows, p_.D,
                         nullptr,
                         rows_at(grads_.dq, at.b, at.h, at.f.q_start + i64{at.n} * kTileRows));
  }

  /// The sink's weight is exp(sink - lse), and its value is 0.
  void store_dsink(i64 h) {
    const double sink = load_element(rows_at(p_.sinks, 0, h, 0), 0, 0);
    double sum = 0;
    for (i32 b = 0; b < p_.B; ++b) {
      const i64 first = (h * row_tiles_.total() + row_tiles_.first(b)) * kTileRows;
      const Frame f = p_.mask->frame(b, h);
      for (i64 i = first; i < first + f.num_rows; ++i) {
        sum -= std::exp(sink - row_lse_.get()[i]) * row_delta_.get()[i];
      }
    }
    store_element(rows_at(grads_.dsinks, 0, h, 0), 0, 0, sum);
  }

  const Call<T>& call_;
  const AttentionProblem& p_;
  HeadView out_, lse_, dlse_;
  BackwardViews grads_;
  TileIndex row_tiles_, key_tiles_;
  TiledRows<T> q_, dout_, dq_, k_;
  TransposedTiles<T> kt_, vt_;
  Buffer<T> row_lse_, row_delta_;  // [Hq][row tiles][kTileRows]
  BiasGradient<T> bias_;
  i32 num_b_, num_hkv_;  // sequences and heads of K of one group
  i64 num_groups_;
  int threads_;
  i32 keys_per_task_;
  i64 tasks_each_;  // of a group
  Progress progress_;
};

}  // namespace

template <class T>
void backward(const AttentionProblem& p, const HeadView& out, const HeadView& lse,
              const HeadView& dout, const HeadView& dlse, const BackwardViews& grads) {
  if (p.B == 0) return;
  const Call<T> call(p);
  Backward<T>(call, out, lse, dout, dlse, grads).run();
}

template void backward<float>(const AttentionProblem&, const HeadView&, const HeadView&,
                              const HeadView&, const HeadView&, const BackwardViews&);
template void backward<double>(const AttentionProblem&, const HeadView&, const HeadView&,
                               const HeadView&, const HeadView&, const BackwardViews&);

}  // namespace jali::cpu
