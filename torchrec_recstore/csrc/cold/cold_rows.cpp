#include "cold/cold_rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "bounds/arrivals.h"
#include "bounds/eviction.h"
#include "index/sets.h"
#include "lookup/find.h"
#include "rows/transfer.h"

namespace recstore {
namespace {

void check_distinct(const int64_t* ids, int64_t n) {
  std::vector<int64_t> sorted(ids, ids + n);
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) throw InvalidArgument("ids must be distinct");
}

// Copies a row to an image.
void read_image(const Table& table, Slot slot, char* image) {
  table.rows().read_image(slot, image);
  if (!table.images_have_marks()) return;
  const auto mark = static_cast<uint32_t>(table.rows().changes().changed_after(slot));
  char* end = image + table.image_bytes();
  std::memcpy(end - sizeof(RowMeta), &table.rows().meta(slot), sizeof(RowMeta));
  std::memcpy(end - sizeof(RowMeta) - sizeof(mark), &mark, sizeof(mark));
}

// Writes an image to the row of a slot that has just been taken. The row has not changed since it was copied.
void write_image(Table& table, Slot slot, const char* image) {
  table.rows().write_image(slot, image);
  uint32_t mark = 0;
  if (table.images_have_marks()) {
    const char* end = image + table.image_bytes();
    std::memcpy(&table.rows().meta(slot), end - sizeof(RowMeta), sizeof(RowMeta));
    std::memcpy(&mark, end - sizeof(RowMeta) - sizeof(mark), sizeof(mark));
  }
  table.rows().changes().restore(slot, mark);
}

}  // namespace

std::vector<int64_t> absent_ids(const Table& table, const int64_t* ids, int64_t n, Executor& executor) {
  const std::vector<Miss> misses = find_missing(table, ids, n, executor);
  IdSet distinct(misses.size());
  for (const Miss& miss : misses) distinct.add(miss.id, miss.hash);
  return distinct.ids();
}

std::vector<int64_t> leaving_ids(Table& table, const int64_t* ids, int64_t n, int64_t new_rows, Executor& executor) {
  const int64_t max_rows = table.config().bounds.max_rows;
  if (max_rows == 0) throw InvalidArgument("the table has no max_rows");
  const int64_t over = table.size() + new_rows - max_rows;
  if (over <= 0) {
    table.evictions().prepare(table, new_rows, executor);
    return {};
  }
  SlotSet kept = pinned_slots(table);
  std::vector<Slot> slots(static_cast<size_t>(n));
  find(table, ids, n, slots.data(), executor);
  kept.add(slots.data(), n);
  check_working_set(table, kept.size() + new_rows);
  std::vector<int64_t> leaving;
  for (const Leaver& row : table.evictions().next(table, kept, leaving_at_once(table, over), executor)) {
    leaving.push_back(row.id);
  }
  return leaving;
}

void read_images(const Table& table, const int64_t* ids, int64_t n, char* images, Executor& executor) {
  const std::vector<Slot> slots = find_rows(table, ids, n, executor);
  for_each_row(table.rows(), slots, executor,
               [&](int64_t i) { read_image(table, slots[i], images + i * table.image_bytes()); });
}

void evict(Table& table, const int64_t* ids, int64_t n, const char* images, bool* left) {
  check_distinct(ids, n);
  const SlotSet pinned = pinned_slots(table);
  std::vector<Leaver> leavers;
  leavers.reserve(static_cast<size_t>(n));
  std::vector<char> now(static_cast<size_t>(table.image_bytes()));
  const auto equals = [&](Slot slot, const char* image) {
    read_image(table, slot, now.data());
    return std::memcmp(now.data(), image, now.size()) == 0;
  };
  for (int64_t i = 0; i < n; ++i) {
    const Slot slot = table.index().find(ids[i]);
    left[i] = slot != kNoSlot && !pinned.contains(slot) && equals(slot, images + i * table.image_bytes());
    if (left[i] && table.device() != nullptr && table.device()->is_behind(slot)) left[i] = false;
    if (left[i]) leavers.push_back({ids[i], slot});
  }
  table.reserve_leave(static_cast<int64_t>(leavers.size()));
  SerialExecutor serial;
  table.leave(leavers, 0, serial, true);
  if (static_cast<int64_t>(leavers.size()) == n) table.evictions().evicted();  // otherwise some are offered again
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
  for_each_row(table.rows(), slots, executor,
               [&](int64_t i) { write_image(table, slots[i], images + i * table.image_bytes()); });
  if (!looked_up) return;
  table.counters().misses += n;
  table.counters().cold_hits += n;
}

std::vector<int64_t> expired_ids(const Table& table, Executor& executor) {
  const int64_t expiry = table.config().bounds.expiry;
  const int64_t before = table.wall_clock() != nullptr ? table.wall_clock()->expired_before()
                         : expiry > 0                  ? table.clock() - expiry
                                                       : 0;
  if (before <= 0) return {};
  std::vector<int64_t> ids;
  for (const Leaver& row : expired_rows(table, before, pinned_slots(table), executor)) ids.push_back(row.id);
  return ids;
}

void note_left(Table& table, const int64_t* ids, int64_t n) {
  Changes& changes = table.rows().changes();
  Departures* departures = table.departures();
  if (departures != nullptr) departures->reserve(n);
  if (changes.tracks()) changes.reserve_left(n);
  for (int64_t i = 0; i < n; ++i) {
    if (changes.tracks()) changes.left(ids[i], table.size());
    if (departures != nullptr) departures->add(ids[i]);
  }
}

}  // namespace recstore
