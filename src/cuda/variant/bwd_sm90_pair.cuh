// Backward, sm_90a: as bwd_sm90_wide.cuh, but the two blocks of a cluster share key tiles of 128 keys.
//
// Speed     H100, bf16, H8 16K, a whole pass, TFLOP/s (cuDNN): D 256 full 593 (344), causal 602 (371).
// Serves    head dims 193 to 256, unless deterministic; any mask, and options but for softcap beside the gradient of a
//           bias of keys (bwd_sm90_pair.cpp).
// Idea      A block of bwd_sm90_wide.cuh adds dQ of 64 keys to the sums in L2, whose entries that keeps busy. Here
//           each block has 64 of the tile's keys, for S, P, dP, dS, dV and dK; but of dQ it adds half of the columns,
//           for all 128 keys, half as much in all.
// Roles     as there; each side has 64 columns of dQ, at D up to 192 the key side 32. What the key side has is
//           added by the copy engine.
// Shared    as there, and dS of the other block, 2 buffers; 128 columns of the other block's K; the key side's dQ. In
//           return, there is one stage of dO, and dS comes in place of the P that it was made from. At D = Dv = 256
//           227 KB, all that there is.
// Barriers  as there, and o_empty: dO was read, one arrival a consumer warp. peer_full: the other block's dS is here,
//           copied by its key side, each warp its own part. peer_done: the other block has multiplied this block's dS,
//           one arrival a consumer warp there. The value side writes P of step n + 2 when the other block has
//           multiplied dS of step n, and all warps of its own one are done with step n + 1. told_full, told_empty: the
//           number of the next key tile, which the first block takes from the counter for both.
// Options   P and dS lie apart, as there, in the place of the key side's dQ, which it adds by itself; the key side
//           waits for peer_done before it writes dS.
#pragma once

#include "cuda/variant/bwd_sm90_wide.cuh"

#if defined(__CUDACC_RTC__)
namespace jali::cuda {

/// As BackwardWide; not kOrdered.
template <class T, i32 kD, i32 kDv, class M, bool kOrdered = false,
          ScoreOptions kOptions = ScoreOptions{}, BiasGradients kWanted = BiasGradients{},
          bool kForcesMap = false>
using BackwardPair = BackwardWide<T, kD, kDv, M, kOrdered, kOptions, kWanted, kForcesMap, true>;

}  // namespace jali::cuda
#endif
