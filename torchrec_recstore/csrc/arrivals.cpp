#include "arrivals.h"

#include <algorithm>
#include <string>
#include <utility>

#include "error.h"
#include "sets.h"

namespace recstore {
namespace {

constexpr int64_t kTaskMisses = 2048;  // misses in a task
constexpr int64_t kAhead = 8;          // ids whose counts are prefetched

}  // namespace

bool is_admitted(const Table& table, int64_t id, Arrival arrival) {
  const Sightings* sightings = table.sightings();
  if (sightings == nullptr || !initialises(arrival)) return true;
  // Only a lookup admits an id. If an update decided by the sightings so far, it could make rows of ids that its own
  // step has just refused, because the sightings of the step fill the cells that these ids share.
  return arrival == Arrival::kLookup && sightings->count(id) + 1 >= table.config().bounds.min_frequency;
}

void check_working_set(const Table& table, int64_t rows) {
  const int64_t most = table.config().bounds.max_rows;
  if (rows <= most) return;
  throw InvalidArgument("table '" + table.config().name + "' needs " + std::to_string(rows) + " rows at once, max_rows is " +
                        std::to_string(most) + " for this shard");
}

Arrivals::Arrivals(Table& table, std::vector<Miss> misses, Arrival arrival)
    : table_(table), arrival_(arrival), misses_(std::move(misses)) {}

void Arrivals::plan(const std::function<void(SlotSet&)>& pin_batch, Executor& executor) {
  if (!table_.config().bounds.limit_new_rows()) {
    admitted_ = std::move(misses_);
    return;
  }
  IdSet distinct(misses_.size());
  if (table_.sightings() == nullptr || !initialises(arrival_)) {
    for (const Miss& miss : misses_) distinct.add(miss.id, miss.hash);
    new_rows_ = static_cast<int64_t>(distinct.ids().size());
    admitted_ = std::move(misses_);
  } else {
    IdSet held_back(misses_.size());
    const auto n = static_cast<int64_t>(misses_.size());
    std::vector<char> admitted(misses_.size());
    for_each_task(executor, (n + kTaskMisses - 1) / kTaskMisses, [&](int64_t task) {
      for (int64_t i = task * kTaskMisses; i < std::min((task + 1) * kTaskMisses, n); ++i) {
        if (i + kAhead < n) table_.sightings()->prefetch(misses_[i + kAhead].id);
        admitted[i] = is_admitted(table_, misses_[i].id, arrival_) ? 1 : 0;
      }
    });
    for (size_t i = 0; i < misses_.size(); ++i) {
      const Miss& miss = misses_[i];
      if (admitted[i] != 0) {
        distinct.add(miss.id, miss.hash);
        admitted_.push_back(miss);
      } else {
        held_back.add(miss.id, miss.hash);
      }
    }
    new_rows_ = static_cast<int64_t>(distinct.ids().size());
    refused_ = static_cast<int64_t>(held_back.ids().size());
    seen_ = held_back.ids();
    seen_.insert(seen_.end(), distinct.ids().begin(), distinct.ids().end());
  }
  if (table_.config().bounds.max_rows > 0) choose_leavers(new_rows_, pin_batch, executor);
}

void Arrivals::choose_leavers(int64_t new_rows, const std::function<void(SlotSet&)>& pin_batch, Executor& executor) {
  const Bounds& bounds = table_.config().bounds;
  const int64_t over = table_.size() + new_rows - bounds.max_rows;
  const bool evicts = bounds.eviction != Eviction::kNone && !bounds.cold_store;
  if (over <= 0) {
    if (evicts) table_.evictions().prepare(table_, new_rows, executor);
    return;
  }
  if (!evicts) {
    throw InvalidArgument("table '" + table_.config().name + "' needs " + std::to_string(table_.size() + new_rows) +
                          " rows, max_rows is " + std::to_string(bounds.max_rows) + " for this shard, " +
                          (bounds.cold_store ? "and no rows were moved to the cold store" : "and it has no eviction"));
  }
  SlotSet pinned = pinned_slots(table_);
  pin_batch(pinned);
  check_working_set(table_, pinned.size() + new_rows);
  leavers_ = table_.evictions().next(table_, pinned, over, executor);
}

void Arrivals::make_room(int64_t reused) noexcept {
  table_.leave(leavers_, reused);
  if (!leavers_.empty()) table_.evictions().evicted();
  table_.counters().evicted += static_cast<int64_t>(leavers_.size());
}

void Arrivals::finish(int64_t rows_made) noexcept {
  Counters& counters = table_.counters();
  if (arrival_ != Arrival::kReturn) counters.inserts += rows_made;
  if (arrival_ != Arrival::kLookup) return;
  counters.misses += rows_made + refused_;
  counters.lookups += refused_;  // the other ids are counted when their pass ends
  counters.refused += refused_;
  const auto n = static_cast<int64_t>(seen_.size());
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) table_.sightings()->prefetch(seen_[i + kAhead]);
    table_.sightings()->add(seen_[i]);
  }
}

}  // namespace recstore
