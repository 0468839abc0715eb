// The forward kernel for Hopper over dims and masks.
// ptxas -O1, too: see KernelText::quick.
// cut, too: see JALI_CUT.
#include "nvrtc/fwd.h"

FORWARD(full_128, BF16, 128, 128, NoMask)
FORWARD(causal_128, FP16, 128, 128, leaf::Causal)
FORWARD(streaming_128, BF16, 128, 128, Streaming)
FORWARD(documents_128, BF16, 128, 128, Documents)
FORWARD(predicate_128, BF16, 128, 128, predicate::Neighborhood)
FORWARD(predicate_256, BF16, 256, 256, predicate::Neighborhood)
FORWARD(predicate_64_256, BF16, 64, 256, CausalNeighborhood)
FORWARD(full_32, BF16, 32, 32, NoMask)
FORWARD(documents_32, BF16, 32, 32, Documents)
FORWARD(causal_64, BF16, 64, 64, leaf::Causal)
FORWARD(window_64, FP16, 64, 64, leaf::Window)
FORWARD(documents_64, BF16, 64, 64, Documents)
FORWARD(causal_48, BF16, 48, 48, leaf::Causal)
FORWARD(full_80, BF16, 80, 80, NoMask)
FORWARD(full_96, BF16, 96, 96, NoMask)
FORWARD(documents_112, FP16, 112, 112, Documents)
FORWARD(causal_192, BF16, 192, 192, leaf::Causal)
FORWARD(causal_192_128, BF16, 192, 128, leaf::Causal)
FORWARD(full_160, FP16, 160, 160, NoMask)
FORWARD(full_256, BF16, 256, 256, NoMask)
FORWARD(causal_256, FP16, 256, 256, leaf::Causal)
FORWARD(full_64_256, BF16, 64, 256, NoMask)
FORWARD(full_256_64, BF16, 256, 64, NoMask)
