#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/executor.h"
#include "bounds/arrivals.h"
#include "lookup/batch.h"
#include "lookup/insertion.h"
#include "rows/table.h"

namespace recstore {

// For all functions: ids are (n,), and the caller holds the lock of the table, shared if the table is const.

// Writes the slots of the ids at the positions [begin, end) to the same positions of `slots`: kNoSlot for an id without
// a row. Appends these ids to `misses`, in the order of the positions.
void resolve(const Table& table, const Routing& routing, const int64_t* ids, int64_t begin, int64_t end, Slot* slots,
             std::vector<Miss>& misses);

// Writes the slot of each id to slots (n,): kNoSlot for an id without a row.
void find(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor);

// Returns the slot of each id. Throws InvalidArgument if an id has no row.
std::vector<Slot> find_rows(const Table& table, const int64_t* ids, int64_t n, Executor& executor);

// Writes whether each id has a row to out (n,).
void contains(const Table& table, const int64_t* ids, int64_t n, bool* out, Executor& executor);

// Returns the ids that have no row, with all occurrences, in the order of the ids.
std::vector<Miss> find_missing(const Table& table, const int64_t* ids, int64_t n, Executor& executor);

// Like find(), but makes rows for the ids that have none. The ids that admission refuses keep kNoSlot. The constructor
// does everything that can fail; if commit() is not called, the destructor undoes it.
class Upsert {
 public:
  // Throws InvalidArgument if the table has no room, OutOfMemory.
  Upsert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival);
  Upsert(const Upsert&) = delete;
  Upsert& operator=(const Upsert&) = delete;
  ~Upsert();
  void commit() noexcept;

 private:
  void insert(std::vector<Miss> misses, int64_t n, Arrival arrival);

  Table& table_;
  Slot* slots_;
  Executor& executor_;
  std::optional<Arrivals> arrivals_;
  std::optional<Insertion> insertion_;
  std::optional<InsertionTasks> tasks_;
  bool committed_ = false;
};

// Makes an Upsert and commits it.
void find_or_insert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival);

}  // namespace recstore
