// Left folds in rank order, chosen at run time by what the processor has.
#pragma once

#include "dtypes.h"

namespace bireme {

// dsts[d][i] = srcs[0][i] op srcs[1][i] op ... for every d and every i < count. A destination may
// be the same as a source, never partly overlap one. Half types are held in float and rounded once.
// With `stream` the results go past the cache; they are fenced when the call returns.
using Fold = void (*)(void* const* dsts, u32 dst_count, const void* const* srcs, u32 src_count,
                      u64 count, bool stream);

Fold fold_for(DType dtype, Reduction reduction);
const char* fold_isa();

}  // namespace bireme
