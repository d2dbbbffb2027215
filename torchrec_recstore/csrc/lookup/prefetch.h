#pragma once

#include <cstdint>
#include <vector>

#include "base/executor.h"
#include "lookup/group.h"

namespace recstore {

// Resolves the ids of a batch to slots ahead of its training lookup, table by table, and makes missing rows. Tables
// whose bounds limit new rows get none: their steps have to decide in order which rows are made and which rows are
// evicted. The group keeps the slots; the training lookup of the same ids in this group takes them (see ComingBatches).
// ids: (n_ids,), those of the first feature first; counts: the number of ids of each feature.
// Throws InvalidArgument if the counts do not match the ids or a table is closed, OutOfMemory.
void prefetch(const Group& group, const int64_t* ids, int64_t n_ids, const std::vector<int64_t>& counts,
              Executor& executor);

}  // namespace recstore
