#pragma once

#include <cstdint>
#include <vector>

#include "executor.h"
#include "sets.h"
#include "table.h"

namespace recstore {

// A row that is to leave.
struct Leaver {
  int64_t id;
  Slot slot;
};

// The `count` rows that are least by the table's eviction policy, among those not in `kept`; at most as many as there
// are. Among equals a hash of the id decides, so that the same ids in the same steps give the same rows, whatever the
// threads, the slots and the columns of the shard. The caller holds the lock.
//
// A pass over the bookkeeping, which is small and lies together, finds the rows that come into question, mostly a little
// more than `count`; one through the index finds their ids.
std::vector<Leaver> least_rows(const Table& table, const SlotSet& kept, int64_t count, Executor& executor);

// How many rows leave where `needed` more are wanted than fit: a pass through the table is worth a part of it.
int64_t leaving_at_once(const Table& table, int64_t needed);

// Whether rows that are too old are to leave after step number `step`, which decides alone, so that all shards, and a run
// that was resumed, let the same rows go.
bool is_expiry_step(const Table& table, int64_t step);
// Rows that no step up to number `step` has looked up for too long, among those not in `kept`. The caller holds the lock.
std::vector<Leaver> expired_rows(const Table& table, int64_t step, const SlotSet& kept, Executor& executor);

// The slots of rows that pending passes refer to. The caller holds the lock.
SlotSet pinned_slots(const Table& table);

}  // namespace recstore
