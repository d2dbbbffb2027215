#include "bounds/sightings.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/mix.h"
#include "base/parts.h"

namespace recstore {
namespace {

constexpr int64_t kTaskIds = 256;  // approximate number of ids in a task
constexpr size_t kAhead = 8;       // ids whose counts are prefetched

}  // namespace

Sightings::Sightings(int64_t bytes) : buckets_(bytes / 2 / static_cast<int64_t>(sizeof(Bucket))) {
  memory_.reserve(static_cast<size_t>(bytes));
}

int64_t Sightings::bucket_of(int64_t id) const {
  return static_cast<int64_t>(mix(static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15u) &
                              static_cast<uint64_t>(buckets_ - 1));
}

Sightings::Place Sightings::find(int generation, int64_t id, bool of_part) const {
  const int64_t first = bucket_of(id);
  const int64_t end = of_part ? (first * kParts / buckets_ + 1) * buckets_ / kParts : 0;
  for (int64_t number = first;; number = (number + 1) & (buckets_ - 1)) {
    Bucket& bucket = buckets(generation)[number];
    for (int i = 0; i < kPlaces; ++i) {
      if (bucket.counts[i] == 0 || bucket.ids[i] == id) return {&bucket.ids[i], &bucket.counts[i]};
    }
    if (number + 1 == end) return {nullptr, nullptr};
  }
}

int64_t Sightings::count(int64_t id) const { return std::min(255, *find(0, id).count + *find(1, id).count); }

void Sightings::add_at(Place place, int64_t id, int64_t count, int64_t& size) {
  if (*place.count == 0) {
    ++size;
    *place.id = id;
  }
  *place.count = static_cast<uint8_t>(std::min<int64_t>(255, *place.count + count));
}

bool Sightings::add_to(int generation, int64_t id, int64_t count) {
  const Place place = find(generation, id);
  if (*place.count == 0 && sizes_[generation] == most()) return false;
  add_at(place, id, count, sizes_[generation]);
  return true;
}

void Sightings::clear(int generation) {
  std::memset(static_cast<void*>(buckets(generation)), 0, static_cast<size_t>(buckets_) * sizeof(Bucket));
  sizes_[generation] = 0;
}

void Sightings::add(int64_t id) {
  if (add_to(present_, id, 1)) return;
  present_ = 1 - present_;
  clear(present_);
  add_to(present_, id, 1);
}

std::vector<int64_t> Sightings::by_part(const std::vector<int64_t>& ids) const {
  return recstore::by_part<kParts>(ids, [&](int64_t id) { return part_of(id); });
}

void Sightings::add(std::vector<int64_t>& ids, Executor& executor) noexcept {
  const auto n = static_cast<int64_t>(ids.size());
  const auto begins = part_begins<kParts>(ids.size(), [&](size_t i) { return part_of(ids[i]); });
  std::array<int64_t, kParts> made{};
  std::array<size_t, kParts> left{};  // ids that are added last
  // The order of the ids decides which of them are in the next generation.
  const bool ends = sizes_[present_] + n > most();
  if (ends || buckets_ < kParts) {
    for (size_t p = 0; p < kParts; ++p) left[p] = begins[p + 1] - begins[p];
  } else {
    const int64_t tasks = std::min<int64_t>(kParts, 1 + n / kTaskIds);
    for_each_task(executor, tasks, [&](int64_t task) {
      for (int64_t p = task * kParts / tasks; p < (task + 1) * kParts / tasks; ++p) {
        for (size_t i = begins[p]; i < begins[p + 1]; ++i) {
          if (i + kAhead < begins[p + 1]) prefetch(ids[i + kAhead]);
          const Place place = find(present_, ids[i], true);
          if (place.id == nullptr) {
            ids[begins[p] + left[p]++] = ids[i];
          } else {
            add_at(place, ids[i], 1, made[p]);
          }
        }
      }
    });
  }
  for (size_t p = 0; p < kParts; ++p) sizes_[present_] += made[p];
  for (size_t p = 0; p < kParts; ++p) {
    for (size_t i = begins[p]; i < begins[p] + left[p]; ++i) {
      if (i + kAhead < ids.size()) prefetch(ids[i + kAhead]);
      add(ids[i]);
    }
  }
}

void Sightings::read(int64_t* ids, uint8_t* counts, uint8_t* generations) const {
  for (const int generation : {present_, 1 - present_}) {
    for (const Bucket* bucket = buckets(generation); bucket != buckets(generation) + buckets_; ++bucket) {
      for (int i = 0; i < kPlaces && bucket->counts[i] != 0; ++i) {
        *ids++ = bucket->ids[i];
        *counts++ = bucket->counts[i];
        *generations++ = generation == present_ ? 0 : 1;
      }
    }
  }
}

void Sightings::write(const int64_t* ids, const uint8_t* counts, const uint8_t* generations, int64_t n) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return generations[a] != generations[b] ? generations[a] < generations[b]
                                            : mix(static_cast<uint64_t>(ids[a])) < mix(static_cast<uint64_t>(ids[b]));
  });
  clear(0);
  clear(1);
  present_ = 0;
  for (const int64_t i : order) {
    if (counts[i] > 0 && (generations[i] != 0 || !add_to(0, ids[i], counts[i]))) add_to(1, ids[i], counts[i]);
  }
}

}  // namespace recstore
