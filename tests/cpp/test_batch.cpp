// Batches and groups as the ops prepare them: offsets, ids by table and by group, routing.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "base/error.h"
#include "lookup/group.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kMany = 200000;  // several tasks

std::shared_ptr<Table> make_table(const char* name, int64_t columns) {
  TableConfig config;
  config.name = name;
  config.column_end = columns;
  return std::make_shared<Table>(config);
}

void bags_are_counted_from_offsets() {
  CHECK(count_bags(1, 3) == 0);
  CHECK(count_bags(7, 3) == 2);
  CHECK(count_bags(4, 1) == 3);
  CHECK(count_bags(1, 0) == 0);
  CHECK_THROWS(count_bags(0, 3), InvalidArgument);
  CHECK_THROWS(count_bags(6, 3), InvalidArgument);
  CHECK_THROWS(count_bags(2, 0), InvalidArgument);
}

template <class T>
void offsets_are_copied() {
  Threads executor(3);
  std::vector<T> offsets(kMany);
  for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<T>(i * 3);
  offsets.front() = std::numeric_limits<T>::min();
  offsets.back() = std::numeric_limits<T>::max();
  const auto copy = copy_offsets(offsets.data(), kMany, executor);
  CHECK(std::equal(offsets.begin(), offsets.end(), static_cast<const int64_t*>(copy.data())));
}

void offsets_that_descend_are_refused_in_every_task() {
  Threads executor(3);
  std::vector<int64_t> offsets(kMany + 1);
  for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<int64_t>(i);
  Batch batch;
  batch.offsets = offsets.data();
  batch.n_ids = batch.bags = kMany;
  check_offsets(batch, 1, executor);
  for (const size_t place : {size_t{1}, size_t{65535}, size_t{65536}, size_t{kMany - 1}}) {
    std::swap(offsets[place], offsets[place + (place + 1 < kMany ? 1 : -1)]);
    CHECK_THROWS(check_offsets(batch, 1, executor), InvalidArgument);
    std::swap(offsets[place], offsets[place + (place + 1 < kMany ? 1 : -1)]);
  }
}

void mixed_ids_are_unmixed() {
  Threads executor(3);
  std::mt19937_64 random(1);
  std::vector<int64_t> ids(kMany), mixed(ids.size()), back(ids.size());
  for (int64_t& id : ids) id = static_cast<int64_t>(random());
  mix_ids(ids.data(), kMany, false, mixed.data(), executor);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(static_cast<uint64_t>(mixed[i]) == mix(static_cast<uint64_t>(ids[i])));
  mix_ids(mixed.data(), kMany, true, back.data(), executor);
  CHECK(back == ids);
}

// The split of TorchRec's row-wise input distribution, which Routing undoes.
struct Split {
  int64_t rank;
  int64_t local;
};
Split split(int64_t id, int64_t block_rows, int64_t ranks) {
  const auto i = static_cast<uint64_t>(id), rows = static_cast<uint64_t>(block_rows), n = static_cast<uint64_t>(ranks);
  if (i < rows * n) return {static_cast<int64_t>(i / rows), static_cast<int64_t>(i % rows)};
  return {static_cast<int64_t>(i % n), static_cast<int64_t>(i / n)};
}

void routing_gives_raw_ids_back() {
  std::mt19937_64 random(2);
  for (const bool mixed : {false, true}) {
    for (int i = 0; i < 10000; ++i) {
      const auto id = static_cast<int64_t>(i % 2 == 0 ? random() : random() % 5000);
      const auto sent = mixed ? static_cast<int64_t>(mix(static_cast<uint64_t>(id))) : id;
      const Split to = split(sent, 1000, 3);
      CHECK((Routing{1000, 3, to.rank, mixed}.raw_id(to.local) == id));
    }
  }
  CHECK(Routing{}.raw_id(-7) == -7);
}

// A batch of three features, the first and the last of one table.
void ids_of_a_table_follow_the_features() {
  const std::vector<std::shared_ptr<Table>> tables{make_table("first", 4), make_table("second", 2)};
  const Group group(tables, {Routing{10, 2, 1, false}, Routing{}}, {0, 1, 0}, false);
  CHECK(group.columns() == 10 && (group.column_offsets == std::vector<int64_t>{0, 4, 6, 10}));
  const std::vector<int64_t> ids{1, 2, 3, 4, 5, 6, 7}, offsets{0, 2, 3, 3, 5, 6, 7};
  Batch batch;
  batch.ids = ids.data();
  batch.n_ids = 7;
  batch.offsets = offsets.data();
  batch.bags = 2;
  CHECK((count_table_ids(group, batch) == std::vector<int64_t>{5, 2}));
  std::vector<int64_t> first(5), second(2);
  copy_table_ids(group, batch, {first.data(), second.data()});
  CHECK((first == std::vector<int64_t>{11, 12, 13, 16, 17}));
  CHECK((second == std::vector<int64_t>{4, 5}));
}

void one_table_makes_a_group() {
  const auto table = make_table("one", 3);
  const auto group = one_table_group(table);
  CHECK(group->tables.front() == table && group->features() == 1 && group->columns() == 3 && !group->mean);
  {
    const auto locks = group->lock();
  }
  LockedTable(table)->close();
  CHECK_THROWS(group->lock(), InvalidArgument);
  CHECK_THROWS(LockedTable{table}, InvalidArgument);
  CHECK(table->mutex().try_lock());  // the calls that failed have released the lock
  table->mutex().unlock();
}

void counts_divide_the_ids() {
  const auto first = one_table_group(make_table("first", 4)), second = one_table_group(make_table("second", 2));
  const std::vector<int64_t> ids{1, 2, 3, 4, 5};
  std::vector<GroupRows> parts{{first, {}}, {second, {}}, {first, {}}};
  CHECK(divide_ids(parts, ids.data(), 5, {2, 3, 0}) == 2 * 4 + 3 * 2);
  CHECK(parts[0].batch.ids == ids.data() && parts[0].batch.n_ids == 2 && parts[0].batch.bags == 2);
  CHECK(parts[1].batch.ids == ids.data() + 2 && parts[1].batch.n_ids == 3);
  CHECK(parts[2].batch.ids == ids.data() + 5 && parts[2].batch.n_ids == 0);
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{2, 3},
                                             {2, 3, 0, 0},
                                             {2, 2, 0},
                                             {2, 3, 1},
                                             {6, -1, 0},
                                             {-1, 6, 0},
                                             {kLargest, kLargest, 7}}) {
    CHECK_THROWS(divide_ids(parts, ids.data(), 5, counts), InvalidArgument);
  }
  const auto two = std::make_shared<const Group>(std::vector<std::shared_ptr<Table>>{make_table("t", 4)},
                                                 std::vector<Routing>(1), std::vector<int64_t>{0, 0}, false);
  parts[1].group = two;
  CHECK_THROWS(divide_ids(parts, ids.data(), 5, {2, 3, 0}), InvalidArgument);
}

}  // namespace

int main() {
  bags_are_counted_from_offsets();
  offsets_are_copied<int32_t>();
  offsets_are_copied<int64_t>();
  offsets_that_descend_are_refused_in_every_task();
  mixed_ids_are_unmixed();
  routing_gives_raw_ids_back();
  ids_of_a_table_follow_the_features();
  one_table_makes_a_group();
  counts_divide_the_ids();
  std::puts("test_batch passed");
}
