// The index against std::unordered_map, on seeded streams of inserts, erases and finds.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "index/index.h"
#include "testing.h"

using recstore::Index;
using recstore::kNoSlot;
using recstore::Slot;

namespace {

using Oracle = std::unordered_map<int64_t, Slot>;

// Returns the slot of `id`, for which an entry with `slot` is made if it has none.
Slot insert(Index& index, int64_t id, Slot slot) {
  const Slot found = index.find(id);
  if (found != kNoSlot) return found;
  index.reserve(1);
  index.insert(id, index.hash(id), slot);
  return slot;
}

// The slots of ids that are and of ids that are not in the index, all in one call.
void check_find(const Index& index, const Oracle& expected, const std::vector<int64_t>& others) {
  std::vector<int64_t> ids(others);
  for (const auto& [id, slot] : expected) ids.push_back(id);
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(ids.size()));
  std::vector<Slot> slots(ids.size());
  int64_t missing = index.find(ids.data(), static_cast<int64_t>(ids.size()), slots.data());
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto entry = expected.find(ids[i]);
    CHECK(slots[i] == (entry == expected.end() ? kNoSlot : entry->second));
    CHECK(index.find(ids[i]) == slots[i]);
    missing -= slots[i] == kNoSlot;
  }
  CHECK(missing == 0);
}

void check_equal(const Index& index, const Oracle& expected, const std::vector<int64_t>& others = {}) {
  CHECK(index.size() == static_cast<int64_t>(expected.size()));
  check_find(index, expected, others);
  size_t visited = 0;
  const auto visit = [&](int64_t id, Slot slot) {
    ++visited;
    CHECK(expected.at(id) == slot);
  };
  index.for_each(visit);
  CHECK(visited == expected.size());
  for (const int64_t entries : {3, 300}) {
    visited = 0;
    const uint64_t positions = index.positions(entries);
    for (uint64_t begin = 0; begin < Index::kPositions; begin += positions) {
      index.for_each(begin, std::min(begin + positions, Index::kPositions), visit);
    }
    CHECK(visited == expected.size());
  }
}

void every_int64_is_an_id() {
  Index index(1);
  const std::vector<int64_t> ids{0, -1, 1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
  check_equal(index, {}, ids);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(insert(index, ids[i], static_cast<Slot>(i)) == i);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(index.find(ids[i]) == i);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(index.erase(ids[i]) == i);
  check_equal(index, {}, ids);
}

void random_stream(uint64_t seed, int64_t population, int steps) {
  std::mt19937_64 random(seed);
  Index index(random());
  Oracle expected;
  for (int step = 0; step < steps; ++step) {
    const auto id = static_cast<int64_t>(random() % static_cast<uint64_t>(population)) - population / 2;
    if (random() % 3 != 0) {
      const Slot slot = insert(index, id, static_cast<Slot>(step));
      const auto [entry, made] = expected.emplace(id, static_cast<Slot>(step));
      CHECK(slot == entry->second);
    } else {
      const auto found = expected.find(id);
      CHECK(index.erase(id) == (found == expected.end() ? kNoSlot : found->second));
      if (found != expected.end()) expected.erase(found);
    }
  }
  std::vector<int64_t> others;
  for (int64_t id = -population; id < -population / 2; ++id) others.push_back(id);
  check_equal(index, expected, others);
  index.map_slots(0, Index::kPositions, [](Slot slot) { return slot + 1; });
  for (auto& [id, slot] : expected) ++slot;
  check_equal(index, expected, others);
  index.clear();
  check_equal(index, {}, others);
}

// Random fills in steps of random sizes. Some of them end while the index grows. Ids leave in between.
void random_fill(uint64_t seed) {
  std::mt19937_64 random(seed);
  Index index(random());
  Oracle expected;
  std::vector<int64_t> ids, left;
  const auto goal = static_cast<size_t>(200 + random() % 60000);
  while (expected.size() < goal) {
    const auto count = static_cast<int64_t>(1 + random() % (1 + expected.size() / 4));
    index.reserve(count);
    for (int64_t i = 0; i < count; ++i) {
      const auto id = static_cast<int64_t>(random() >> random() % 64);
      if (!expected.emplace(id, static_cast<Slot>(ids.size())).second) continue;
      index.insert(id, index.hash(id), static_cast<Slot>(ids.size()));
      ids.push_back(id);
    }
    for (int64_t i = 0; i < count / 3; ++i) {
      const int64_t id = ids[random() % ids.size()];
      const auto found = expected.find(id);
      CHECK(index.erase(id) == (found == expected.end() ? kNoSlot : found->second));
      if (found == expected.end()) continue;
      left.push_back(id);
      expected.erase(found);
    }
  }
  left.erase(std::remove_if(left.begin(), left.end(), [&](int64_t id) { return expected.count(id) > 0; }), left.end());
  check_equal(index, expected, left);
}

// Fills the index and removes half of the ids, in a few steps and in many.
void fill_and_drain(int64_t count, int64_t step) {
  Index index(3);
  Oracle expected;
  for (int64_t id = 0; id < count; ++id) {
    if (id % step == 0) index.reserve(step);
    index.insert(id * 8, index.hash(id * 8), static_cast<Slot>(id));
    expected[id * 8] = static_cast<Slot>(id);
  }
  CHECK(index.bytes() < 18 * (count + step) + (1 << 16));
  check_equal(index, expected);
  for (int64_t id = 0; id < count; id += 2) {
    CHECK(index.erase(id * 8) == static_cast<Slot>(id));
    expected.erase(id * 8);
  }
  check_equal(index, expected);
}

// The mean number of lines in which ids are searched that are not in the index.
double lines_of_a_miss(const Index& index) {
  constexpr int64_t kSearches = 20000;
  double lines = 0;
  for (int64_t id = 1; id <= kSearches; ++id) lines += static_cast<double>(index.lines_searched(-id));
  return lines / kSearches;
}

// Old ids leave and as many new ones come, as in a table that evicts. Searches stay as short as in an index that was
// only filled, also while the index grows.
void searches_stay_short(int64_t count) {
  Index index(13);
  std::deque<int64_t> ids;
  Oracle expected;
  int64_t next = 0;
  const auto fill = [&](int64_t some) {
    for (; some > 0; --some, ++next) {
      index.reserve(1);
      index.insert(next, index.hash(next), static_cast<Slot>(next));
      expected[next] = static_cast<Slot>(next);
      ids.push_back(next);
    }
  };
  fill(count);
  const double fresh = lines_of_a_miss(index);
  const int64_t bytes = index.bytes();
  std::mt19937_64 random(1);
  for (int64_t turns = 0; turns < 4 * count; turns += 500) {
    for (int64_t i = 0; i < 500; ++i) {
      std::swap(ids.front(), ids[random() % ids.size()]);
      CHECK(index.erase(ids.front()) == expected.at(ids.front()));
      expected.erase(ids.front());
      ids.pop_front();
    }
    fill(500);
  }
  CHECK(index.bytes() == bytes);
  const double later = lines_of_a_miss(index);
  if (later > 1.1 * fresh) std::fprintf(stderr, "%.2f lines, and %.2f in a new index\n", later, fresh);
  CHECK(later <= 1.1 * fresh);
  check_equal(index, expected);
}

void parts_fill_in_parallel() {
  constexpr int64_t kCount = 200000;
  Index index(7);
  Oracle expected;
  Threads threads(4);
  for (int64_t first = 0; first < kCount; first += kCount / 5) {
    index.reserve(kCount / 5);
    std::vector<std::vector<int64_t>> by_part(Index::kParts);
    for (int64_t id = first; id < first + kCount / 5; ++id) {
      by_part[Index::part_of(index.hash(id))].push_back(id);
      expected[id] = static_cast<Slot>(id);
    }
    std::vector<std::vector<int64_t>> left(Index::kParts);
    recstore::for_each_task(threads, Index::kParts, [&](int64_t p) {
      for (const int64_t id : by_part[p]) {
        if (!index.insert_within_part(id, index.hash(id), static_cast<Slot>(id))) left[p].push_back(id);
      }
    });
    int64_t alone = 0;
    for (const auto& ids : left) {
      for (const int64_t id : ids) index.insert(id, index.hash(id), static_cast<Slot>(id));
      alone += static_cast<int64_t>(ids.size());
    }
    index.inserted(kCount / 5 - alone);
    CHECK(alone < kCount / 50);
    check_equal(index, expected);
  }
}

// Half of the ids are replaced by others, again and again, and searches stay as short as those of a new index.
void parts_are_emptied_in_parallel() {
  constexpr int64_t kCount = 50000;
  Index index(13);
  Oracle expected;
  Threads threads(4);
  int64_t next = 0;
  const auto fill = [&](int64_t count) {
    index.reserve(count);
    for (const int64_t end = next + count; next < end; ++next) {
      insert(index, next, static_cast<Slot>(next));
      expected[next] = static_cast<Slot>(next);
    }
  };
  fill(kCount);
  const double fresh = lines_of_a_miss(index);
  for (int round = 0; round < 10; ++round) {
    std::vector<std::vector<int64_t>> by_part(Index::kParts), left(Index::kParts);
    for (auto each = expected.begin(); each != expected.end();) {
      const int64_t id = each->first;
      if (recstore::mix(static_cast<uint64_t>(id + round)) % 2 == 0) {
        by_part[Index::part_of(index.hash(id))].push_back(id);
        each = expected.erase(each);
      } else {
        ++each;
      }
    }
    recstore::for_each_task(threads, Index::kParts, [&](int64_t p) {
      for (const int64_t id : by_part[p]) {
        if (!index.erase_within_part(id, index.hash(id))) left[p].push_back(id);
      }
    });
    int64_t alone = 0, together = 0;
    for (int p = 0; p < Index::kParts; ++p) {
      alone += static_cast<int64_t>(left[p].size());
      together += static_cast<int64_t>(by_part[p].size() - left[p].size());
    }
    index.inserted(-together);
    for (const auto& ids : left) {
      for (const int64_t id : ids) CHECK(index.erase(id) == static_cast<Slot>(id));
    }
    CHECK(alone < kCount / 25);
    check_equal(index, expected);
    fill(alone + together);
  }
  CHECK(lines_of_a_miss(index) <= 1.1 * fresh);
  check_equal(index, expected);
}

// An index that has grown for inserts neither grows nor moves entries while they arrive, also if it was growing before.
void room_for_inserts() {
  for (const int64_t before : {0, 1000, 50000, 50300}) {
    Index index(5);
    Oracle expected;
    const auto add = [&](int64_t id) {
      index.reserve(1);
      insert(index, id, static_cast<Slot>(id));
      expected[id] = static_cast<Slot>(id);
    };
    for (int64_t id = 0; id < before; ++id) add(id);
    index.grow_for(70000);
    check_equal(index, expected);
    const int64_t bytes = index.bytes();
    for (int64_t id = before; id < before + 70000; ++id) add(id);
    CHECK(index.bytes() == bytes);
    CHECK(bytes < (before + 70000) * 18 + (1 << 16));
    check_equal(index, expected);
  }
}

// A new index has one line for each part, so that each of its lines may be home to ids of two parts.
void parts_do_not_share_lines() {
  Index index(11);
  index.reserve(100);
  for (int64_t id = 0; id < 100; ++id) CHECK(!index.insert_within_part(id, index.hash(id), static_cast<Slot>(id)));
  check_equal(index, {});
  for (int64_t id = 0; id < 100; ++id) insert(index, id, static_cast<Slot>(id));
  for (int64_t id = 0; id < 100; ++id) CHECK(!index.erase_within_part(id, index.hash(id)));
  CHECK(index.size() == 100);
}

// Ids that were chosen for one salt do not crowd an index with another salt, and crowded lines are searched correctly.
void crafted_ids() {
  constexpr uint64_t kKnown = 0x1234567890abcdefu;
  std::vector<int64_t> ids;
  for (uint64_t i = 0; i < 20000; ++i) {
    ids.push_back(static_cast<int64_t>(recstore::unmix((uint64_t{0xFFFFFFFF} << 32) + i) ^ kKnown));
  }
  for (const uint64_t salt : {kKnown, kKnown + 1}) {
    const size_t count = salt == kKnown ? 3000 : ids.size();  // with the known salt, all of them have one home
    Index index(salt);
    Oracle expected;
    for (size_t i = 0; i < count; ++i) {
      CHECK(insert(index, ids[i], static_cast<Slot>(i)) == i);
      expected[ids[i]] = static_cast<Slot>(i);
    }
    if (salt != kKnown) CHECK(index.bytes() < 18 * 20000 + (1 << 16));
    check_equal(index, expected, std::vector<int64_t>(ids.begin() + static_cast<int64_t>(count), ids.end()));
    for (size_t i = 0; i < count; ++i) CHECK(index.erase(ids[i]) == i);
    check_equal(index, {});
  }
}

}  // namespace

int main() {
  every_int64_is_an_id();
  for (uint64_t seed = 0; seed < 4; ++seed) random_stream(seed, 300, 20000);
  random_stream(99, 50000, 200000);
  for (uint64_t seed = 0; seed < (kIsSlow ? 4 : 8); ++seed) random_fill(seed);
  for (const int64_t step : {1, 1000, 50000}) fill_and_drain(50000, step);
  for (const int64_t count : {20000, 23000, 25000}) searches_stay_short(count);
  parts_fill_in_parallel();
  parts_are_emptied_in_parallel();
  room_for_inserts();
  parts_do_not_share_lines();
  crafted_ids();
  std::puts("test_index passed");
}
