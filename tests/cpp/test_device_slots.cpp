// The rows that are also on a device: random calls on a table whose rows are on the host alone, and on one with device
// slots, give the same values. The copies to the host end as late as they may, and plans are abandoned at random.

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "base/error.h"
#include "rows/device_slots.h"
#include "testing.h"

using namespace recstore;
using DeviceSlot = DeviceSlots::DeviceSlot;

namespace {

constexpr int64_t kIds = 25;
constexpr uint64_t kNonsense = 0x7F7F7F7F;

// Lets device slots read the frequency of each row from a function.
template <class Frequency>
DeviceSlots::Frequencies frequencies_of(const Frequency& frequency, bool ascend = false) {
  const auto read = [frequency](const Slot* rows, int64_t n, uint32_t* frequencies) {
    for (int64_t i = 0; i < n; ++i) frequencies[i] = rows[i] == kNoSlot ? 0 : frequency(rows[i]);
  };
  return {read, ascend};
}

// What an update does with a value.
uint64_t updated(uint64_t value, uint64_t by) { return (value ^ (by + 0x9E3779B97F4A7C15u)) * 0xBF58476D1CE4E5B9u; }

// The index and the rows of a host.
struct Host {
  std::map<int64_t, Slot> slots;                   // by id
  std::vector<uint64_t> rows;                      // by slot
  std::vector<Slot> free;                          // the lowest one is last
  std::vector<std::pair<uint64_t, Slot>> retired;  // the last pass that may refer to the slot

  Slot find_or_insert(int64_t id) {
    const auto place = slots.find(id);
    if (place != slots.end()) return place->second;
    Slot slot = static_cast<Slot>(rows.size());
    if (free.empty()) {
      rows.push_back(0);
    } else {
      slot = free.back();
      free.pop_back();
    }
    rows[slot] = updated(static_cast<uint64_t>(id), 7);
    slots[id] = slot;
    return slot;
  }
  void give_back(Slot slot) {
    free.push_back(slot);
    std::sort(free.rbegin(), free.rend());
  }
  void reclaim(uint64_t oldest) {
    for (auto& [last, slot] : retired) {
      if (last < oldest) give_back(std::exchange(slot, kNoSlot));
    }
    retired.erase(std::remove_if(retired.begin(), retired.end(), [](const auto& of) { return of.second == kNoSlot; }),
                  retired.end());
  }
};

// A host with a device.
struct WithDevice : Host {
  explicit WithDevice(int64_t size) : device(size), arena(static_cast<size_t>(size), kNonsense) {}

  DeviceSlots device;
  std::vector<uint64_t> arena;
  std::vector<uint64_t> flying;  // the copy to the host that has not been waited for
  std::map<Slot, uint64_t> frequency;
  int64_t hits = 0, arrivals = 0, refreshed = 0, written_back = 0, refused = 0, abandoned = 0;

  void land() {
    device.land([](Slot) {},
                [&](int64_t i, Slot slot) {
                  rows[slot] = flying[static_cast<size_t>(i)];
                  ++written_back;
                });
    CHECK(device.in_flight() == 0);
  }
  void settle_device_slots(const std::vector<DeviceSlot>& dirty) {
    land();
    std::vector<uint64_t> values;
    for (const DeviceSlot d : dirty) values.push_back(arena[d]);
    device.settled(dirty, [&](int64_t i, Slot slot) {
      rows[slot] = values[static_cast<size_t>(i)];
      ++written_back;
    });
  }
  void settle(const std::vector<Slot>& of) {
    settle_device_slots(device.dirty_slots({{of.data(), static_cast<int64_t>(of.size())}}));
    for (const Slot slot : of) CHECK(!device.is_behind(slot));
  }
  void write(Slot slot, uint64_t value) {
    CHECK(!device.is_behind(slot));
    device.wrote(slot);
    rows[slot] = value;
  }
  // Copies what a plan says. between: runs between the copies and the commit.
  template <class Between>
  void carry_out(bool abandon, const Between& between) {
    const DeviceSlots::Plan& plan = device.planned();
    std::vector<uint64_t> down, up;
    for (const DeviceSlot d : plan.leaving) down.push_back(arena[d]);
    for (const Slot slot : plan.rows) up.push_back(rows[slot]);
    if (abandon) {
      ++abandoned;
      between();
      return device.abort();
    }
    for (size_t i = 0; i < up.size(); ++i) arena[plan.targets[i]] = up[i];
    hits += plan.hits;
    arrivals += plan.arrivals;
    refreshed += static_cast<int64_t>(up.size()) - plan.arrivals;
    between();
    device.commit();
    if (!down.empty()) flying = std::move(down);  // a refresh sends nothing to the host
  }
};

struct Pass {
  uint64_t number;
  std::vector<Slot> plain, hosts;  // the slots of both tables
  bool is_on_device;
  std::vector<DeviceSlot> devices, distinct;
};

class Run {
 public:
  explicit Run(uint64_t seed) : random_(seed), table_(std::vector<int64_t>{6, 9, 14}[random_() % 3]) {}

  void run(int64_t calls) {
    for (int64_t call = 0; call < calls; ++call) {
      const uint64_t kind = random_() % 100;
      if (kind < 40) {
        if (passes_.size() < 4) forward();
      } else if (kind < 70) {
        if (!passes_.empty()) backward();
      } else if (kind < 78) {
        if (!passes_.empty()) end_pass(random_() % passes_.size());
      } else if (kind < 86) {
        write(any_id());
      } else if (kind < 90) {
        remove(any_id());
      } else if (kind < 94) {
        compact();
      } else {
        read();
      }
      CHECK(table_.device.rows() <= table_.device.size());
    }
  }
  const WithDevice& table() const { return table_; }

 private:
  uint64_t oldest() const { return passes_.empty() ? number_ + 1 : passes_.front().number; }
  int64_t any_id() { return static_cast<int64_t>(random_() % kIds); }
  void reclaim() {
    plain_.reclaim(oldest());
    table_.reclaim(oldest());
  }

  void forward() {
    Pass pass{++number_, {}, {}, false, {}, {}};
    for (uint64_t n = 1 + random_() % 6; n > 0; --n) {
      const int64_t id = std::min(any_id(), any_id());  // some ids are frequent
      pass.plain.push_back(plain_.find_or_insert(id));
      pass.hosts.push_back(table_.find_or_insert(id));
      CHECK(pass.plain.back() == pass.hosts.back());
    }
    before_.clear();
    passes_.push_back(pass);
    Pass& pending = passes_.back();
    if (random_() % 5 != 0) plan(pending);
    if (!pending.is_on_device) table_.settle(pending.hosts);
    for (size_t i = 0; i < pending.hosts.size(); ++i) {
      const uint64_t value = pending.is_on_device ? table_.arena[pending.devices[i]] : table_.rows[pending.hosts[i]];
      // A write between the copies and the commit comes after the lookup.
      const bool is_before = pending.is_on_device && value == before_[pending.plain[i]];
      CHECK(is_before || value == plain_.rows[pending.plain[i]]);
    }
    for (const Slot slot : pending.hosts) ++table_.frequency[slot];
  }
  void plan(Pass& pass) {
    for (const Slot slot : pass.plain) before_[slot] = plain_.rows[slot];
    table_.land();
    const std::vector<Slot> slots = pass.hosts;
    const auto half = static_cast<int64_t>(slots.size() / 2), rest = static_cast<int64_t>(slots.size()) - half;
    const auto frequencies = frequencies_of([&](Slot slot) { return table_.frequency[slot]; });
    const bool fits = table_.device.plan({{slots.data(), half}, {slots.data() + half, rest}}, pass.number, oldest(),
                                         frequencies, static_cast<int64_t>(table_.rows.size()));
    if (!fits) {
      ++table_.refused;
      return;
    }
    for (size_t i = 0; i < slots.size(); ++i) {
      pass.devices.push_back(table_.device.planned_slot(static_cast<int64_t>(i)));
    }
    pass.distinct = table_.device.planned().distinct;
    pass.is_on_device = random_() % 10 != 0;
    table_.carry_out(!pass.is_on_device, [&] { meanwhile(pass.is_on_device); });
  }
  // Another thread writes, removes or moves a row while rows are copied. A pass on the host reads its rows only later,
  // so that none of them may be removed before.
  void meanwhile(bool may_remove) {
    const uint64_t kind = random_() % 8;
    const int64_t id = any_id();
    const auto place = table_.slots.find(id);
    if (kind == 0 && place != table_.slots.end() && !table_.device.is_behind(place->second)) write(id);
    if (kind == 1 && may_remove) remove(id);
    if (kind == 2) compact();
  }

  void backward() {
    const size_t which = random_() % passes_.size();
    Pass& pass = passes_[which];
    std::vector<Slot> distinct = pass.plain;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    for (const Slot slot : distinct) plain_.rows[slot] = updated(plain_.rows[slot], pass.number);
    if (pass.is_on_device) {
      table_.device.plan_refresh(pass.distinct);
      table_.carry_out(false, [] {});
      for (const DeviceSlot d : pass.distinct) table_.arena[d] = updated(table_.arena[d], pass.number);
      table_.device.changed_on_device(pass.distinct, [](Slot) {}, [](Slot) {});
    } else {
      table_.settle(pass.hosts);
      for (const Slot slot : distinct) table_.write(slot, updated(table_.rows[slot], pass.number));
    }
    if (random_() % 10 != 0) end_pass(which);  // otherwise there is another backward
  }
  void end_pass(size_t which) {
    passes_.erase(passes_.begin() + static_cast<int64_t>(which));
    reclaim();
  }

  void write(int64_t id) {
    const auto place = table_.slots.find(id);
    if (place == table_.slots.end()) return;
    const uint64_t by = random_();
    plain_.rows[plain_.slots[id]] = updated(plain_.rows[plain_.slots[id]], by);
    if (table_.device.is_behind(place->second)) table_.settle(std::vector<Slot>{place->second});
    table_.write(place->second, updated(table_.rows[place->second], by));
  }
  void remove(int64_t id) {
    const auto place = table_.slots.find(id);
    if (place == table_.slots.end()) return;
    table_.device.left(place->second);
    table_.frequency.erase(place->second);
    for (Host* host : {&plain_, static_cast<Host*>(&table_)}) {
      host->retired.emplace_back(number_, host->slots[id]);
      host->slots.erase(id);
    }
    reclaim();
  }
  // The highest row moves to the lowest free slot.
  void compact() {
    if (table_.free.empty() || table_.slots.empty()) return;
    const auto highest = std::max_element(table_.slots.begin(), table_.slots.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
    const int64_t id = highest->first;
    const Slot from = highest->second, to = table_.free.back();
    if (to > from) return;
    table_.device.moved(from, to);
    table_.frequency[to] = table_.frequency[from];
    table_.frequency.erase(from);
    for (Host* host : {&plain_, static_cast<Host*>(&table_)}) {
      host->free.pop_back();
      host->slots[id] = to;
      host->rows[to] = host->rows[from];
      host->give_back(from);
    }
    for (Pass& pass : passes_) {
      std::replace(pass.plain.begin(), pass.plain.end(), from, to);
      std::replace(pass.hosts.begin(), pass.hosts.end(), from, to);
    }
    before_[to] = before_[from];
  }

  void read() {
    if (random_() % 2 == 0) {  // everything, as a save does
      table_.land();
      table_.settle_device_slots(table_.device.dirty_slots());
      for (const auto& [id, slot] : table_.slots) CHECK(table_.rows[slot] == plain_.rows[plain_.slots[id]]);
      return;
    }
    const auto place = table_.slots.find(any_id());
    if (place == table_.slots.end()) return;
    const DeviceSlot d = table_.device.device_slot(place->second);
    const uint64_t wanted = plain_.rows[plain_.slots[place->first]];
    if (d != DeviceSlots::kNone && table_.device.is_readable(d)) CHECK(table_.arena[d] == wanted);
    if (!table_.device.is_behind(place->second)) CHECK(table_.rows[place->second] == wanted);
  }

  std::mt19937_64 random_;
  Host plain_;
  WithDevice table_;
  std::map<Slot, uint64_t> before_;
  std::vector<Pass> passes_;
  uint64_t number_ = 0;
};

void test_random_calls() {
  int64_t arrivals = 0, refreshed = 0, written_back = 0, refused = 0, abandoned = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Run run(seed);
    run.run(2000);
    const DeviceSlots::Counts& counts = run.table().device.counts();
    CHECK(counts.hits == run.table().hits && counts.arrivals == run.table().arrivals);
    CHECK(counts.written_back == run.table().written_back);
    arrivals += run.table().arrivals;
    refreshed += run.table().refreshed;
    written_back += run.table().written_back;
    refused += run.table().refused;
    abandoned += run.table().abandoned;
  }
  CHECK(arrivals > 1000 && refreshed > 1000 && written_back > 1000 && refused > 1000 && abandoned > 1000);
}

// The least frequent rows leave first, and a row that is used does not leave for one that is not.
void test_victims() {
  DeviceSlots device(4);
  const std::vector<uint32_t> frequency{5, 1, 3, 2, 9, 9};
  const auto frequencies = frequencies_of([&](Slot slot) { return frequency[slot]; });
  const std::vector<Slot> first{0, 1, 2, 3};
  CHECK(device.plan({{first.data(), 4}}, 1, 1, frequencies, 6) && device.planned().arrivals == 4);
  device.commit();
  const std::vector<Slot> second{4, 0, 4, 5};
  CHECK(device.plan({{second.data(), 4}}, 2, 2, frequencies, 6));
  CHECK(device.planned().arrivals == 2 && device.planned().hits == 1 && device.planned().leaving.empty());
  device.commit();
  CHECK(device.device_slot(1) == DeviceSlots::kNone && device.device_slot(3) == DeviceSlots::kNone);
  CHECK(device.device_slot(0) != DeviceSlots::kNone && device.device_slot(2) != DeviceSlots::kNone);
}

// The rows that leave are the least frequent ones, of two with one frequency the one in the lower device slot, whether
// their frequencies are small or large.
void test_victims_in_order(uint32_t least, uint32_t frequencies_apart) {
  constexpr int64_t kRows = 400, kLeaving = 30;
  DeviceSlots device(kRows);
  const auto frequencies = frequencies_of(
      [&](Slot slot) { return least + static_cast<uint32_t>(slot * 7919 % kRows) / 3 * frequencies_apart; });
  std::vector<Slot> rows(kRows), arriving(kLeaving);
  std::iota(rows.begin(), rows.end(), Slot{0});
  std::iota(arriving.begin(), arriving.end(), static_cast<Slot>(kRows));
  CHECK(device.plan({{rows.data(), kRows}}, 1, 1, frequencies, kRows + kLeaving));
  device.commit();
  const auto rank = [&](Slot slot) {
    uint32_t frequency = 0;
    frequencies.read(&slot, 1, &frequency);
    return std::make_pair(frequency, device.device_slot(slot));
  };
  std::sort(rows.begin(), rows.end(), [&](Slot a, Slot b) { return rank(a) < rank(b); });
  CHECK(device.plan({{arriving.data(), kLeaving}}, 2, 2, frequencies, kRows + kLeaving));
  device.commit();
  for (int64_t i = 0; i < kRows; ++i) {
    CHECK((device.device_slot(rows[static_cast<size_t>(i)]) == DeviceSlots::kNone) == (i < kLeaving));
  }
}

// If frequencies ascend, not every row is read, and the same rows leave.
void test_victims_by_what_was_read() {
  constexpr int64_t kRows = 3000, kOnDevice = 600, kBatch = 40, kPasses = 500;
  std::mt19937_64 random(1);
  std::vector<uint32_t> frequency(kRows, 0);
  int64_t read[2] = {0, 0};
  DeviceSlots devices[2] = {DeviceSlots(kOnDevice), DeviceSlots(kOnDevice)};
  for (uint64_t pass = 1; pass <= kPasses; ++pass) {
    std::vector<Slot> rows;
    for (int64_t i = 0; i < kBatch; ++i) rows.push_back(static_cast<Slot>(random() % (1 + random() % kRows)));
    // A row is written by the host, and another one leaves the table, whose slot gets a new row.
    const auto written = static_cast<Slot>(random() % kRows), removed = static_cast<Slot>(random() % (kRows / 8));
    frequency[written] = static_cast<uint32_t>(random() % 3);
    frequency[removed] = 0;
    std::vector<DeviceSlot> leaving[2];
    for (const bool ascend : {false, true}) {
      DeviceSlots& device = devices[ascend];
      device.wrote(written);
      device.left(removed);
      if (pass == kPasses / 2) device.clear();
      const auto counted = [&](Slot slot) {
        ++read[ascend];
        return frequency[slot];
      };
      CHECK(device.plan({{rows.data(), kBatch}}, pass, pass, frequencies_of(counted, ascend), kRows));
      const std::vector<DeviceSlot> distinct = device.planned().distinct;
      leaving[ascend] = device.planned().leaving;
      device.commit();
      device.land([](Slot) {}, [](int64_t, Slot) {});
      device.changed_on_device(distinct, [](Slot) {}, [](Slot) {});
    }
    CHECK(leaving[0] == leaving[1]);
    for (Slot slot = 0; slot < kRows; ++slot) CHECK(devices[0].device_slot(slot) == devices[1].device_slot(slot));
    for (const Slot slot : rows) frequency[slot] += 1 + frequency[slot] / 4;
  }
  CHECK(devices[0].counts().arrivals > 10 * kOnDevice && read[1] > 0 && 3 * read[1] < 2 * read[0]);
}

// A pass that is pending keeps its device slots, and a plan without room changes nothing.
void test_no_room() {
  DeviceSlots device(2);
  const auto frequencies = frequencies_of([](Slot) { return uint32_t{0}; });
  const std::vector<Slot> first{0, 1}, second{2};
  CHECK(device.plan({{first.data(), 2}}, 1, 1, frequencies, 3));
  device.commit();
  CHECK(!device.plan({{second.data(), 1}}, 2, 1, frequencies, 3));
  CHECK(device.planned().rows.empty() && device.rows() == 2);
  CHECK(device.plan({{second.data(), 1}}, 3, 3, frequencies, 3));
  device.commit();
  CHECK(device.rows() == 2 && device.device_slot(2) != DeviceSlots::kNone);
  device.clear();
  CHECK(device.rows() == 0 && device.dirty_slots().empty());
}

// A plan that would not see the rows in flight is refused.
void test_plan_before_land() {
  DeviceSlots device(1);
  const auto frequencies = frequencies_of([](Slot) { return uint32_t{0}; });
  const std::vector<Slot> first{0}, second{1};
  CHECK(device.plan({{first.data(), 1}}, 1, 1, frequencies, 2));
  const std::vector<DeviceSlot> distinct = device.planned().distinct;
  device.commit();
  device.changed_on_device(distinct, [](Slot) {}, [](Slot) {});
  CHECK(device.plan({{second.data(), 1}}, 2, 2, frequencies, 2));
  device.commit();
  CHECK(device.in_flight() == 1 && device.is_behind(0));
  CHECK_THROWS(device.plan({{first.data(), 1}}, 3, 3, frequencies, 2), InvalidArgument);
  int64_t landed = 0;
  device.land([](Slot) {}, [&](int64_t, Slot slot) { landed += slot == 0 ? 1 : 100; });
  CHECK(landed == 1 && !device.is_behind(0));
}

}  // namespace

int main() {
  test_random_calls();
  test_victims();
  test_victims_in_order(0, 1);
  test_victims_in_order(250, 1);
  test_victims_in_order(250, 2);
  test_victims_in_order(1000, 1000);
  test_victims_in_order(uint32_t{1} << 31, 10'000'000);
  test_victims_by_what_was_read();
  test_no_room();
  test_plan_before_land();
  return 0;
}
