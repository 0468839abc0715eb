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

/// Where softcap goes by two terms, arguments of tanh are up to this: they are off by 2^-10.6 of the score at most,
/// tanh.approx by 2^-11.
constexpr double kMostOfTanh = 0.46;
/// A power of two as a pair of it in bf16.
u32 bf16_pair(double power);
/// For x from 0 to 1, tanh(end x) is nearly x (terms[0] + terms[1] x²).
void terms_of_tanh(double end, double (&terms)[2]);

}  // namespace jali::cuda
