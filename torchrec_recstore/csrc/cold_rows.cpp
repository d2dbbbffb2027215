#include "cold_rows.h"

#include <algorithm>
#include <string>

#include "arrivals.h"
#include "error.h"
#include "eviction.h"
#include "find.h"
#include "sets.h"
#include "transfer.h"

namespace recstore {
namespace {

void check_distinct(const int64_t* ids, int64_t n) {
  std::vector<int64_t> sorted(ids, ids + n);
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) throw InvalidArgument("ids must be distinct");
}

}  // namespace

std::vector<int64_t> absent_ids(const Table& table, const int64_t* ids, int64_t n, Executor& executor) {
  const std::vector<Miss> misses = find_missing(table, ids, n, executor);
  IdSet distinct(misses.size());
  for (const Miss& miss : misses) distinct.add(miss.id, miss.hash);
  return distinct.ids();
}

std::vector<int64_t> leaving_ids(const Table& table, const int64_t* ids, int64_t n, int64_t new_rows, Executor& executor) {
  const int64_t max_rows = table.config().bounds.max_rows;
  if (max_rows == 0) throw InvalidArgument("the table has no max_rows");
  const int64_t over = table.size() + new_rows - max_rows;
  if (over <= 0) return {};
  SlotSet kept = pinned_slots(table);
  std::vector<Slot> slots(static_cast<size_t>(n));
  find(table, ids, n, slots.data(), executor);
  kept.add(slots.data(), n);
  check_working_set(table, kept.size() + new_rows);
  std::vector<int64_t> leaving;
  for (const Leaver& row : least_rows(table, kept, leaving_at_once(table, over), executor)) leaving.push_back(row.id);
  return leaving;
}

void read_images(const Table& table, const int64_t* ids, int64_t n, char* images, Executor& executor) {
  const std::vector<Slot> slots = find_rows(table, ids, n, executor);
  const Rows& rows = table.rows();
  for_each_row(rows, slots, executor, [&](int64_t i) { rows.read_image(slots[i], images + i * table.image_bytes()); });
}

void evict(Table& table, const int64_t* ids, int64_t n, const char* images, bool* left) {
  check_distinct(ids, n);
  const SlotSet pinned = pinned_slots(table);
  std::vector<Leaver> leavers;
  leavers.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const Slot slot = table.index().find(ids[i]);
    left[i] = slot != kNoSlot && !pinned.contains(slot) && table.rows().equals_image(slot, images + i * table.image_bytes());
    if (left[i]) leavers.push_back({ids[i], slot});
  }
  table.reserve_leave(static_cast<int64_t>(leavers.size()));
  table.leave(leavers);
  table.counters().evicted += static_cast<int64_t>(leavers.size());
}

void bring_back(Table& table, const int64_t* ids, int64_t n, const char* images, bool looked_up, Executor& executor) {
  check_distinct(ids, n);
  std::vector<Slot> slots(static_cast<size_t>(n));
  find(table, ids, n, slots.data(), executor);
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] != kNoSlot) throw InvalidArgument("id " + std::to_string(ids[i]) + " has a row already");
  }
  find_or_insert(table, ids, n, slots.data(), executor, Arrival::kReturn);
  const Rows& rows = table.rows();
  for_each_row(rows, slots, executor, [&](int64_t i) { rows.write_image(slots[i], images + i * table.image_bytes()); });
  if (!looked_up) return;
  table.counters().misses += n;
  table.counters().cold_hits += n;
}

std::vector<int64_t> expired_ids(const Table& table, Executor& executor) {
  const int64_t expiry = table.config().bounds.expiry;
  const int64_t before = table.wall_clock() != nullptr ? table.wall_clock()->expired_before() : expiry > 0 ? table.clock() - expiry : 0;
  if (before <= 0) return {};
  std::vector<int64_t> ids;
  for (const Leaver& row : expired_rows(table, before, pinned_slots(table), executor)) ids.push_back(row.id);
  return ids;
}

void note_left(Table& table, const int64_t* ids, int64_t n) {
  Changes& changes = table.rows().changes();
  if (!changes.tracks()) return;
  changes.reserve_left(n);
  for (int64_t i = 0; i < n; ++i) changes.left(ids[i], table.size());
}

}  // namespace recstore
