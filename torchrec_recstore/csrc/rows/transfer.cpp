#include "rows/transfer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "lookup/find.h"

namespace recstore {
namespace {

constexpr int64_t kParallelRows = 4096;  // this many rows are written on several threads
constexpr int64_t kAhead = 8;            // rows that are prefetched ahead

void check_bookkeeping(const int64_t* values, int64_t n) {
  // The loop has no branch, so that the compiler vectorises it: a value out of range sets a bit above the low 32.
  uint64_t all = 0;
  for (int64_t i = 0; i < n; ++i) all |= static_cast<uint64_t>(values[i]);
  if (all > std::numeric_limits<uint32_t>::max()) {
    throw InvalidArgument("last_step and frequency must be within 0 and 2**32 - 1");
  }
}

// Copies the weights of a row from one place to the other. Inside a table, the scale and bias of an 8-bit row are at
// the next whole float after its codes; outside, they follow the codes directly.
template <bool kOut, class Inside, class Outside>
void copy_weights(const Rows& rows, Inside* inside, Outside* outside, int64_t i) {
  const auto bytes = static_cast<size_t>(weight_bytes(rows.type(), rows.columns()));
  Outside* weights = outside + static_cast<size_t>(i) * bytes;
  const auto copy = [](auto* in, auto* out, size_t n) {
    if constexpr (kOut) {
      std::memcpy(out, in, n);
    } else {
      std::memcpy(in, out, n);
    }
  };
  const size_t grid = rows.type() == RowType::kInt8 ? kGridFloats * sizeof(float) : 0;
  copy(inside, weights, bytes - grid);
  if (grid > 0) copy(inside + rows.view().weight_floats() - kGridFloats, weights + bytes - grid, grid);
}

// Copies n numbers of a state out of a row. Returns the end of the state in the row.
const char* read_state(const Rows& rows, const char* state, int64_t n, bool is_square, float* out) {
  if (rows.state_type() == StateType::kFloat16) {
    row_loops().read_state(reinterpret_cast<const uint16_t*>(state), n, is_square, out);
  } else {
    std::memcpy(out, state, static_cast<size_t>(n) * sizeof(float));
  }
  return state + n * state_bytes(rows.state_type());
}

// Copies n numbers of a state into a row. Returns the end of the state in the row.
char* write_state(const Rows& rows, const float* values, int64_t n, bool is_square, char* state) {
  if (rows.state_type() == StateType::kFloat16) {
    row_loops().write_state(values, n, is_square, reinterpret_cast<uint16_t*>(state));
  } else {
    std::memcpy(state, values, static_cast<size_t>(n) * sizeof(float));
  }
  return state + n * state_bytes(rows.state_type());
}

void write_row(Rows& rows, Slot slot, const ConstRowImages& in, int64_t i) {
  float* row = rows.row(slot);
  copy_weights<false>(rows, row, static_cast<const char*>(in.weights), i);
  char* element = reinterpret_cast<char*>(row + rows.view().weight_floats());
  for (size_t s = 0; s < in.elements.size(); ++s) {
    element =
        write_state(rows, in.elements[s] + i * rows.columns(), rows.columns(), rows.states()[s].is_square, element);
  }
  write_state(rows, in.state + i, 1, true, rows.aside(slot));
  rows.meta(slot) = {static_cast<uint32_t>(in.last_step[i]), static_cast<uint32_t>(in.frequency[i])};
}

// Calls work(i) for the places i of n slots, on several threads if there are many. All places of a slot belong to one
// task and are visited in order, so that the last one is written last.
template <class Work>
void for_each_place(Table& table, const std::vector<Slot>& slots, Executor& executor, const Work& work) {
  const auto n = static_cast<int64_t>(slots.size());
  const int64_t tasks = n < kParallelRows ? 1 : executor.threads();
  for_each_task(executor, tasks, [&](int64_t task) {
    const auto is_of_task = [&](int64_t i) { return slots[i] / 64 % tasks == task; };
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n && is_of_task(i + kAhead)) table.rows().prefetch(slots[i + kAhead]);
      if (!is_of_task(i)) continue;
      table.before_write(slots[i]);
      work(i);
    }
  });
}

}  // namespace

void read_row(const Rows& rows, const void* row, const char* aside, const RowImages& out, int64_t i) {
  copy_weights<true>(rows, static_cast<const float*>(row), static_cast<char*>(out.weights), i);
  const char* element = reinterpret_cast<const char*>(static_cast<const float*>(row) + rows.view().weight_floats());
  for (size_t s = 0; s < out.elements.size(); ++s) {
    element =
        read_state(rows, element, rows.columns(), rows.states()[s].is_square, out.elements[s] + i * rows.columns());
  }
  read_state(rows, aside, 1, true, out.state + i);
  const RowMeta& meta = rows.meta_of(aside);
  out.last_step[i] = meta.last_step;
  out.frequency[i] = meta.frequency;
}

void read_rows(const Table& table, const int64_t* ids, int64_t n, const RowImages& out, Executor& executor) {
  const std::vector<Slot> slots = find_rows(table, ids, n, executor);
  const Rows& rows = table.rows();
  for_each_row(rows, slots, executor,
               [&](int64_t i) { read_row(rows, rows.row(slots[i]), rows.aside(slots[i]), out, i); });
}

void write_rows(Table& table, const int64_t* ids, int64_t n, const ConstRowImages& in, Executor& executor) {
  check_bookkeeping(in.last_step, n);
  check_bookkeeping(in.frequency, n);
  std::vector<Slot> slots(static_cast<size_t>(n));
  find_or_insert(table, ids, n, slots.data(), executor, Arrival::kWrite);
  table.evictions().reset();  // the rows get other ranks
  for_each_place(table, slots, executor, [&](int64_t i) { write_row(table.rows(), slots[i], in, i); });
}

void write_weights(Table& table, const int64_t* ids, int64_t n, const float* weights, Executor& executor) {
  std::vector<Slot> slots(static_cast<size_t>(n));
  find_or_insert(table, ids, n, slots.data(), executor, Arrival::kWrite);
  const int64_t columns = table.config().columns();
  for_each_place(table, slots, executor, [&](int64_t i) { table.rows().set_weights(slots[i], weights + i * columns); });
}

}  // namespace recstore
