#pragma once

#include <cstdint>

#include "executor.h"
#include "table.h"

namespace recstore {

// Whole rows outside of a table, by position.
template <class Float, class Int>
struct RowImages {
  Float* rows;       // (n, Rows::image_floats()): weights, then element-wise optimizer state
  Float* state;      // (n,): row-wise optimizer state
  Int* bookkeeping;  // (n, 2): last step, frequency
};

// Copies the rows of ids (n,) out of the table. The caller holds its lock.
// Throws InvalidArgument where an id has no row.
void read_rows(const Table& table, const int64_t* ids, int64_t n, const RowImages<float, int64_t>& out, Executor& executor);

// Makes or overwrites the rows of ids (n,), all of each row; of duplicates the last wins. The caller holds the lock.
// Throws InvalidArgument for bookkeeping out of range, OutOfMemory; the table is then as it was.
void write_rows(Table& table, const int64_t* ids, int64_t n, const RowImages<const float, const int64_t>& in, Executor& executor);

}  // namespace recstore
