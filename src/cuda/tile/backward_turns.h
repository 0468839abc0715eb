// How the blocks of a backward pass tell each other, by counters in global memory, what they have added to the sums of
// dq: how many key tiles of a section, so that its rows can be rounded; and, if the pass is deterministic, how many of
// a row tile, to which key tiles add in turns.
//
// Who adds, awaits turns, fences, and counts:
//   not deterministic                  consumers add, warp 3 counts key tiles (tell_others)
//   deterministic, bwd_sm90            a warp adds, in turns (send_sums), another one counts
//   deterministic, bwd_sm90_pair       consumers add, in turns, warp 3 counts row tiles, consumers key tiles
//   where finders have these warps (not bwd_sm90, deterministic), and deterministic bwd_sm90_wide: consumers do all
// NOTE: when the copy engine's groups are complete (bulk_wait), what they added is there for their thread alone;
// without a fence others read sums too early, or add in another order. Of turns only the order of additions matters,
// which are made in L2: they are awaited without an order of other memory.
#pragma once

#include "cuda/kernel/backward.h"
#include "cuda/ptx/bulk.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/order.h"
#include "cuda/ptx/shared.h"

namespace jali::tile {

using namespace ptx;
using cuda::BackwardArgs;

/// Of kernels of Tiles, a BackwardTiles of that kOrdered and kPair.
template <class Tiles, bool kOrdered, bool kPair>
struct BackwardTurns {
  using Shared = typename Tiles::Shared;
  using Item = typename Tiles::Item;
  static constexpr bool kTells = Tiles::kTells, kSends = Tiles::kSends;
  static constexpr bool kTellsItems = kTells && (!kOrdered || kSends);
  static constexpr bool kConsumersWait = kOrdered && !kSends;  // for turns
  static constexpr i32 kConsumerWarps = Tiles::kConsumerWarps;
  static constexpr i32 kNone = -1;

  /// The warp that tells it, when it was handed over. PERF: a fence in consumers, who wait for it for thousands of
  /// cycles, took 3 % of a backward of 1K tokens, 25 % of deterministic ones; in the warp that sends 6 to 15 % of those.
  JALI_DEVICE static void tell_others(const BackwardArgs& a, const Shared& sm) {
    if ((threadIdx.x & 31) != 0) return;
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      barrier_wait(sm.added_full(), n & 1);
      const i32 section = kTellsItems ? load_shared(sm.added()) : kNone;
      const i32 turn = kOrdered ? load_shared(sm.added() + 4) : kNone;
      barrier_arrive(sm.added_empty());
      if ((kOrdered ? turn : section) == kNone) break;
      fence_device();
      if (kOrdered) add_if(a.turns + turn, kConsumerWarps, true);
      if (!kOrdered || section != kNone) {
        fence_proxies();
        add_if(a.added + section, kConsumerWarps, true);
      }
    }
  }
  /// Hands over that all consumer warps have added to a row tile (kOrdered: its counter), the last one of a key tile
  /// of `section` (else kNone), or that no more comes: kNone both. The n-th time; all warps that do, all consumers or
  /// that which sends, call it alike. Unless `condition`, nothing happens.
  JALI_DEVICE static void hand_over(const Shared& sm, i32 section, i32 turn, u32 n,
                                    bool condition) {
    barrier_wait_if(sm.added_empty(), n & 1 ^ 1, condition);
    const bool arrives = condition & opaque(threadIdx.x & 31) == 0;
    if (kTellsItems) store_shared_if(sm.added(), section, arrives);  // all warps the same
    if (kOrdered) store_shared_if(sm.added() + 4, turn, arrives);
    barrier_arrive_if(sm.added_full(), arrives);
  }
  /// kSends: the warp that does. It reads the loader's notes itself, and so awaits a turn while dQ is still being
  /// computed. send(sm, number, lane): for a whole warp, begins to add what is staged to the dQ of row tile `number`.
  /// PERF: told by consumers which row tile and turn is next, 16 heads of 8K took 1.05 of the time (D 128, H200), causal
  /// 16K 1.06, 1K 1.03, windows 1.02 and 1.06, and these had no registers to read notes early.
  template <class Send>
  JALI_DEVICE static void send_sums(const BackwardArgs& a, const Shared& sm, Send send) {
    const i32 lane = threadIdx.x & 31;
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      i32 flags, number, row, h;
      Tiles::next_note(sm, n, flags, number, row, h);
      const i32 turn = Tiles::turn_of_note(sm, n);
      barrier_arrive_if(sm.note_empty(n), lane == 0);
      if (flags & Tiles::kEnd) {
        hand_over(sm, kNone, kNone, n, true);
        break;
      }
      await_count(a.turns + number, turn * kConsumerWarps, 0);
      barrier_wait(sm.staged_full(), n & 1);
      const i32 section = load_shared(sm.staged());
      send(sm, number, lane);
      bulk_wait_read();
      __syncwarp();
      barrier_arrive_if(sm.staged_empty(), lane == 0);
      bulk_wait();
      __syncwarp();
      hand_over(sm, section, number, n, true);
    }
  }
  /// Until the copy engine has read the last dQ, and the n-th has a place.
  JALI_DEVICE static void await_place(const Shared& sm, u32 n) {
    if constexpr (kSends) {
      barrier_wait(sm.staged_empty(), n & 1 ^ 1);
    } else {
      bulk_wait_read();
    }
  }
  /// kSends: hands over this warp's part of a dQ, if `condition`. section: of the key tile, if this is the last one of
  /// that, else kNone. All consumer warps call it alike.
  JALI_DEVICE static void hand_over_dq(const Shared& sm, i32 section, bool condition) {
    const bool arrives = condition & opaque(threadIdx.x & 31) == 0;
    store_shared_if(sm.staged(), section, arrives);
    barrier_arrive_if(sm.staged_full(), arrives);
  }
  /// After the last key tile.
  JALI_DEVICE static void end(const Shared& sm, u32 items, u32 steps) {
    if constexpr (kTells && !kSends) {
      hand_over(sm, kNone, kNone, kOrdered ? steps : items, true);
    }
  }
  /// Says that this warp's dQ of a key tile, the n-th, is added. PERF: where the fence is here, it comes when
  /// the next key tile is all but done, since it waits for stores of dk and dv, too. The loader is at most two
  /// items ahead: it leaves the slot alone.
  JALI_DEVICE static void end_item(const BackwardArgs& a, const Shared& sm, const Item& item,
                                   u32 n) {
    if constexpr (kTellsItems) {
      __syncwarp();
      hand_over(sm, item.section, kNone, n, true);
    } else {
      fence_device();
      fence_proxies();
      __syncwarp();
      add_if(a.added + item.section, 1, opaque(threadIdx.x & 31) == 0);
    }
  }
  /// This warp's 16 rows and kCols columns of a dQ, for the copy engine, in the order in which dq_sum has them; after
  /// await_place().
  template <i32 kCols = 64>
  JALI_DEVICE static void stage_dq(u32 to, const float* dq, i32 lane) {
    __syncwarp();  // what lay there was read, by this warp, too
#pragma unroll
    for (i32 j = 0; j < kCols / 8; ++j) store_four(to + j * 512 + lane * 16, dq + 4 * j);
    fence_async();
    __syncwarp();
  }
  /// The counter of row tile `number`. kPair: each block has its own columns, and counters.
  JALI_DEVICE static i32 turn_place(i32 number) {
    if constexpr (!kPair) return number;
    return number * 2 + static_cast<i32>(cluster_rank());
  }
  /// Ends the turn at row tile `sent`, the n-th of this block, to whose dQ this warp has added (none: -1).
  /// kByEngine: by the copy engine.
  template <bool kByEngine>
  JALI_DEVICE static void end_turn(const BackwardArgs& a, const Shared& sm, i32& sent, u32 n) {
    if constexpr (!kConsumersWait) return;
    if (kByEngine) bulk_wait();
    if (!kTells) fence_device();
    __syncwarp();
    if constexpr (kTells) {
      hand_over(sm, kNone, turn_place(sent), n, sent >= 0);
    } else {
      add_if(a.turns + turn_place(max_of(sent, 0)), 1, sent >= 0 & opaque(threadIdx.x & 31) == 0);
    }
    sent = -1;
  }
  /// How many warps have added to a row tile.
  JALI_DEVICE static i32 turns_of(const BackwardArgs& a, i32 number) {
    return kConsumersWait ? glance(a.turns + turn_place(number)) : 0;
  }
  /// Waits for the key tiles before this one in row tile `number`, whose dQ is sent next if it is due;
  /// turns: how many had added to it before.
  JALI_DEVICE static void wait_turn(const BackwardArgs& a, bool due, i32 number, i32 turn,
                                    i32 turns, i32& sent) {
    if (!kConsumersWait) return;
    await_count(a.turns + turn_place(number), due ? turn * kConsumerWarps : 0, turns);
    sent = due ? number : -1;
  }
};

}  // namespace jali::tile
