#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "arrivals.h"
#include "executor.h"
#include "group.h"
#include "insertion.h"

namespace recstore {

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

// Looks up a batch and pools it; an id without a row reads as zeros or as its initial row. The caller holds the group's
// locks.
// slots: (n_ids,), what it finds them by; out: (bags, columns), both the caller's.
// elsewhere: of each table; or none.
// Throws InvalidArgument for offsets that do not ascend from 0 to n_ids, OutOfMemory.
void read(const Group& group, const Batch& batch, Slot* slots, float* out, Executor& executor,
          const std::vector<RowsElsewhere>& elsewhere = {});

class Lookup;

// A step: a lookup in which every id without a row gets one, admission permitting, for which rows may leave; and rows
// that have grown too old leave. All that can fail is done by the constructor, and undone where commit() is not called.
// The caller holds the group's locks all the while.
class TrainingLookup {
 public:
  // slots: (n_ids,), where the slot of every id is kept; an id that admission holds back reads as its initial row, and
  // has kNoSlot. out: (bags, columns). They, the group and what the batch points to must outlive this.
  // Throws InvalidArgument for offsets that do not ascend from 0 to n_ids, or where there is no room, OutOfMemory.
  TrainingLookup(const Group& group, const Batch& batch, Slot* slots, float* out, Executor& executor);
  TrainingLookup(TrainingLookup&& other) noexcept;
  ~TrainingLookup();
  // Changes the tables, and counts; out and slots are complete then.
  void commit() noexcept;

 private:
  std::unique_ptr<Lookup> lookup_;
};

// Finds the slot of each id of one table, kNoSlot for an id without a row.
void find(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor);

// The ids that have no row, all occurrences, in the order of the ids.
std::vector<Miss> find_missing(const Table& table, const int64_t* ids, int64_t n, Executor& executor);

// As find(), and makes rows for the ids that have none; those that admission holds back keep kNoSlot. All that can fail
// is done by the constructor, and undone where commit() is not called. The caller holds the lock all the while.
class Upsert {
 public:
  // Throws InvalidArgument where there is no room, OutOfMemory.
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

// Upsert, at once.
void find_or_insert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival);

}  // namespace recstore
