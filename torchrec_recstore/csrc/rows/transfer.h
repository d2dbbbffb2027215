#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "base/executor.h"
#include "rows/table.h"

namespace recstore {

// Arrays that hold whole rows outside a table. There are as many elements as the optimizer has element-wise states.
template <bool kConst>
struct RowImagesOf {
  template <class T>
  using Pointer = std::conditional_t<kConst, const T*, T*>;

  Pointer<void> weights;                 // (n, weight_bytes()): rows of weights of the table's row type
  std::vector<Pointer<float>> elements;  // (n, columns) each: element-wise optimizer states
  Pointer<float> state;                  // (n,): row-wise optimizer state. States are float32 for each state type
  Pointer<int64_t> last_step;            // (n,)
  Pointer<int64_t> frequency;            // (n,)
};
using RowImages = RowImagesOf<false>;
using ConstRowImages = RowImagesOf<true>;

// Calls work(i) for each of the slots, in parallel, and prefetches the rows.
template <class Work>
void for_each_row(const Rows& rows, const std::vector<Slot>& slots, Executor& executor, const Work& work) {
  constexpr int64_t kRun = 4096;  // rows of a task
  constexpr int64_t kAhead = 8;   // rows that are prefetched ahead
  const auto n = static_cast<int64_t>(slots.size());
  for_each_task(executor, (n + kRun - 1) / kRun, [&](int64_t run) {
    const int64_t end = std::min((run + 1) * kRun, n);
    for (int64_t i = run * kRun; i < end; ++i) {
      if (i + kAhead < end) rows.prefetch(slots[i + kAhead]);
      work(i);
    }
  });
}

// Copies one row to position i of the arrays. row: in the table, or a copy with the same layout. aside: its RowAside.
void read_row(const Rows& rows, const void* row, const char* aside, const RowImages& out, int64_t i);

// For the functions below: ids are (n,), and the caller holds the lock of the table, shared if the table is const.

// Copies the rows of the ids out of the table. Throws InvalidArgument if an id has no row.
void read_rows(const Table& table, const int64_t* ids, int64_t n, const RowImages& out, Executor& executor);

// Makes or overwrites whole rows. If an id occurs more than once, its last row is written.
// Throws InvalidArgument if last_step or frequency is out of range, OutOfMemory; the table is then unchanged.
void write_rows(Table& table, const int64_t* ids, int64_t n, const ConstRowImages& in, Executor& executor);

// Makes or overwrites the weights of rows. New rows have zero optimizer state, existing rows keep theirs. If an id
// occurs more than once, its last weights are written.
// weights: (n, columns) float32, rounded to nearest. Throws OutOfMemory; the table is then unchanged.
void write_weights(Table& table, const int64_t* ids, int64_t n, const float* weights, Executor& executor);

}  // namespace recstore
