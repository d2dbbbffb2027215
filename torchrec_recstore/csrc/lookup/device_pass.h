#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "lookup/forward.h"
#include "lookup/pass.h"
#include "rows/arena_row.h"

namespace recstore {

// The rows between a table and a device; see DeviceSlots. A row of an array has the layout of an arena. The caller
// holds the lock of the table, which has device slots: shared for the first function, alone for the others.

// Copies rows [begin, end) of those that the plan of a table takes to the device. out: (end - begin, stride). A row
// that has left the table since is zeros.
void stage_planned(const Table& table, int64_t begin, int64_t end, float* out);
// Writes the rows that were in flight. rows: (n, stride), in the order of Plan::leaving. Throws InvalidArgument if n
// rows are not in flight.
void land(Table& table, const float* rows, int64_t n);
// Writes dirty rows. dirty: (n,) device slots. rows: (n, stride). Throws InvalidArgument if a device slot is out of
// range.
void settle_device_slots(Table& table, const int32_t* dirty, int64_t n, const float* rows);

// The rows of one table that a batch reads from a staging array, because they have no device slot. Each id has one row.
class StagedRows {
 public:
  // first: number of rows that the staging array has already.
  explicit StagedRows(int64_t first) : first_(first) {}

  // Returns -2 - r, where r is the row of the id in the staging array. Throws std::bad_alloc.
  int32_t number(int64_t id, Slot slot);
  const std::vector<int64_t>& ids() const { return ids_; }
  const std::vector<int64_t>& slots() const { return slots_; }  // kNoSlot for an id without a row

 private:
  int64_t first_;
  std::unordered_map<int64_t, int64_t> rows_;
  std::vector<int64_t> ids_;
  std::vector<int64_t> slots_;
};

// Where an evaluation lookup on the device reads the rows of ids (n,). out: (n,), receives the number of a device slot,
// -1 for an id that reads as zeros, or the number of a staged row. first: the number of the table's first device slot.
// stages_missing: whether ids without a row are staged although they do not read as their initial row. Throws
// InvalidArgument if rows are in flight, std::bad_alloc. The caller shares the lock of the table.
void find_on_device(const Table& table, const int64_t* ids, int64_t n, int64_t first, bool stages_missing,
                    StagedRows& staged, int32_t* out, Executor& executor);
// Writes staged rows, the results of StagedRows. An id without a row reads as its row elsewhere, as its initial row if
// `initial` or the options of the table say so, or as zeros. out: (n, stride). The caller shares the lock of the table.
void stage_rows(const Table& table, const int64_t* slots, const int64_t* ids, int64_t n, bool initial,
                const RowsElsewhere& elsewhere, float* out);

// The table's device slots. Throws InvalidArgument if it has none.
DeviceSlots& device_slots(const Table& table);
// The frequencies of the table's rows at its present step.
DeviceSlots::Frequencies frequencies_in(const Table& table);

}  // namespace recstore
