// Slots that a prefetch resolves ahead of the training lookup change no result. Random streams of calls run on two
// sides with the same tables: on one side the lookups take the slots, on the other side they find all slots themselves.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cold/cold_rows.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "lookup/prefetch.h"
#include "rows/transfer.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kColumns = 256;  // 2 KiB for a row with its state, so that few free slots are worth a compaction
constexpr int64_t kBags = 3;
const std::vector<int64_t> kFeatureTables{0, 1, 0, 2};

struct Data {
  std::vector<int64_t> ids, offsets{0}, counts;
  std::vector<float> grad;

  Batch batch() const {
    Batch batch;
    batch.ids = ids.data();
    batch.n_ids = static_cast<int64_t>(ids.size());
    batch.offsets = offsets.data();
    batch.bags = kBags;
    return batch;
  }
};

std::shared_ptr<Table> make_table(const Bounds& bounds, int64_t columns = kColumns) {
  TableConfig config;
  config.name = "t";
  config.column_end = columns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.optimizer.kind = OptimizerKind::kAdagrad;
  config.bounds = bounds;
  return std::make_shared<Table>(config);
}

// Tables, and the passes on them that have not ended.
struct Side {
  std::vector<std::shared_ptr<Table>> tables, spare;  // a spare table exchanges its rows with a table
  std::shared_ptr<const Group> group, other;          // two groups of the same tables
  std::vector<std::pair<std::shared_ptr<Pass>, std::shared_ptr<Data>>> passes;
  std::vector<float> out;
  Threads threads;

  Side(const std::vector<Bounds>& bounds, int count) : threads(count) {
    for (const Bounds& of_table : bounds) {
      tables.push_back(make_table(of_table));
      spare.push_back(make_table(of_table));
    }
    const std::vector<Routing> routings{Routing{}, Routing{10, 2, 1, true}, Routing{}};
    group = std::make_shared<const Group>(tables, routings, kFeatureTables, true);
    other = std::make_shared<const Group>(tables, routings, kFeatureTables, true);
    out.resize(static_cast<size_t>(kBags * group->columns()));
  }
  std::string state() {
    std::string state;
    for (const auto& table : tables) {
      const LockedTable locked(table);
      table->settle_passes(threads);
      std::vector<int64_t> ids(static_cast<size_t>(table->size()));
      table->ids(ids.data());
      std::sort(ids.begin(), ids.end());
      std::vector<char> images(ids.size() * static_cast<size_t>(table->image_bytes()));
      read_images(*table, ids.data(), table->size(), images.data(), threads);
      state.append(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int64_t));
      state.append(images.begin(), images.end());
      state.append(reinterpret_cast<const char*>(&table->counters()), sizeof(Counters));
    }
    return state;
  }
};

using Random = std::mt19937_64;

std::shared_ptr<Data> random_data(Random& random, int64_t ids) {
  auto data = std::make_shared<Data>();
  for (size_t f = 0; f < kFeatureTables.size(); ++f) {
    data->counts.push_back(0);
    for (int64_t bag = 0; bag < kBags; ++bag) {
      const auto length = static_cast<int64_t>(random() % 8);
      for (int64_t i = 0; i < length; ++i) {
        data->ids.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(ids)));
      }
      data->counts.back() += length;
      data->offsets.push_back(static_cast<int64_t>(data->ids.size()));
    }
  }
  for (int64_t i = 0; i < kBags * static_cast<int64_t>(kFeatureTables.size()) * kColumns; ++i) {
    data->grad.push_back(static_cast<float>(random() % 64) * 0.01f - 0.3f);
  }
  return data;
}

// Does the same on both sides. Returns whether the tables have room for it, beside the rows of the pending passes.
template <class Call>  // call(side)
bool on_both(const std::array<Side*, 2>& sides, const Call& call) {
  std::array<bool, 2> room{true, true};
  for (size_t s = 0; s < 2; ++s) {
    try {
      call(*sides[s]);
    } catch (const InvalidArgument&) {
      room[s] = false;
    }
  }
  CHECK(room[0] == room[1]);
  return room[0];
}
void forward(const std::array<Side*, 2>& sides, const std::shared_ptr<Data>& data) {
  const bool room = on_both(sides, [&](Side& side) {
    side.passes.emplace_back(begun(side.group, data->batch(), side.out.data(), side.threads, data), data);
  });
  if (room) CHECK(std::memcmp(sides[0]->out.data(), sides[1]->out.data(), sides[0]->out.size() * sizeof(float)) == 0);
}

// twin_prefetches: whether the second side prefetches too, by a group that no lookup uses. Tables without bounds need
// it, because a prefetch makes rows there.
void a_random_stream(uint64_t seed, const std::vector<Bounds>& bounds, bool twin_prefetches) {
  Random random(seed);
  Side ahead(bounds, 1 + static_cast<int>(seed % 3)), plain(bounds, 1);
  const std::array<Side*, 2> sides{&ahead, &plain};
  std::vector<std::shared_ptr<Data>> prefetched;
  constexpr int64_t kIds = 60;
  for (int call = 0; call < 150; ++call) {
    const auto choice = random() % 20;
    const size_t t = random() % bounds.size();
    if (choice < 6) {
      const auto data = random_data(random, kIds);
      const auto n = static_cast<int64_t>(data->ids.size());
      prefetch(*ahead.group, data->ids.data(), n, data->counts, ahead.threads);
      if (twin_prefetches) prefetch(*plain.other, data->ids.data(), n, data->counts, plain.threads);
      prefetched.push_back(data);
    } else if (choice < 13) {
      std::shared_ptr<Data> data = random_data(random, kIds);
      if (!prefetched.empty() && choice > 6) {
        const size_t chosen = choice < 11 ? 0 : random() % prefetched.size();
        data = prefetched[chosen];
        prefetched.erase(prefetched.begin() + static_cast<int64_t>(chosen));
        if (choice == 11 && !data->ids.empty()) {
          data->ids[random() % data->ids.size()] = static_cast<int64_t>(random() % kIds);
        }
      }
      forward(sides, data);
    } else if (choice < 16) {
      if (ahead.passes.empty()) continue;
      const size_t chosen = random() % ahead.passes.size();
      const bool drop = random() % 8 == 0;
      for (Side* side : sides) {
        const auto& [pass, data] = side->passes[chosen];
        if (!drop) pass->backward(data->grad.data(), {0.1f, 0.2f, 0.3f}, nullptr, side->threads);
        side->passes.erase(side->passes.begin() + static_cast<int64_t>(chosen));
      }
    } else if (choice == 16) {
      std::vector<int64_t> ids;
      for (int i = 0; i < 10; ++i) ids.push_back(static_cast<int64_t>(random() % kIds));
      for (Side* side : sides) LockedTable(side->tables[t])->remove(ids.data(), 10);
    } else if (choice == 17) {
      const std::vector<int64_t> ids{static_cast<int64_t>(random() % kIds)};
      const std::vector<float> weights(kColumns, static_cast<float>(random() % 100));
      on_both(sides, [&](Side& side) {
        write_weights(*LockedTable(side.tables[t]), ids.data(), 1, weights.data(), side.threads);
      });
    } else if (choice == 18) {
      // Rows below many others move to their slots when the others have left.
      if (bounds[t].limit_new_rows()) continue;
      std::vector<int64_t> ids;
      for (int64_t id = 0; id < 1600; ++id) ids.push_back(1000 + id);
      for (Side* side : sides) {
        std::vector<Slot> slots(ids.size());
        std::vector<int64_t> some;
        for (int64_t id = 0; id < kIds; ++id) some.push_back(id);
        const LockedTable table(side->tables[t]);
        table->remove(some.data(), kIds / 2);
        find_or_insert(*table, ids.data(), 1600, slots.data(), side->threads, Arrival::kWrite);
        find_or_insert(*table, some.data(), kIds, slots.data(), side->threads, Arrival::kUpdate);
      }
      const auto data = random_data(random, kIds);
      const auto n = static_cast<int64_t>(data->ids.size());
      prefetch(*ahead.group, data->ids.data(), n, data->counts, ahead.threads);
      if (twin_prefetches) prefetch(*plain.other, data->ids.data(), n, data->counts, plain.threads);
      for (Side* side : sides) LockedTable(side->tables[t])->remove(ids.data(), 1600);
      forward(sides, data);
    } else {
      for (Side* side : sides) {
        const LockedTable one(side->tables[t]), two(side->spare[t]);
        one->exchange_rows(*two);
      }
    }
    if (call % 30 == 29) CHECK(ahead.state() == plain.state());
  }
  for (Side* side : sides) side->passes.clear();
  CHECK(ahead.state() == plain.state());
}

void random_streams() {
  Bounds recent, frequent, expiring, admitting;
  recent.max_rows = 55;
  recent.eviction = Eviction::kLeastRecent;
  frequent.max_rows = 55;
  frequent.eviction = Eviction::kLeastFrequent;
  frequent.expiry = 6;
  expiring.expiry = 4;
  admitting.min_frequency = 2;
  admitting.counter_bytes = 1 << 12;
  for (uint64_t seed = 0; seed < (kIsSlow ? 3 : 6); ++seed) {
    a_random_stream(seed, {Bounds{}, recent, expiring}, true);
    a_random_stream(seed, {recent, frequent, admitting}, false);
  }
}

// One table of four rows, a batch of their ids, and a lookup of that batch.
struct Small {
  SerialExecutor executor;
  std::shared_ptr<Table> table = make_table({}, 16);
  std::shared_ptr<const Group> group = one_table_group(table);
  std::vector<int64_t> ids{1, 2, 3, 4};
  std::vector<float> out = std::vector<float>(64);

  Batch batch() const {
    Batch batch;
    batch.ids = ids.data();
    batch.n_ids = batch.bags = static_cast<int64_t>(ids.size());
    return batch;
  }
  void prefetch() {
    recstore::prefetch(*group, ids.data(), static_cast<int64_t>(ids.size()), {static_cast<int64_t>(ids.size())},
                       executor);
  }
  std::vector<float> looked_up() {
    begun(group, batch(), out.data(), executor);
    return out;
  }
  // Exchanges two slots that were resolved ahead, so that a lookup that takes them exchanges their rows.
  void exchange_slots() {
    auto ahead = group->coming->take(batch());
    CHECK(ahead != nullptr);
    std::swap(ahead->slot_data()[0], ahead->slot_data()[1]);
    group->coming->add(std::move(ahead));
  }
};

void a_lookup_takes_the_slots() {
  Small small;
  const std::vector<float> rows = small.looked_up();
  small.prefetch();
  small.exchange_slots();
  const std::vector<float> exchanged = small.looked_up();
  CHECK(std::equal(rows.begin(), rows.begin() + 16, exchanged.begin() + 16) &&
        std::equal(rows.begin() + 16, rows.begin() + 32, exchanged.begin()));
  CHECK(std::equal(rows.begin() + 32, rows.end(), exchanged.begin() + 32));
  CHECK(small.looked_up() == rows);  // slots are taken once
}

void slots_belong_to_one_batch() {
  Small small;
  const std::vector<float> rows = small.looked_up();
  small.prefetch();
  small.exchange_slots();
  small.ids = {1, 2, 3};
  small.looked_up();
  CHECK(std::equal(rows.begin(), rows.begin() + 48, small.out.begin()));
  // A batch that is long enough for samples agrees with another one in them, and differs between them.
  for (int64_t id = 4; id <= 400; ++id) small.ids.push_back(id);
  small.out.resize(small.ids.size() * 16);
  const std::vector<float> all = small.looked_up();
  small.prefetch();
  std::swap(small.ids[1], small.ids[2]);
  const Batch changed = small.batch();
  CHECK(small.group->coming->take(changed) != nullptr);
  small.prefetch();
  std::swap(small.ids[1], small.ids[2]);
  CHECK(small.looked_up() == all);
}

void a_row_that_leaves_takes_its_slot_along() {
  Small small;
  const std::vector<float> rows = small.looked_up();
  small.prefetch();
  const std::vector<int64_t> removed{2}, made{9};
  {
    const LockedTable table(small.table);
    Slot left, taken;
    find(*table, removed.data(), 1, &left, small.executor);
    table->remove(removed.data(), 1);
    find_or_insert(*table, made.data(), 1, &taken, small.executor, Arrival::kUpdate);
    CHECK(taken == left);
  }
  CHECK(small.looked_up() == rows);  // the row is made again
  CHECK(small.table->size() == 5);
}

void the_record_of_vacated_slots_is_bounded() {
  Vacated vacated;
  vacated.add(7);
  CHECK(vacated.now() == 0);  // nothing is recorded before start()
  vacated.start(4);
  const Vacated::Stamp stamp = vacated.now();
  CHECK(StaleSlots(vacated, stamp).none() && !StaleSlots(vacated, stamp).all());
  for (const Slot slot : {1, 2, 3, 4}) vacated.add(slot);
  const StaleSlots stale(vacated, stamp);
  for (const Slot slot : {1, 2, 3, 4}) CHECK(stale.contains(slot));
  CHECK(!stale.all() && !stale.none() && !stale.contains(5));
  vacated.add(5);
  CHECK(StaleSlots(vacated, stamp).all());
  const Vacated::Stamp later = vacated.now();
  vacated.add_all();
  CHECK(StaleSlots(vacated, later).all() && !StaleSlots(vacated, vacated.now()).all());
}

void few_batches_wait() {
  Small small;
  const auto ahead = [&](int64_t first) {
    small.ids = {first, 2, 3, 4};
    small.prefetch();
  };
  const auto waits = [&](int64_t first) {
    small.ids = {first, 2, 3, 4};
    return small.group->coming->take(small.batch()) != nullptr;
  };
  for (int64_t first = 10; first < 15; ++first) ahead(first);
  CHECK(!waits(10) && waits(12) && !waits(11) && waits(13));  // the newest four; a batch that is used drops older ones
  CHECK(!waits(99) && waits(14));                             // three lookups have used other batches
  ahead(15);
  for (int i = 0; i < 4; ++i) CHECK(!waits(99));
  CHECK(!waits(15));
}

void a_closed_table_is_refused() {
  Small small;
  small.prefetch();
  LockedTable(small.table)->close();
  CHECK_THROWS(small.looked_up(), InvalidArgument);
  CHECK_THROWS(small.prefetch(), InvalidArgument);
}

}  // namespace

int main() {
  random_streams();
  a_lookup_takes_the_slots();
  slots_belong_to_one_batch();
  a_row_that_leaves_takes_its_slot_along();
  the_record_of_vacated_slots_is_bounded();
  few_batches_wait();
  a_closed_table_is_refused();
  std::printf("test_ahead passed\n");
}
