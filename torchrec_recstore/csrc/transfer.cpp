#include "transfer.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "error.h"
#include "forward.h"

namespace recstore {
namespace {

constexpr int64_t kRun = 4096;  // rows of a task

}  // namespace

void read_rows(const Table& table, const int64_t* ids, int64_t n, const RowImages<float, int64_t>& out, Executor& executor) {
  std::vector<Slot> slots(static_cast<size_t>(n));
  find(table, ids, n, slots.data(), executor);
  const auto missing = std::find(slots.begin(), slots.end(), kNoSlot);
  if (missing != slots.end()) throw InvalidArgument("id " + std::to_string(ids[missing - slots.begin()]) + " has no row");
  const int64_t floats = table.rows().image_floats();
  for_each_task(executor, (n + kRun - 1) / kRun, [&](int64_t run) {
    for (int64_t i = run * kRun; i < std::min((run + 1) * kRun, n); ++i) {
      table.rows().read(slots[i], out.rows + i * floats);
      const RowMeta& meta = table.rows().meta(slots[i]);
      out.state[i] = meta.state;
      out.bookkeeping[2 * i] = meta.last_step;
      out.bookkeeping[2 * i + 1] = meta.frequency;
    }
  });
}

void write_rows(Table& table, const int64_t* ids, int64_t n, const RowImages<const float, const int64_t>& in, Executor& executor) {
  const bool fits = std::all_of(in.bookkeeping, in.bookkeeping + 2 * n, [](int64_t value) {
    return value >= 0 && value <= std::numeric_limits<uint32_t>::max();
  });
  if (!fits) throw InvalidArgument("bookkeeping must be within 0 and 2**32 - 1");
  std::vector<Slot> slots(static_cast<size_t>(n));
  find_or_insert(table, ids, n, slots.data(), executor);
  const int64_t floats = table.rows().image_floats();
  for (int64_t i = 0; i < n; ++i) {  // in order, for duplicates
    table.rows().write(slots[i], in.rows + i * floats);
    table.rows().meta(slots[i]) = {in.state[i], static_cast<uint32_t>(in.bookkeeping[2 * i]),
                                   static_cast<uint32_t>(in.bookkeeping[2 * i + 1])};
  }
}

}  // namespace recstore
