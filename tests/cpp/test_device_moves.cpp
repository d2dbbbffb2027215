// Moves of the rows of several tables between the host and a device, and plans for batches that are prefetched.

#include "lookup/device_moves.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"
#include "lookup/device_pass.h"
#include "lookup/find.h"
#include "lookup/prefetch.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kSlots = 8;  // device slots of a table

std::shared_ptr<Table> make_table(int64_t columns) {
  TableConfig config;
  config.column_end = columns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.optimizer.kind = OptimizerKind::kRowWiseAdagrad;
  auto table = std::make_shared<Table>(config);
  table->make_device_slots(kSlots);
  return table;
}

// Two tables with rows of different sizes, and two features of each.
struct Work {
  Work() : tables{make_table(3), make_table(6)} {
    group = std::make_shared<const Group>(tables, std::vector<Routing>(2), std::vector<int64_t>{0, 1, 1, 0}, false);
  }
  Tables tables;
  std::shared_ptr<const Group> group;

  int64_t stride(size_t t) const { return ArenaLayout::of(tables[t]->config()).stride(); }
  const DeviceSlots::Plan& plan(size_t t) const { return tables[t]->device()->planned(); }
  Slot slot(size_t t, int64_t id) const { return tables[t]->index().find(id); }
  bool is_on_device(size_t t, int64_t id) const {
    return tables[t]->device()->device_slot(slot(t, id)) != DeviceSlots::kNone;
  }
  // ids: as many of each feature.
  void prefetch(const std::vector<int64_t>& ids) const {
    SerialExecutor serial;
    const auto count = static_cast<int64_t>(ids.size()) / 4;
    recstore::prefetch(*group, ids.data(), 4 * count, {count, count, count, count}, serial);
  }
};

void test_rows_are_staged_and_landed(Executor& executor) {
  const Work work;
  SerialExecutor serial;
  std::vector<int64_t> ids{1, 2, 10, 11, 12, 13, 3, 4};
  work.prefetch(ids);
  CHECK(plan_ahead(*work.group));
  CHECK(work.plan(0).rows.size() == 4 && work.plan(1).rows.size() == 4);
  const int64_t floats = 4 * work.stride(0) + 4 * work.stride(1);
  CHECK(planned_floats(work.tables) == floats);
  std::vector<float> staged(static_cast<size_t>(floats), -1.0f);
  stage_moves(work.tables, staged.data(), executor);
  const float* next = staged.data();
  for (size_t t = 0; t < 2; ++t) {
    const int64_t columns = work.tables[t]->config().columns();
    for (const Slot slot : work.plan(t).rows) {
      CHECK(std::equal(next, next + columns, work.tables[t]->rows().row(slot)));
      next += work.stride(t);
    }
  }
  commit_moves(work.tables, serial);
  CHECK(work.is_on_device(0, 1) && work.is_on_device(1, 13));

  // A pass finds the rows, changes them, and other rows take their places: they come back.
  const std::vector<int64_t> offsets{0, 1, 2, 3, 4, 5, 6, 7, 8};
  {
    const Batch batch{ids.data(), 8, offsets.data(), nullptr, 2};
    const auto pass = begun(work.group, batch, nullptr, serial);
    std::vector<int32_t> numbers(8);
    std::vector<int64_t> rows_of_staging{0, 0};
    CHECK(pass->plan_on_device({0, kSlots}, {0, 1}, rows_of_staging, numbers.data(), serial));
    CHECK(work.plan(0).rows.empty() && work.plan(0).hits == 4);
    commit_moves(work.tables, serial);
    pass->updated_on_device(serial);
  }
  std::vector<int64_t> others;
  for (int64_t id = 100; id < 116; ++id) others.push_back(id);  // eight of each table
  work.prefetch(others);
  CHECK(plan_ahead(*work.group));
  CHECK(work.plan(0).leaving.size() == 4 && work.plan(1).leaving.size() == 4);
  commit_moves(work.tables, serial);
  const int64_t flying = floats_in_flight(work.tables);
  CHECK(flying == floats);
  CHECK_THROWS(plan_ahead(*work.group), InvalidArgument);  // rows are in flight
  std::vector<float> landing(static_cast<size_t>(flying), 7.0f);
  std::fill_n(landing.begin(), 4 * work.stride(0), 5.0f);
  land_moves(work.tables, landing.data(), executor);
  CHECK(floats_in_flight(work.tables) == 0);
  for (const int64_t id : {1, 2, 3, 4}) CHECK(*work.tables[0]->rows().row(work.slot(0, id)) == 5.0f);
  for (const int64_t id : {10, 11, 12, 13}) CHECK(*work.tables[1]->rows().row(work.slot(1, id)) == 7.0f);
}

// Rows that have left their slots since the prefetch are not copied: other rows may have the slots.
void test_rows_that_have_left() {
  const Work work;
  const std::vector<int64_t> ids{1, 2, 10, 11, 12, 13, 3, 1};
  work.prefetch(ids);
  {
    const LockedTable locked(work.tables[0]);
    const int64_t gone = 2;
    CHECK(locked->remove(&gone, 1) == 1);
  }
  CHECK(plan_ahead(*work.group));
  std::vector<Slot> expected{work.slot(0, 1), work.slot(0, 3)}, planned = work.plan(0).rows;
  std::sort(expected.begin(), expected.end());
  std::sort(planned.begin(), planned.end());
  CHECK(planned == expected);
  abort_moves(work.tables);
  CHECK(work.plan(0).rows.empty() && !work.is_on_device(0, 1));
}

// The rows of a prefetched batch stay on the device as long as a pass is pending that began before, and no longer.
void test_pins() {
  const Work work;
  SerialExecutor serial;
  const std::vector<int64_t> ids{1, 2, 10, 11, 12, 13, 3, 4};
  const std::vector<int64_t> offsets{0, 1, 2, 3, 4, 5, 6, 7, 8};
  const Batch batch{ids.data(), 8, offsets.data(), nullptr, 2};
  auto pass = begun(work.group, batch, nullptr, serial);
  std::vector<int32_t> numbers(8);
  std::vector<int64_t> staged{0, 0};
  CHECK(pass->plan_on_device({0, kSlots}, {0, 1}, staged, numbers.data(), serial));
  commit_moves(work.tables, serial);
  const auto prefetched = [&](int64_t first) {
    std::vector<int64_t> coming;
    for (int64_t i = 0; i < 8; ++i) coming.push_back(first + i);
    work.prefetch(coming);
    const bool is_planned = plan_ahead(*work.group);
    commit_moves(work.tables, serial);
    return is_planned;
  };
  CHECK(prefetched(100));
  CHECK(work.is_on_device(0, 100) && work.is_on_device(0, 1));
  CHECK(!prefetched(200));  // no room: the device slots have rows of the pass and of the first prefetch
  CHECK(work.is_on_device(0, 100) && !work.is_on_device(0, 200));
  pass.reset();
  CHECK(prefetched(300));
  CHECK(work.is_on_device(0, 300));
  CHECK(floats_in_flight(work.tables) == 0);
}

// A table whose rows do not fit has no plan, and the other one has.
void test_room_of_one_table() {
  const Work work;
  std::vector<int64_t> ids, counts{12, 2, 2, 0};
  for (int64_t i = 0; i < 16; ++i) ids.push_back(i);
  SerialExecutor serial;
  prefetch(*work.group, ids.data(), 16, counts, serial);
  CHECK(plan_ahead(*work.group));
  CHECK(work.plan(0).rows.empty() && work.plan(1).rows.size() == 4);
  commit_moves(work.tables, serial);
  CHECK(!work.is_on_device(0, 0) && work.is_on_device(1, 12));
}

void test_refusals() {
  SerialExecutor serial;
  const auto plain = std::make_shared<Table>(TableConfig{});
  CHECK_THROWS(planned_floats({plain}), InvalidArgument);
  CHECK_THROWS(floats_in_flight({plain}), InvalidArgument);
  CHECK_THROWS(commit_moves({plain}, serial), InvalidArgument);
  abort_moves({plain});
  CHECK_THROWS(plan_ahead(*one_table_group(plain)), InvalidArgument);
  const Work work;
  CHECK(!plan_ahead(*work.group));  // nothing is prefetched
  work.tables[0]->close();
  CHECK_THROWS(commit_moves(work.tables, serial), InvalidArgument);
  abort_moves(work.tables);
}

}  // namespace

int main() {
  SerialExecutor serial;
  Threads threads(3);
  test_rows_are_staged_and_landed(serial);
  test_rows_are_staged_and_landed(threads);
  test_rows_that_have_left();
  test_pins();
  test_room_of_one_table();
  test_refusals();
  return 0;
}
