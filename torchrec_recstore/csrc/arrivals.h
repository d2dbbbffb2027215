#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "eviction.h"
#include "executor.h"
#include "insertion.h"
#include "table.h"

namespace recstore {

// Why ids come to a table that has no rows for them: a step looks them up, which counts as a sighting; an update, which
// is no sighting and makes no row where sightings count; a write, or a row that comes back from the cold store, which
// admission does not hold back and whose rows the caller writes.
enum class Arrival { kLookup, kUpdate, kWrite, kReturn };

// Whether rows are given their initial weights.
inline bool initialises(Arrival arrival) { return arrival == Arrival::kLookup || arrival == Arrival::kUpdate; }

// Ids without a row that come to a table with bounds: which of them get one, and which rows leave for it.
class Arrivals {
 public:
  // misses: of the batch, in its order; their slots are kNoSlot.
  Arrivals(Table& table, std::vector<Miss> misses, Arrival arrival);

  // Decides, and changes nothing. pin_batch: adds the slots that the batch has found.
  // Throws InvalidArgument where there is no room, OutOfMemory.
  void plan(const std::function<void(SlotSet&)>& pin_batch, Executor& executor);
  // The misses that get a row, to be inserted after plan().
  std::vector<Miss> take_admitted() { return std::move(admitted_); }
  // The rows that leave for those that come.
  const std::vector<Leaver>& leavers() const { return leavers_; }
  // The rows leave; of their slots the first `reused` are those of new rows. Table::reserve_leave() has made room.
  void make_room(int64_t reused) noexcept;
  // When the insertion has been filled: counts, and notes who has been seen.
  void finish(int64_t rows_made) noexcept;

  // Distinct ids that get no row.
  int64_t refused() const { return refused_; }

 private:
  void choose_leavers(int64_t new_rows, const std::function<void(SlotSet&)>& pin_batch, Executor& executor);

  Table& table_;
  Arrival arrival_;
  int64_t new_rows_ = 0;         // distinct ids among admitted_
  std::vector<Miss> misses_;
  std::vector<Miss> admitted_;
  int64_t refused_ = 0;
  std::vector<int64_t> seen_;  // distinct ids, where sightings are counted
  std::vector<Leaver> leavers_;
};

// Throws InvalidArgument where a table's bound is less than `rows`, the rows that are needed at once.
void check_working_set(const Table& table, int64_t rows);

// Whether an id without a row would get one.
bool is_admitted(const Table& table, int64_t id, Arrival arrival);

}  // namespace recstore
