#pragma once

#include <cstdint>
#include <vector>

#include "executor.h"
#include "group.h"

namespace recstore {

// What a training forward leaves for its backward, beside the slots.
struct StepResult {
  std::vector<uint32_t> steps;  // one a table: the number of the step
};

// Looks up a batch and pools it. The caller holds the group's locks.
//
// train: every id without a row gets one, and the slot of every id is kept in `slots`; all or
// nothing. Otherwise nothing changes, and an id without a row reads as zeros or as its initial row.
// slots: (n_ids,); out: (bags, columns), both the caller's.
// Throws InvalidArgument for offsets that do not ascend from 0 to n_ids, OutOfMemory.
StepResult lookup(const Group& group, const Batch& batch, bool train, Slot* slots, float* out, Executor& executor);

// Finds the slot of each id of one table, kNoSlot for an id without a row.
void find(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor);

// As find(), and makes rows for the ids that have none.
// initialise: whether these get their initial weights; else the caller writes them.
void find_or_insert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, bool initialise = true);

}  // namespace recstore
