// The index against std::unordered_map, on seeded streams of inserts, erases and finds.

#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "index.h"
#include "testing.h"

using recstore::Index;
using recstore::kNoSlot;
using recstore::Slot;

namespace {

Slot insert(Index& index, int64_t id, Slot slot) {
  index.reserve_inserts(1);
  return index.find_or_insert(id, index.hash(id), slot);
}
Slot find(const Index& index, int64_t id) { return index.find(id, index.hash(id)); }

void check_equal(const Index& index, const std::unordered_map<int64_t, Slot>& expected) {
  CHECK(index.size() == static_cast<int64_t>(expected.size()));
  for (const auto& [id, slot] : expected) CHECK(find(index, id) == slot);
  size_t visited = 0;
  index.for_each(0, index.segments(), [&](int64_t id, Slot slot) {
    ++visited;
    CHECK(expected.at(id) == slot);
  });
  CHECK(visited == expected.size());
}

void every_int64_is_an_id() {
  Index index(1);
  const std::vector<int64_t> ids{0, -1, 1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
  for (const int64_t id : ids) CHECK(find(index, id) == kNoSlot);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(insert(index, ids[i], static_cast<Slot>(i)) == i);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(find(index, ids[i]) == i);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(index.erase(ids[i], index.hash(ids[i])) == i);
  for (const int64_t id : ids) CHECK(find(index, id) == kNoSlot);
  CHECK(index.size() == 0);
}

void random_stream(uint64_t seed, int64_t population, int steps) {
  std::mt19937_64 random(seed);
  Index index(random());
  std::unordered_map<int64_t, Slot> expected;
  for (int step = 0; step < steps; ++step) {
    const auto id = static_cast<int64_t>(random() % static_cast<uint64_t>(population)) - population / 2;
    if (random() % 3 != 0) {
      const Slot slot = insert(index, id, static_cast<Slot>(step));
      const auto [entry, made] = expected.emplace(id, static_cast<Slot>(step));
      CHECK(slot == entry->second);
    } else {
      const auto found = expected.find(id);
      CHECK(index.erase(id, index.hash(id)) == (found == expected.end() ? kNoSlot : found->second));
      if (found != expected.end()) expected.erase(found);
    }
  }
  check_equal(index, expected);
  for (int64_t id = -population; id < -population / 2; ++id) CHECK(find(index, id) == kNoSlot);
  index.clear();
  check_equal(index, {});
}

// Fills the index and removes half of the ids: lines overflow, and holes are refilled.
void fill_and_drain(int64_t count) {
  Index index(3);
  std::unordered_map<int64_t, Slot> expected;
  for (int64_t id = 0; id < count; ++id) {
    insert(index, id * 8, static_cast<Slot>(id));
    expected[id * 8] = static_cast<Slot>(id);
  }
  check_equal(index, expected);
  for (int64_t id = 0; id < count; id += 2) {
    CHECK(index.erase(id * 8, index.hash(id * 8)) == static_cast<Slot>(id));
    expected.erase(id * 8);
  }
  check_equal(index, expected);
  CHECK(index.bytes() < 64 * count + (1 << 20));
}

void parts_grow_in_parallel() {
  constexpr int64_t kCount = 200000;
  Index index(7);
  index.reserve_inserts(kCount);
  std::vector<std::vector<int64_t>> by_part(Index::kParts);
  for (int64_t id = 0; id < kCount; ++id) by_part[Index::part_of(index.hash(id))].push_back(id);
  Threads threads(4);
  recstore::for_each_task(threads, Index::kParts, [&](int64_t p) {
    for (const int64_t id : by_part[p]) index.find_or_insert(id, index.hash(id), static_cast<Slot>(id));
  });
  CHECK(index.size() == kCount);
  for (int64_t id = 0; id < kCount; ++id) CHECK(find(index, id) == static_cast<Slot>(id));
}

}  // namespace

int main() {
  every_int64_is_an_id();
  for (uint64_t seed = 0; seed < 4; ++seed) random_stream(seed, 300, 20000);
  random_stream(99, 50000, 200000);
  fill_and_drain(100000);
  parts_grow_in_parallel();
  std::puts("test_index passed");
}
