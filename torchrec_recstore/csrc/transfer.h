#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "executor.h"
#include "table.h"

namespace recstore {

// Whole rows outside of a table, by position. Of the table's shape: as many elements as its optimizer has
// element-wise states.
template <bool kConst>
struct RowImagesOf {
  template <class T>
  using Pointer = std::conditional_t<kConst, const T*, T*>;

  Pointer<void> weights;                 // (n, columns) of the table's row type
  std::vector<Pointer<float>> elements;  // (n, columns) each: element-wise optimizer states
  Pointer<float> state;                  // (n,): row-wise optimizer state
  Pointer<int64_t> last_step;            // (n,)
  Pointer<int64_t> frequency;            // (n,)
};
using RowImages = RowImagesOf<false>;
using ConstRowImages = RowImagesOf<true>;

// Copies one row, which lies where it lies in the table or as it lies there, to position i.
void read_row(const Rows& rows, const void* row, const RowMeta& meta, const RowImages& out, int64_t i);

// Copies the rows of ids (n,) out of the table. The caller holds its lock.
// Throws InvalidArgument where an id has no row.
void read_rows(const Table& table, const int64_t* ids, int64_t n, const RowImages& out, Executor& executor);

// Makes or overwrites the rows of ids (n,), all of each row; of duplicates the last wins. The caller holds the lock.
// Throws InvalidArgument for bookkeeping out of range, OutOfMemory; the table is then as it was.
void write_rows(Table& table, const int64_t* ids, int64_t n, const ConstRowImages& in, Executor& executor);

}  // namespace recstore
