#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/executor.h"
#include "lookup/batch.h"
#include "lookup/group.h"
#include "lookup/slots_ahead.h"

namespace recstore {

// Rows that are stored outside a table.
struct RowsElsewhere {
  const int64_t* ids = nullptr;  // (n,), ascending
  int64_t n = 0;
  const char* rows = nullptr;  // each row has the same layout as in the table
  int64_t stride = 0;          // bytes between two rows

  const char* find(int64_t id) const;  // null if the id has no row here
};

// An evaluation lookup: looks up a batch and pools it. An id without a row reads as zeros or as its initial row; no
// table changes. The function shares the tables of the group with other readers, from its begin to its end: the rows
// are those of one moment.
// out: (bags, columns). elsewhere: one entry for each table, or empty.
// Throws InvalidArgument if the offsets do not ascend from 0 to n_ids or a table is closed, OutOfMemory.
void read(const Group& group, const Batch& batch, float* out, Executor& executor,
          const std::vector<RowsElsewhere>& elsewhere = {});

// The output of a training lookup that has begun without one: an id without a row reads as its initial row. The
// function shares the tables. out: (bags, columns).
void read_trained(const Group& group, const Batch& batch, float* out, Executor& executor);

class Lookup;

// A training lookup, which is one step of the tables: every id without a row gets a row if admission permits it. Rows
// may be evicted to make room, and expired rows are removed. The constructor does everything that can fail; if
// commit() is not called, the destructor undoes it. The caller holds the locks of the group throughout.
class TrainingLookup {
 public:
  // slots: (n_ids,), receives the slot of every id. An id that admission refuses reads as its initial row, and its slot
  // is kNoSlot. out: (bags, columns), or null if only the step is wanted. Both, the group, and the arrays of the batch
  // must outlive this object. ahead: null, or the slots of a batch that resembles this one; `slots` then contains them
  // already.
  // Throws InvalidArgument if the offsets do not ascend from 0 to n_ids or a table has no room, OutOfMemory.
  TrainingLookup(const Group& group, const Batch& batch, Slot* slots, float* out, Executor& executor,
                 const SlotsAhead* ahead = nullptr);
  TrainingLookup(TrainingLookup&& other) noexcept;
  ~TrainingLookup();
  // Changes the tables and their counters; out and slots are complete afterwards.
  void commit() noexcept;

 private:
  std::unique_ptr<Lookup> lookup_;
};

}  // namespace recstore
