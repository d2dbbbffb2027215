#include "lookup/device_moves.h"

#include <algorithm>
#include <iterator>
#include <mutex>

#include "base/error.h"
#include "lookup/device_pass.h"

namespace recstore {
namespace {

constexpr int64_t kRowsOfTask = 512;

// Some rows of one table.
struct Part {
  size_t table;
  int64_t begin, end;  // rows
  int64_t first;       // the first float of row 0 of the table
};

std::vector<Part> parts_of(const std::vector<int64_t>& rows, const std::vector<int64_t>& strides) {
  std::vector<Part> parts;
  int64_t first = 0;
  for (size_t t = 0; t < rows.size(); ++t) {
    for (int64_t begin = 0; begin < rows[t]; begin += kRowsOfTask) {
      parts.push_back({t, begin, std::min(begin + kRowsOfTask, rows[t]), first});
    }
    first += rows[t] * strides[t];
  }
  return parts;
}

int64_t stride_of(const Table& table) { return ArenaLayout::of(table.config()).stride(); }

// Calls of_table(table) for each table, which the calling thread shares.
template <class OfTable>
void for_each_shared(const Tables& tables, const OfTable& of_table) {
  for (const auto& table : tables) {
    const SharedTable shared(table);
    of_table(*shared);
  }
}

}  // namespace

int64_t planned_floats(const Tables& tables) {
  int64_t floats = 0;
  for_each_shared(tables, [&](const Table& table) {
    floats += static_cast<int64_t>(device_slots(table).planned().rows.size()) * stride_of(table);
  });
  return floats;
}

void stage_moves(const Tables& tables, float* out, Executor& executor) {
  std::vector<Table*> lock_order;
  for (const auto& table : tables) lock_order.push_back(table.get());
  std::sort(lock_order.begin(), lock_order.end());
  lock_order.erase(std::unique(lock_order.begin(), lock_order.end()), lock_order.end());
  const SharedTableLocks locks(lock_order);
  std::vector<int64_t> rows, strides;
  for (const auto& table : tables) {
    rows.push_back(static_cast<int64_t>(device_slots(*table).planned().rows.size()));
    strides.push_back(stride_of(*table));
  }
  const std::vector<Part> parts = parts_of(rows, strides);
  for_each_task(executor, static_cast<int64_t>(parts.size()), [&](int64_t p) {
    const Part& part = parts[p];
    stage_planned(*tables[part.table], part.begin, part.end, out + part.first + part.begin * strides[part.table]);
  });
}

int64_t floats_in_flight(const Tables& tables) {
  int64_t floats = 0;
  for_each_shared(tables, [&](const Table& table) { floats += device_slots(table).in_flight() * stride_of(table); });
  return floats;
}

void land_moves(const Tables& tables, const float* rows, Executor& executor) {
  std::vector<int64_t> firsts;
  int64_t first = 0;
  for_each_shared(tables, [&](const Table& table) {
    firsts.push_back(first);
    first += device_slots(table).in_flight() * stride_of(table);
  });
  for_each_task(executor, static_cast<int64_t>(tables.size()), [&](int64_t t) {
    const LockedTable table(tables[t]);
    land(*table, rows + firsts[t], device_slots(*table).in_flight());
  });
}

void commit_moves(const Tables& tables, Executor& executor) {
  for_each_task(executor, static_cast<int64_t>(tables.size()),
                [&](int64_t t) { device_slots(*LockedTable(tables[t])).commit(); });
}

void abort_moves(const Tables& tables) noexcept {
  for (const auto& table : tables) {
    const std::lock_guard<TableMutex> lock(table->mutex());
    if (table->is_open() && table->device() != nullptr) table->device()->abort();
  }
}

namespace {

// The slots of a prefetched batch that one table's features look up and whose rows are still there.
std::vector<Slot> slots_ahead(const Group& group, const SlotsAhead& ahead, size_t t) {
  const StaleSlots stale(group.tables[t]->vacated(), ahead.stamps[t]);
  std::vector<Slot> slots;
  if (stale.all()) return slots;
  const Slot* next = ahead.slot_data();
  for (size_t f = 0; f < ahead.counts.size(); next += ahead.counts[f], ++f) {
    if (group.feature_tables[f] != static_cast<int64_t>(t)) continue;
    std::copy_if(next, next + ahead.counts[f], std::back_inserter(slots),
                 [&](Slot slot) { return slot != kNoSlot && (stale.none() || !stale.contains(slot)); });
  }
  return slots;
}

// Plans for one table. Returns false, and plans nothing, if the device has no room.
bool plan_table_ahead(Table& table, const std::vector<Slot>& slots) {
  const uint64_t number = table.take_pass_number();
  DeviceSlots& device = *table.device();
  const int64_t n = static_cast<int64_t>(slots.size());
  const int64_t host_slots = table.rows().slots();
  if (!device.plan({{slots.data(), n}}, number, table.oldest_pass(), frequencies_in(table), host_slots)) return false;
  device.forget_hits();  // the lookup counts them
  return true;
}

}  // namespace

bool plan_ahead(const Group& group) {
  const auto locks = group.lock();
  for (const auto& table : group.tables) device_slots(*table);
  bool is_planned = false;
  group.coming->with_newest([&](const SlotsAhead& ahead) {
    for (size_t t = 0; t < group.tables.size(); ++t) {
      is_planned = plan_table_ahead(*group.tables[t], slots_ahead(group, ahead, t)) || is_planned;
    }
  });
  return is_planned;
}

}  // namespace recstore
