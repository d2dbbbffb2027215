#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/executor.h"
#include "bounds/eviction.h"
#include "lookup/insertion.h"
#include "rows/table.h"

namespace recstore {

// The reason why ids without a row arrive at a table.
enum class Arrival {
  kLookup,  // a step looks up the ids; this counts as a sighting
  kUpdate,  // an update; this is no sighting, and it makes no rows in a table that counts sightings
  kWrite,   // the caller writes the rows; admission does not apply
  kReturn,  // rows return from the cold store, and the caller writes them; admission does not apply
};

// Whether new rows get their initial weights; otherwise the caller writes them.
inline bool initialises(Arrival arrival) { return arrival == Arrival::kLookup || arrival == Arrival::kUpdate; }

// Ids without a row that arrive at a table with bounds. Decides which of the ids get a row, and which rows are evicted
// to make room.
class Arrivals {
 public:
  // misses: the misses of the batch, in its order; their slots are kNoSlot.
  Arrivals(Table& table, std::vector<Miss> misses, Arrival arrival);

  // Makes the decision and changes nothing. pin_batch(pinned): adds the slots that the batch has found.
  // Throws InvalidArgument if the table has no room, OutOfMemory.
  void plan(const std::function<void(SlotSet&)>& pin_batch, Executor& executor);
  // The misses that get a row, grouped. Insert them after plan().
  DistinctMisses take_admitted() { return std::move(*admitted_); }
  // The rows that are evicted to make room.
  const std::vector<Leaver>& leavers() const { return leavers_; }
  // Evicts the leavers. The first `reused` of their slots already belong to new rows. Call Table::reserve_leave()
  // before.
  void make_room(int64_t reused, Executor& executor) noexcept;
  // Updates the counters and the sightings, after the insertion has been filled.
  void finish(int64_t rows_made, Executor& executor) noexcept;

  // Number of distinct ids that get no row.
  int64_t refused() const { return refused_; }

 private:
  // Takes the misses that get no row from misses_. Returns them.
  std::vector<Miss> hold_back(Executor& executor);
  void choose_leavers(int64_t new_rows, const std::function<void(SlotSet&)>& pin_batch, Executor& executor);

  Table& table_;
  Arrival arrival_;
  std::vector<Miss> misses_;
  std::optional<DistinctMisses> admitted_;
  int64_t refused_ = 0;
  std::vector<int64_t> seen_;  // distinct ids, if the table counts sightings, by its parts
  std::vector<Leaver> leavers_;
};

// Throws InvalidArgument if the table's max_rows is less than `rows`, the number of rows that are needed at once.
void check_working_set(const Table& table, int64_t rows);

// Whether an id without a row would get a row.
bool is_admitted(const Table& table, int64_t id, Arrival arrival);

}  // namespace recstore
