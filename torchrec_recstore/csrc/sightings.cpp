#include "sightings.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "mix.h"

namespace recstore {
namespace {

uint64_t hash_of(int64_t id) { return mix(static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15u); }

}  // namespace

Sightings::Sightings(int64_t bytes) : buckets_(bytes / 2 / static_cast<int64_t>(sizeof(Bucket))) {
  memory_.reserve(static_cast<size_t>(bytes));
}

Sightings::Place Sightings::find(int generation, int64_t id) const {
  const uint64_t mask = static_cast<uint64_t>(buckets_ - 1);
  for (uint64_t number = hash_of(id) & mask;; number = (number + 1) & mask) {
    Bucket& bucket = buckets(generation)[number];
    for (int i = 0; i < kPlaces; ++i) {
      if (bucket.counts[i] == 0 || bucket.ids[i] == id) return {&bucket.ids[i], &bucket.counts[i]};
    }
  }
}

void Sightings::prefetch(int64_t id) const {
  const uint64_t number = hash_of(id) & static_cast<uint64_t>(buckets_ - 1);
  for (const int generation : {0, 1}) __builtin_prefetch(buckets(generation) + number);
}

int64_t Sightings::count(int64_t id) const { return std::min(255, *find(0, id).count + *find(1, id).count); }

bool Sightings::add_to(int generation, int64_t id, int64_t count) {
  const Place place = find(generation, id);
  if (*place.count == 0) {
    if (sizes_[generation] == most()) return false;
    ++sizes_[generation];
    *place.id = id;
  }
  *place.count = static_cast<uint8_t>(std::min<int64_t>(255, *place.count + count));
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
    return generations[a] != generations[b] ? generations[a] < generations[b] : mix(static_cast<uint64_t>(ids[a])) < mix(static_cast<uint64_t>(ids[b]));
  });
  clear(0);
  clear(1);
  present_ = 0;
  for (const int64_t i : order) {
    if (counts[i] > 0 && (generations[i] != 0 || !add_to(0, ids[i], counts[i]))) add_to(1, ids[i], counts[i]);
  }
}

}  // namespace recstore
