// The backward kernels for Hopper over dims and masks.
// ptxas -O1, too: see KernelText::quick.
// cut, too: see JALI_CUT.
#include "nvrtc/bwd.h"

using CausalPrefix = And<leaf::Causal, leaf::Prefix>;

BACKWARD(Backward, full_128, BF16, 128, 128, NoMask, false)
BACKWARD(Backward, causal_64, FP16, 64, 64, leaf::Causal, false)
BACKWARD(Backward, streaming_128, FP16, 128, 128, Streaming, false)
BACKWARD(Backward, predicate_128, BF16, 128, 128, predicate::Neighborhood, false)
BACKWARD(Backward, mixed_96, BF16, 96, 80, leaf::Window, false)
BACKWARD(BackwardWide, full_128_192, FP16, 128, 192, NoMask, false)
BACKWARD(BackwardWide, causal_128_256, BF16, 128, 256, leaf::Causal, false)
BACKWARD(BackwardWide, predicate_64_128, BF16, 64, 128, predicate::Neighborhood, false)
BACKWARD(BackwardWide, window_64_256, BF16, 64, 256, leaf::Window, false)
BACKWARD(BackwardPair, pair_256, BF16, 256, 256, NoMask, false)
BACKWARD(BackwardPair, pair_window_208, FP16, 208, 256, leaf::Window, false)
BACKWARD(BackwardPair, pair_predicate_256, BF16, 256, 256, predicate::Neighborhood, false)
BACKWARD(BackwardPair, pair_192_128, BF16, 192, 128, leaf::Causal, false)
BACKWARD(BackwardPair, pair_streaming_144_256, FP16, 144, 256, Streaming, false)
BACKWARD(BackwardPair, pair_256_192, FP16, 256, 192, leaf::Window, false)
BACKWARD(BackwardPair, pair_documents_256, BF16, 256, 256, Documents, false)
BACKWARD(Backward, ordered_128, BF16, 128, 128, leaf::Causal, true)
BACKWARD(Backward, ordered_streaming_128, BF16, 128, 128, Streaming, true)
BACKWARD(BackwardWide, ordered_128_256, BF16, 128, 256, CausalPrefix, true)
BACKWARD(BackwardPair, ordered_192, BF16, 192, 192, CausalPrefix, true)
BACKWARD(BackwardPair, ordered_256, BF16, 256, 256, Streaming, true)
BACKWARD(Backward, ordered_64, FP16, 64, 64, Streaming, true)
BACKWARD(Backward, ordered_predicate_128, BF16, 128, 128, predicate::Neighborhood, true)
BACKWARD(Backward, documents_128, BF16, 128, 128, Documents, false)
BACKWARD(Backward, padded_128, BF16, 128, 128, Padded, false)
BACKWARD(Backward, ordered_key_intervals_128, BF16, 128, 128, KeyIntervals, true)
BACKWARD(BackwardPair, key_intervals_256, BF16, 256, 256, KeyIntervals, false)
