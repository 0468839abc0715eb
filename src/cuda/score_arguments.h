// The options of a call, as kernels are compiled for them and as they are handed over.
#pragma once

#include <string>

#include "cuda/call.h"
#include "cuda/tile/scores.h"

namespace jali::cuda {

ScoreOptions score_options(const AttentionProblem& problem);
/// Whether `count` keys of a row, the first one a multiple of it, can be loaded and stored as one.
bool in_groups(const CellView& cells, i64 count);
/// As a C++ expression.
std::string text_of(const ScoreOptions& options);
/// May launch what brings the sinks and the seed into the form that kernels read.
ScoreArgs score_arguments(Call& call);

}  // namespace jali::cuda
