#pragma once

#include <cstdint>
#include <vector>

#include "base/executor.h"
#include "index/sets.h"
#include "rows/table.h"

namespace recstore {

// A row that is evicted or expires.
struct Leaver {
  int64_t id;
  Slot slot;
  bool is_in_index = true;  // false when Table::leave() has removed its entry
};

// Returns the `count` rows that the table's eviction policy ranks lowest, among the rows whose slots are not in `kept`;
// fewer if there are fewer such rows. A hash of the id breaks ties, so that the result depends neither on threads nor
// on slots nor on the columns of the shard. The caller holds the lock.
//
// A scan of the bookkeeping, which is small and contiguous, selects the candidates, which are usually a few more than
// `count`. A scan of the index then finds their ids. This takes time for the whole table; see EvictionQueue.
std::vector<Leaver> least_rows(const Table& table, const SlotSet& kept, int64_t count, Executor& executor);

// Returns how many rows are evicted together when `needed` rows do not fit. A cold store takes many rows at once, so at
// least a fixed part of max_rows moves there.
int64_t leaving_at_once(const Table& table, int64_t needed);

// Returns the step such that the rows whose last step is earlier expire in step number `step`, by Bounds::expiry; 0 if
// no rows expire in this step. Only the number decides, so that all shards, and a run that was resumed, remove the same
// rows. Of Bounds::expiry_time, the table's wall_clock() decides.
int64_t expired_before(const Table& table, int64_t step);
// Returns the rows whose last step is earlier than `before`, among the rows whose slots are not in `kept`, by the parts
// of the index. The caller holds the lock.
std::vector<Leaver> expired_rows(const Table& table, int64_t before, const SlotSet& kept, Executor& executor);

// Returns the rows by the parts of the index; within a part they keep their order.
std::vector<Leaver> by_part(const Index& index, const std::vector<Leaver>& leavers);

// Returns the slots of rows that pending passes refer to. The caller holds the lock.
SlotSet pinned_slots(const Table& table);

}  // namespace recstore
