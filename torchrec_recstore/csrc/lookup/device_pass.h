#pragma once

#include <cstdint>
#include <vector>

#include "lookup/pass.h"
#include "rows/arena_row.h"

namespace recstore {

// The rows between a table and a device; see DeviceSlots. A row of an array has the layout of an arena. The caller
// holds the lock of the table, which has device slots: shared for the first function, alone for the others.

// Copies the rows that the plan of a table takes to the device. out: (rows of the plan, stride). A row that has left
// the table since is zeros.
void stage_planned(const Table& table, float* out);
// Writes the rows that were in flight. rows: (n, stride), in the order of Plan::leaving. Throws InvalidArgument if n
// rows are not in flight.
void land(Table& table, const float* rows, int64_t n);
// Writes dirty rows. dirty: (n,) device slots. rows: (n, stride). Throws InvalidArgument if a device slot is out of
// range.
void settle_device_slots(Table& table, const int32_t* dirty, int64_t n, const float* rows);

// The table's device slots. Throws InvalidArgument if it has none.
DeviceSlots& device_slots(const Table& table);

}  // namespace recstore
