#include "bounds/arrivals.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "index/sets.h"

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
  throw InvalidArgument("table '" + table.config().name + "' needs " + std::to_string(rows) +
                        " rows at once, max_rows is " + std::to_string(most) + " for this shard");
}

Arrivals::Arrivals(Table& table, std::vector<Miss> misses, Arrival arrival)
    : table_(table), arrival_(arrival), misses_(std::move(misses)) {}

void Arrivals::plan(const std::function<void(SlotSet&)>& pin_batch, Executor& executor) {
  const bool counts = table_.sightings() != nullptr && initialises(arrival_);
  DistinctMisses held_back(counts ? hold_back(executor) : std::vector<Miss>{});
  admitted_.emplace(std::move(misses_));
  admitted_->group(executor);
  if (counts) {
    held_back.group(executor);
    refused_ = held_back.count();
    seen_ = held_back.ids();
    const std::vector<int64_t> ids = admitted_->ids();
    seen_.insert(seen_.end(), ids.begin(), ids.end());
    seen_ = table_.sightings()->by_part(seen_);
  }
  if (table_.config().bounds.max_rows > 0) choose_leavers(admitted_->count(), pin_batch, executor);
}

std::vector<Miss> Arrivals::hold_back(Executor& executor) {
  const auto n = static_cast<int64_t>(misses_.size());
  std::vector<char> admitted(misses_.size());
  for_each_task(executor, (n + kTaskMisses - 1) / kTaskMisses, [&](int64_t task) {
    for (int64_t i = task * kTaskMisses; i < std::min((task + 1) * kTaskMisses, n); ++i) {
      if (i + kAhead < n) table_.sightings()->prefetch(misses_[i + kAhead].id);
      admitted[i] = is_admitted(table_, misses_[i].id, arrival_) ? 1 : 0;
    }
  });
  std::vector<Miss> held_back;
  held_back.reserve(static_cast<size_t>(std::count(admitted.begin(), admitted.end(), 0)));
  size_t kept = 0;
  for (size_t i = 0; i < misses_.size(); ++i) {
    if (admitted[i] != 0) {
      misses_[kept++] = misses_[i];
    } else {
      held_back.push_back(misses_[i]);
    }
  }
  misses_.resize(kept);
  return held_back;
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
  leavers_ = by_part(table_.index(), table_.evictions().next(table_, pinned, over, executor));
}

void Arrivals::make_room(int64_t reused, Executor& executor) noexcept {
  table_.leave(leavers_, reused, executor);
  if (!leavers_.empty()) table_.evictions().evicted();
  table_.counters().evicted += static_cast<int64_t>(leavers_.size());
}

void Arrivals::finish(int64_t rows_made, Executor& executor) noexcept {
  Counters& counters = table_.counters();
  if (arrival_ != Arrival::kReturn) counters.inserts += rows_made;
  if (arrival_ != Arrival::kLookup) return;
  counters.misses += rows_made + refused_;
  counters.lookups += refused_;  // the other ids are counted when their pass ends
  counters.refused += refused_;
  if (!seen_.empty()) table_.sightings()->add(seen_, executor);
}

}  // namespace recstore
