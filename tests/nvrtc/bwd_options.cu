// The backward kernels for Hopper over options of the scores and gradients of biases.
// cut, too: see JALI_CUT.
#include "cuda/tile/backward_sums.h"
#include "nvrtc/bwd.h"

BACKWARD_OPTIONS(BackwardWide, any_scale, BF16, 128, 128, leaf::Causal, false, (.any_scale = true),
                 ())
BACKWARD_OPTIONS(Backward, softcap, BF16, 128, 128, Streaming, false, (.softcap = true), ())
BACKWARD_OPTIONS(Backward, softcap_96, BF16, 96, 96, NoMask, true, (.softcap = true), ())
BACKWARD_OPTIONS(Backward, alibi_sinks, FP16, 96, 96, leaf::Causal, true,
                 (.alibi = true, .sinks = true), ())
BACKWARD_OPTIONS(Backward, key_bias, BF16, 128, 128, leaf::Causal, false,
                 (.key_bias = BiasType::kFloat), (.keys = true))
BACKWARD_OPTIONS(Backward, alibi_dropout, FP16, 128, 128, Streaming, false,
                 (.alibi = true, .dropout = true, .saturates = true), ())
BACKWARD_OPTIONS(BackwardWide, softcap_key_bias, FP16, 64, 64, leaf::Window, false,
                 (.softcap = true, .key_bias = BiasType::kHalf, .dropout = true), (.keys = true))
BACKWARD_OPTIONS(Backward, row_bias, BF16, 64, 64, leaf::Causal, false, (.sinks = true),
                 (.rows = true))
BACKWARD_OPTIONS(Backward, dropout, BF16, 128, 128, leaf::Causal, true, (.dropout = true), ())
BACKWARD_OPTIONS(Backward, bias_pairs, BF16, 128, 128, leaf::Causal, false,
                 (.bias = BiasType::kHalf, .bias_pairs = true), (.cells = CellGradient::kPairs))
BACKWARD_OPTIONS(Backward, bias_eights, FP16, 128, 128, Streaming, false,
                 (.bias = BiasType::kHalf, .bias_pairs = true, .bias_eights = true),
                 (.cells = CellGradient::kFours))
BACKWARD_OPTIONS(Backward, bias_pairs_64, FP16, 64, 64, Streaming, false,
                 (.bias = BiasType::kHalf, .bias_pairs = true), (.cells = CellGradient::kPairs))
BACKWARD_OPTIONS(Backward, bias_eights_64, BF16, 64, 64, leaf::Causal, false,
                 (.bias = BiasType::kHalf, .bias_pairs = true, .bias_eights = true),
                 (.cells = CellGradient::kFours))
BACKWARD_OPTIONS(Backward, softcap_dropout_64, BF16, 64, 64, Documents, false,
                 (.softcap = true, .dropout = true), ())
BACKWARD_OPTIONS(Backward, softcap_64, BF16, 64, 64, leaf::Causal, false, (.softcap = true), ())
BACKWARD_OPTIONS(Backward, softcap_half_64, FP16, 64, 64, Streaming, false, (.softcap = true), ())
BACKWARD_OPTIONS(Backward, dropout_64, BF16, 64, 64, Documents, false,
                 (.dropout = true, .keeps = true), ())
BACKWARD_OPTIONS(Backward, key_bias_64, BF16, 64, 64, Documents, false,
                 (.key_bias = BiasType::kHalf), (.keys = true))
BACKWARD_OPTIONS(Backward, key_bias_full, BF16, 128, 128, NoMask, false,
                 (.key_bias = BiasType::kHalf), (.keys = true))
BACKWARD_OPTIONS(BackwardWide, bias, BF16, 128, 128, leaf::Causal, false, (.bias = BiasType::kHalf),
                 (.cells = CellGradient::kHalf))
BACKWARD_OPTIONS(BackwardWide, softcap_bias_64, FP16, 64, 64, Streaming, true,
                 (.softcap = true, .bias = BiasType::kFloat), (.cells = CellGradient::kFloat))
BACKWARD_OPTIONS(BackwardPair, dropout_256, BF16, 256, 256, leaf::Causal, false, (.dropout = true),
                 ())
BACKWARD_OPTIONS(BackwardPair, bias_dropout_256, BF16, 256, 256, leaf::Causal, false,
                 (.bias = BiasType::kHalf, .dropout = true), (.cells = CellGradient::kAdd))
BACKWARD_OPTIONS(BackwardPair, pair_softcap, BF16, 256, 256, Documents, false, (.softcap = true),
                 ())
BACKWARD_OPTIONS(BackwardPair, pair_key_bias, BF16, 256, 256, leaf::Causal, false,
                 (.key_bias = BiasType::kFloat, .dropout = true), (.keys = true))
BACKWARD_OPTIONS(BackwardPair, pair_softcap_bias, FP16, 256, 256, Streaming, false,
                 (.softcap = true, .bias = BiasType::kFloat), (.cells = CellGradient::kFloat))
BACKWARD_OPTIONS(BackwardWide, softcap_keys_256, BF16, 256, 256, leaf::Causal, false,
                 (.softcap = true, .key_bias = BiasType::kHalf), (.keys = true))
BACKWARD_OPTIONS(BackwardPair, ordered_dropout_192, BF16, 192, 192, leaf::Causal, true,
                 (.dropout = true, .keeps = true), ())
BACKWARD_OPTIONS(BackwardPair, pair_softcap_keys_192, BF16, 192, 256, Streaming, false,
                 (.softcap = true, .key_bias = BiasType::kHalf), (.keys = true))
BACKWARD_OPTIONS(BackwardPair, pair_many_256_128, FP16, 256, 128, leaf::Causal, false,
                 (.softcap = true, .bias = BiasType::kFloat, .alibi = true, .sinks = true,
                  .dropout = true),
                 (.cells = CellGradient::kAdd))
BACKWARD_OPTIONS(BackwardPair, everything, FP16, 192, 128, leaf::Causal, false,
                 (.softcap = true, .bias = BiasType::kFloat, .key_bias = BiasType::kHalf,
                  .alibi = true, .sinks = true, .dropout = true),
                 (.cells = CellGradient::kAdd, .keys = true))

extern "C" __global__ void __launch_bounds__(256)
    sum_tokens(const __grid_constant__ TokenGradient a) {
  tile::sum_tokens<ptx::BF16>(a);
}
extern "C" __global__ void __launch_bounds__(256)
    write_cells(const __grid_constant__ CellGradients a) {
  tile::write_cells<ptx::FP16>(a);
}
