// Backward, sm_90a: as bwd_sm90_wide.cuh, but the two blocks of a cluster share key tiles of 128 keys.
//
// Speed     H100, bf16, a whole pass, TFLOP/s (cuDNN), 16K: D 256 H8 full 593 (344), causal 602 (371);
//           D 192 H16 causal 537 (302).
// Serves    D 129 to 256 with any Dv up to 256; any mask and option, but where both are above 192 not softcap beside the
//           gradient of a bias of keys (bwd_sm90_pair.cpp).
// Idea      A block of bwd_sm90_wide.cuh adds dQ of 64 keys to the sums in L2, whose entries that keeps busy. Here
//           each block has 64 of the tile's keys, for S, P, dP, dS, dV and dK; but of dQ it adds half of the columns,
//           for all 128 keys, half as much in all.
// Roles     as there; each side has 64 columns of dQ, at D up to 192 the key side 32. They are added by the copy
//           engine, where there is room for them on their way.
// Shared    as there, and dS of the other block, 2 buffers; 128 columns of the other block's K; dQ of the key side, and
//           of the value side. In return, there is one stage of dO. D 193 to 256 beside Dv above 128 lacks room: dS comes in
//           place of the P that it was made from, and where Dv is above 192, too, the value side adds by itself. At D =
//           Dv = 256 227 KB, all that there is.
// Barriers  as there, and o_empty: dO was read, one arrival a consumer warp. peer_full: the other block's dS is here,
//           copied by its key side, each warp its own part. peer_done: the other block has multiplied this block's dS,
//           one arrival a consumer warp there; the key side waits for it before it writes dS of step n + 2, and where dS
//           comes in place of P the value side before it writes P, and for all warps of its own block to be done with
//           step n + 1. told_full, told_empty: the number of the next key tile, which the first block takes from the
//           counter for both.
// Turns     (kOrdered) each block counts, and waits for, its own columns alone; a warp of the loader's tells others.
// Options   where dS has no place of its own, P and dS lie apart in that of dQ, which both sides add by themselves.
#pragma once

#include "cuda/variant/bwd_sm90_wide.cuh"

#if defined(__CUDACC_RTC__)
namespace jali::cuda {

/// As BackwardWide.
template <class T, i32 kD, i32 kDv, class M, bool kOrdered = false,
          ScoreOptions kOptions = ScoreOptions{}, BiasGradients kWanted = BiasGradients{},
          bool kForcesMap = false>
using BackwardPair = BackwardWide<T, kD, kDv, M, kOrdered, kOptions, kWanted, kForcesMap, true>;

}  // namespace jali::cuda
#endif
