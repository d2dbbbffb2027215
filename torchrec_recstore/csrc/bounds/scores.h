#pragma once

#include <cstdint>

#include "base/executor.h"
#include "rows/table.h"

namespace recstore {

// For both functions: ids are (n,), scores are (n,) and finite, and the table evicts by Eviction::kLeastScored. The
// caller holds the lock of the table alone. They throw InvalidArgument if a score is not finite or the table evicts
// otherwise, std::bad_alloc; no score has changed then.

// Sets the scores of rows. If an id occurs more than once, its last score is set. Ids without a row are ignored.
// Returns the number of rows whose score was set.
int64_t set_scores(Table& table, const int64_t* ids, int64_t n, const float* scores, Executor& executor);

// Sets the scores in images (n, image bytes) of rows in the cold store, which the caller then writes there. A delta
// checkpoint finds them as rows that have changed now and have left memory. ids: distinct.
void set_image_scores(Table& table, const int64_t* ids, int64_t n, const float* scores, char* images);

}  // namespace recstore
