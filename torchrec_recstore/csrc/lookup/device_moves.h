#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/executor.h"
#include "lookup/group.h"
#include "rows/arena_row.h"

namespace recstore {

// The rows that the plans of several tables move between the host and a device; see DeviceSlots. Rows are given table
// by table, without gaps; a row of a table has the stride of the table's arena. The functions lock the tables, one
// after the other, and throw InvalidArgument if a table is closed or has no device slots.
using Tables = std::vector<std::shared_ptr<Table>>;

// Number of floats of the rows that the plans copy to the device.
int64_t planned_floats(const Tables& tables);
// Copies the rows that the plans take to the device. out: (planned_floats(),). A row that has left its table since is
// zeros.
void stage_moves(const Tables& tables, float* out, Executor& executor);
// Number of floats of the rows that are in flight to the host.
int64_t floats_in_flight(const Tables& tables);
// Writes the rows in flight. rows: (floats_in_flight(),).
void land_moves(const Tables& tables, const float* rows, Executor& executor);
// Ends the plans, which have been carried out.
void commit_moves(const Tables& tables, Executor& executor);
// Ends the plans, of which nothing has been carried out. A closed table has none.
void abort_moves(const Tables& tables) noexcept;

// Plans that the rows of the newest prefetched batch of a group have device slots, as for a pass that begins now. Ids
// without a row, and those whose row has moved or left since the prefetch, are skipped, and so is a table whose rows do
// not fit on the device. Returns whether a table has a plan. Call it after land_moves(). Throws std::bad_alloc; some
// tables may have a plan then.
bool plan_ahead(const Group& group);

}  // namespace recstore
