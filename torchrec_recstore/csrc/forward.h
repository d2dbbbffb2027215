#pragma once

#include <cstdint>
#include <vector>

#include "arrivals.h"
#include "executor.h"
#include "group.h"

namespace recstore {

// What a training forward leaves for its backward, beside the slots.
struct StepResult {
  std::vector<uint32_t> steps;  // one a table: the number of the step
};

// Rows that lie outside of a table.
struct RowsElsewhere {
  const int64_t* ids = nullptr;  // (n,), ascending
  int64_t n = 0;
  const char* rows = nullptr;    // each as it lies in the table
  int64_t stride = 0;            // bytes from one to the next

  const char* find(int64_t id) const;  // null where there is none
};

// Everything behind relies on it: a run of bags must not reach into another's positions.
// Throws InvalidArgument for offsets that do not ascend from 0 to the number of ids.
void check_offsets(const Batch& batch, int64_t features, Executor& executor);

// Looks up a batch and pools it. The caller holds the group's locks.
//
// train: every id without a row gets one, admission permitting, and the slot of every id is kept in `slots`; all or
// nothing. An id that is held back reads as its initial row, and has kNoSlot. Otherwise nothing changes, and an id
// without a row reads as zeros or as its initial row.
// slots: (n_ids,); out: (bags, columns), both the caller's.
// elsewhere: of each table, for an evaluation lookup; or none.
// Throws InvalidArgument for offsets that do not ascend from 0 to n_ids, or where there is no room, OutOfMemory.
StepResult lookup(const Group& group, const Batch& batch, bool train, Slot* slots, float* out, Executor& executor,
                  const std::vector<RowsElsewhere>& elsewhere = {});

// Throws what a training lookup of the batch would throw for want of room in a table with bounds; changes nothing but
// slots and out. The caller holds the group's locks.
void check_room(const Group& group, const Batch& batch, Slot* slots, float* out, Executor& executor);

// Finds the slot of each id of one table, kNoSlot for an id without a row.
void find(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor);

// The ids that have no row, all occurrences, in the order of the ids.
std::vector<Miss> find_missing(const Table& table, const int64_t* ids, int64_t n, Executor& executor);

// As find(), and makes rows for the ids that have none; those that admission holds back keep kNoSlot.
// Throws InvalidArgument where there is no room, OutOfMemory.
void find_or_insert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival);

}  // namespace recstore
