// The forward kernel for Hopper over options of the scores.
// cut, too: see JALI_CUT.
#include "nvrtc/fwd.h"

FORWARD(softcap, BF16, 128, 128, leaf::Causal, .softcap = true)
FORWARD(softcap_bounded, BF16, 128, 128, leaf::Causal, .softcap = true, .bounded = true)
FORWARD(softcap_bounded_64, BF16, 64, 64, NoMask, .softcap = true, .bounded = true)
FORWARD(softcap_bounded_causal_64, BF16, 64, 64, leaf::Causal, .softcap = true, .bounded = true)
FORWARD(softcap_bounded_dropout, BF16, 96, 96, Documents, .softcap = true, .sinks = true,
        .dropout = true, .bounded = true)
FORWARD(any_scale, BF16, 128, 128, leaf::Causal, .any_scale = true)
FORWARD(bias, BF16, 128, 128, leaf::Causal, .bias = BiasType::kHalf)
FORWARD(bias_eights, BF16, 128, 128, leaf::Causal, .bias = BiasType::kHalf, .bias_pairs = true,
        .bias_eights = true)
FORWARD(bias_pairs, BF16, 64, 64, NoMask, .bias = BiasType::kFloat, .bias_pairs = true)
FORWARD(alibi_sinks, FP16, 128, 128, leaf::Causal, .alibi = true, .sinks = true)
FORWARD(key_bias, BF16, 192, 192, leaf::Causal, .key_bias = BiasType::kFloat)
FORWARD(key_bias_wide, BF16, 128, 192, NoMask, .key_bias = BiasType::kHalf)
FORWARD(dropout, BF16, 128, 128, leaf::Causal, .dropout = true)
FORWARD(dropout_64, BF16, 64, 64, NoMask, .dropout = true)
FORWARD(everything, FP16, 128, 128, Documents, .softcap = true, .bias = BiasType::kFloat,
        .key_bias = BiasType::kHalf, .alibi = true, .sinks = true, .dropout = true, .keeps = true)
FORWARD(key_bias_64, BF16, 64, 64, NoMask, .key_bias = BiasType::kHalf)
FORWARD(key_bias_causal_64, BF16, 64, 64, leaf::Causal, .key_bias = BiasType::kHalf)
FORWARD(alibi_64, BF16, 64, 64, NoMask, .alibi = true)
FORWARD(alibi_streaming, BF16, 64, 64, Streaming, .alibi = true)
FORWARD(softcap_streaming, BF16, 64, 64, Streaming, .softcap = true)
FORWARD(key_bias_documents, FP16, 128, 128, Documents, .key_bias = BiasType::kHalf)
