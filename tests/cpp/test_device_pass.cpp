// Passes whose rows are on a device: tables with device slots, in any mixture of passes on the device and on the host,
// have the rows, outputs and saves of tables without them, bit for bit. The device is an array of this process.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "base/error.h"
#include "lookup/device_moves.h"
#include "lookup/device_pass.h"
#include "lookup/find.h"
#include "snapshot/snapshot.h"
#include "testing.h"

using namespace recstore;
using DeviceSlot = DeviceSlots::DeviceSlot;

namespace {

constexpr int64_t kColumns = 6;
constexpr int64_t kBags = 7;
constexpr int64_t kSlots = 60;  // device slots of a table
constexpr int64_t kIds = 160;
constexpr float kRate = 0.125f;

std::shared_ptr<Table> make_table(bool has_counts_apart) {
  TableConfig config;
  config.column_end = kColumns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.optimizer.kind = OptimizerKind::kSgd;
  config.bounds.max_rows = 120;
  config.bounds.eviction = has_counts_apart ? Eviction::kLeastOccurring : Eviction::kLeastRecent;
  config.bounds.expiry = 40;
  return std::make_shared<Table>(config);
}

struct Data {
  std::vector<int64_t> ids, offsets{0};
  std::vector<float> grad;
  Batch batch;
};

// The tables of one side, and what the device has.
struct Side {
  explicit Side(bool on_device) {
    for (const bool has_counts_apart : {false, true}) {
      tables.push_back(make_table(has_counts_apart));
      others.push_back(make_table(has_counts_apart));
      if (on_device) tables.back()->make_device_slots(kSlots);
    }
    group = std::make_shared<const Group>(tables, std::vector<Routing>(2), std::vector<int64_t>{0, 1, 0}, false);
    stride = ArenaLayout::of(tables[0]->config()).stride();
    if (on_device) arena.assign(static_cast<size_t>(2 * kSlots * stride), -7.0f);
    flying.resize(2);
  }
  std::vector<std::shared_ptr<Table>> tables, others;
  std::shared_ptr<const Group> group;
  int64_t stride;
  std::vector<float> arena;                // table by table
  std::vector<std::vector<float>> flying;  // by table

  float* device_row(int64_t table, DeviceSlot slot) { return arena.data() + (table * kSlots + slot) * stride; }

  void land() {
    for (size_t t = 0; t < tables.size(); ++t) {
      if (tables[t]->device()->in_flight() == 0) continue;
      const LockedTable table(tables[t]);
      recstore::land(*table, flying[t].data(), static_cast<int64_t>(flying[t].size()) / stride);
    }
  }
  void settle(int64_t t, const std::vector<DeviceSlot>& dirty) {
    std::vector<float> rows;
    for (const DeviceSlot slot : dirty) rows.insert(rows.end(), device_row(t, slot), device_row(t, slot) + stride);
    const std::vector<int32_t> slots(dirty.begin(), dirty.end());
    const LockedTable table(tables[t]);
    settle_device_slots(*table, slots.data(), static_cast<int64_t>(slots.size()), rows.data());
  }
  void settle_all() {
    if (arena.empty()) return;
    land();
    for (int64_t t = 0; t < 2; ++t) settle(t, tables[t]->device()->dirty_slots());
  }
  void settle(const Pass& pass) {
    if (arena.empty()) return;
    land();
    for (int64_t t = 0; t < 2; ++t) settle(t, tables[t]->device()->dirty_slots(pass.ranges(t)));
  }
  void settle(int64_t t, const std::vector<int64_t>& ids) {
    if (arena.empty()) return;
    land();
    std::vector<Slot> slots(ids.size());
    SerialExecutor serial;
    find(*tables[t], ids.data(), static_cast<int64_t>(ids.size()), slots.data(), serial);
    settle(t, tables[t]->device()->dirty_slots({{slots.data(), static_cast<int64_t>(slots.size())}}));
  }
  // Copies what the plans of a pass say.
  void carry_out(Pass& pass, Executor& executor) {
    for (int64_t t = 0; t < 2; ++t) {
      const DeviceSlots::Plan& plan = tables[t]->device()->planned();
      if (!plan.leaving.empty()) flying[t].clear();
      for (const DeviceSlot slot : plan.leaving) {
        flying[t].insert(flying[t].end(), device_row(t, slot), device_row(t, slot) + stride);
      }
      std::vector<float> up(plan.rows.size() * static_cast<size_t>(stride));
      stage_planned(*tables[t], 0, static_cast<int64_t>(plan.rows.size()), up.data());
      for (size_t i = 0; i < plan.targets.size(); ++i) {
        std::copy_n(up.data() + static_cast<int64_t>(i) * stride, stride, device_row(t, plan.targets[i]));
      }
    }
    commit_moves(pass.group().tables, executor);
  }
};

struct Pair {
  std::shared_ptr<Data> data;
  std::shared_ptr<Pass> plain, pass;
  std::vector<int32_t> slots;  // on the device; empty for a pass on the host
};

bool equal(const std::vector<float>& one, const std::vector<float>& other) {
  return one.size() == other.size() && std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
}

class Run {
 public:
  Run(uint64_t seed, Executor& executor) : random_(seed), executor_(executor) {}

  void run(int64_t calls) {
    for (int64_t call = 0; call < calls; ++call) {
      const uint64_t kind = random_() % 100;
      if (kind < 45) {
        if (pairs_.size() < 3) forward();
      } else if (kind < 80) {
        if (!pairs_.empty()) backward();
      } else if (kind < 84) {
        if (!pairs_.empty()) pairs_.erase(pairs_.begin());  // its graph is freed
      } else if (kind < 89) {
        write();
      } else if (kind < 93) {
        remove();
      } else if (kind < 94) {
        exchange();
      } else {
        compare(kind);
      }
    }
    pairs_.clear();
    compare(0);
    compare(1);
  }
  int64_t on_device = 0, on_host = 0, saves = 0;

 private:
  std::shared_ptr<Data> make_data() {
    auto data = std::make_shared<Data>();
    for (int64_t bag = 0; bag < 3 * kBags; ++bag) {
      for (uint64_t n = random_() % 4; n > 0; --n) {
        data->ids.push_back(static_cast<int64_t>(std::min({random_() % kIds, random_() % kIds, random_() % kIds})));
      }
      data->offsets.push_back(static_cast<int64_t>(data->ids.size()));
    }
    for (int64_t i = 0; i < kBags * 3 * kColumns; ++i) {
      data->grad.push_back(static_cast<float>(random_() % 64) / 32.0f - 1.0f);
    }
    data->batch = {data->ids.data(), static_cast<int64_t>(data->ids.size()), data->offsets.data(), nullptr, kBags};
    return data;
  }

  void forward() {
    Pair pair{make_data(), nullptr, nullptr, {}};
    const size_t size = static_cast<size_t>(kBags * 3 * kColumns);
    std::vector<float> wanted(size), out(size, -9.0f);
    pair.plain = begun(plain_.group, pair.data->batch, wanted.data(), executor_, pair.data);
    pair.pass = begun(side_.group, pair.data->batch, nullptr, executor_, pair.data);
    side_.land();
    std::vector<int32_t> slots(pair.data->ids.size());
    if (random_() % 4 != 0 && plan(*pair.pass, slots.data())) {
      pair.slots = std::move(slots);
      if (random_() % 8 != 0) {
        side_.carry_out(*pair.pass, executor_);
      } else {  // a copy fails
        abort_moves(pair.pass->group().tables);
        pair.slots.clear();
      }
    }
    if (!pair.slots.empty()) {
      ++on_device;
      pool(pair, out.data());
    } else {
      ++on_host;
      side_.settle(*pair.pass);
      pair.pass->read_on_host(out.data(), executor_);
    }
    CHECK(equal(out, wanted));
    pairs_.push_back(std::move(pair));
  }
  bool plan(Pass& pass, int32_t* slots) {
    std::vector<int64_t> staged{0};
    return pass.plan_on_device({0, kSlots}, {0, 0}, staged, slots, executor_);
  }
  void pool(const Pair& pair, float* out) {
    const std::vector<Slot> slots(pair.slots.begin(), pair.slots.end());
    for (int64_t f = 0; f < 3; ++f) {
      PoolArgs args{};
      args.rows = {side_.arena.data(), side_.stride, kColumns, nullptr};
      args.slots = slots.data();
      args.bounds = pair.data->offsets.data() + f * kBags;
      args.first = args.bounds[0];
      args.bags = kBags;
      args.out = out + f * kColumns;
      args.out_stride = 3 * kColumns;
      row_loops().pool(args);
    }
  }

  void backward() {
    const size_t which = random_() % pairs_.size();
    Pair& pair = pairs_[which];
    const std::vector<float> rates{kRate, kRate};
    pair.plain->backward(pair.data->grad.data(), rates, nullptr, executor_);
    if (pair.slots.empty()) {
      side_.settle(*pair.pass);
      pair.pass->backward(pair.data->grad.data(), rates, nullptr, executor_);
    } else {
      pair.pass->plan_refresh(executor_);
      side_.carry_out(*pair.pass, executor_);
      update(pair);
      pair.pass->updated_on_device(executor_);
    }
    if (random_() % 8 != 0) pairs_.erase(pairs_.begin() + static_cast<int64_t>(which));  // else there is another one
  }
  // The kernel: SGD on the sum of the gradients of each row, in the order of the batch.
  void update(const Pair& pair) {
    std::map<int32_t, std::vector<float>> sums;
    for (int64_t bag = 0; bag < 3 * kBags; ++bag) {
      const float* grad = pair.data->grad.data() + bag % kBags * 3 * kColumns + bag / kBags * kColumns;
      for (int64_t p = pair.data->offsets[bag]; p < pair.data->offsets[bag + 1]; ++p) {
        std::vector<float>& sum = sums[pair.slots[p]];
        if (sum.empty()) {
          sum.assign(grad, grad + kColumns);
        } else {
          for (int64_t c = 0; c < kColumns; ++c) sum[c] += grad[c];
        }
      }
    }
    for (const auto& [slot, sum] : sums) {
      float* row = side_.arena.data() + slot * side_.stride;
      for (int64_t c = 0; c < kColumns; ++c) row[c] -= kRate * sum[c];
    }
  }

  std::vector<int64_t> some_ids() {
    std::vector<int64_t> ids;
    for (uint64_t n = random_() % 6; n > 0; --n) ids.push_back(static_cast<int64_t>(random_() % kIds));
    return ids;
  }
  void write() {
    const std::vector<int64_t> ids = some_ids();
    const auto n = static_cast<int64_t>(ids.size());
    std::vector<float> weights;
    for (int64_t i = 0; i < n * kColumns; ++i) weights.push_back(static_cast<float>(random_() % 100));
    const size_t t = random_() % 2;
    side_.settle(static_cast<int64_t>(t), ids);
    for (Side* side : {&plain_, &side_}) {
      const LockedTable table(side->tables[t]);
      write_weights(*table, ids.data(), n, weights.data(), executor_);
    }
  }
  void remove() {
    const std::vector<int64_t> ids = some_ids();
    const size_t t = random_() % 2;
    int64_t removed[2];
    for (const size_t s : {0, 1}) {
      const LockedTable table((s == 0 ? plain_ : side_).tables[t]);
      removed[s] = table->remove(ids.data(), static_cast<int64_t>(ids.size()));
    }
    CHECK(removed[0] == removed[1]);
  }
  void exchange() {
    side_.settle_all();
    for (Side* side : {&plain_, &side_}) side->tables[0]->exchange_rows(*side->others[0]);
  }

  // Saves both sides now, and reads the saves after some more steps.
  void compare(uint64_t kind) {
    side_.settle_all();
    const size_t t = kind % 2;
    const auto wanted = open_snapshot(plain_.tables[t], std::nullopt, executor_);
    const auto snapshot = open_snapshot(side_.tables[t], std::nullopt, executor_);
    CHECK(wanted->table_rows() == snapshot->table_rows());
    for (uint64_t step = random_() % 4; step > 0; --step) {
      if (pairs_.size() < 3) forward();
      backward();
    }
    CHECK(rows_of(*wanted) == rows_of(*snapshot));
    ++saves;
  }
  // The ids, weights and bookkeeping of a save.
  std::vector<std::vector<char>> rows_of(Snapshot& snapshot) {
    const int64_t n = snapshot.rows_left();
    std::vector<int64_t> ids(static_cast<size_t>(n)), last_step(ids.size()), frequency(ids.size());
    std::vector<float> weights(ids.size() * kColumns), state(ids.size());
    snapshot.read(n, ids.data(), {weights.data(), {}, state.data(), last_step.data(), frequency.data()}, false,
                  executor_);
    const auto bytes = [](const auto& values) {
      const auto* begin = reinterpret_cast<const char*>(values.data());
      return std::vector<char>(begin, begin + values.size() * sizeof(values[0]));
    };
    return {bytes(ids), bytes(weights), bytes(last_step), bytes(frequency)};
  }

  std::mt19937_64 random_;
  Executor& executor_;
  Side plain_{false}, side_{true};
  std::vector<Pair> pairs_;
};

void test_random_calls(Executor& executor, uint64_t seeds) {
  int64_t on_device = 0, on_host = 0, saves = 0;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    Run run(seed, executor);
    run.run(400);
    on_device += run.on_device;
    on_host += run.on_host;
    saves += run.saves;
  }
  const auto least = static_cast<int64_t>(40 * seeds);
  CHECK(on_device > least && on_host > least && saves > least / 5);
}

// Rows that move in the host's memory keep their device slots.
void test_moves() {
  constexpr int64_t kWide = 1024, kRows = 2000, kFirst = 1990, kOnDevice = kRows - kFirst;
  SerialExecutor serial;
  TableConfig config;
  config.column_end = kWide;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  const auto table = std::make_shared<Table>(config);
  table->make_device_slots(kOnDevice);
  std::vector<int64_t> ids(kRows);
  for (int64_t i = 0; i < kRows; ++i) ids[i] = i;
  {
    const LockedTable locked(table);
    write_weights(*locked, ids.data(), kRows, std::vector<float>(kRows * kWide, 1.0f).data(), serial);
  }
  const auto group = one_table_group(table);
  const Batch batch{ids.data() + kFirst, kOnDevice, nullptr, nullptr, kOnDevice};
  auto pass = begun(group, batch, nullptr, serial);
  std::vector<int32_t> slots(kOnDevice);
  std::vector<int64_t> staged{0};
  CHECK(pass->plan_on_device({0}, {0}, staged, slots.data(), serial));
  commit_moves(pass->group().tables, serial);
  pass->updated_on_device(serial);
  pass.reset();  // the slots of removed rows would wait for it
  // The index has a random seed, so that any row can have a low slot, from which it does not move.
  const auto slot_of = [&](int64_t id) { return table->index().find(id); };
  int64_t highest = kFirst;
  for (int64_t id = kFirst; id < kRows; ++id) {
    if (slot_of(id) > slot_of(highest)) highest = id;
  }
  const Slot before = slot_of(highest);
  {
    const LockedTable locked(table);
    CHECK(locked->remove(ids.data(), 1900) == 1900);
    for (int call = 0; call < 1000 && slot_of(highest) == before; ++call) locked->give_memory_back(kRows);
  }
  CHECK(slot_of(highest) != before);
  const std::vector<DeviceSlot> dirty = device_slots(*table).dirty_slots();
  CHECK(static_cast<int64_t>(dirty.size()) == kOnDevice);
  const std::vector<int32_t> wanted(dirty.begin(), dirty.end());
  const int64_t stride = ArenaLayout::of(table->config()).stride();
  std::vector<float> rows(static_cast<size_t>(kOnDevice * stride), 5.0f);
  const LockedTable locked(table);
  settle_device_slots(*locked, wanted.data(), kOnDevice, rows.data());
  for (int64_t i = 0; i < kOnDevice; ++i) {
    CHECK(*table->rows().row(table->index().find(kFirst + i)) == 5.0f);
  }
}

// Ids that admission refuses read as initial rows from the staging, and so do all rows without a device slot in an
// evaluation lookup. Rows on the device that are as new as the host's are read there.
void test_staged_rows() {
  SerialExecutor serial;
  TableConfig config;
  config.column_end = kColumns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.bounds.min_frequency = 2;
  config.bounds.counter_bytes = 1 << 12;
  const auto table = std::make_shared<Table>(config);
  table->make_device_slots(4);
  const std::vector<std::shared_ptr<Table>> tables{table};
  const auto group = std::make_shared<const Group>(tables, std::vector<Routing>(1), std::vector<int64_t>{0}, false);
  const std::vector<int64_t> first{1, 2}, second{7, 1, 8, 7, 2};
  begun(group, {first.data(), 2, nullptr, nullptr, 2}, nullptr, serial).reset();
  const Batch batch{second.data(), 5, nullptr, nullptr, 5};
  const auto pass = begun(group, batch, nullptr, serial);
  std::vector<int32_t> numbers(5);
  std::vector<int64_t> staged{3};
  CHECK(pass->plan_on_device({10}, {0}, staged, numbers.data(), serial));
  commit_moves(pass->group().tables, serial);
  CHECK(numbers == (std::vector<int32_t>{-5, 10, -6, -5, 11}));
  CHECK(pass->refused_ids() == (std::vector<std::vector<int64_t>>{{7, 8}}));
  CHECK(staged[0] == 5);

  const int64_t stride = ArenaLayout::of(config).stride();
  std::vector<float> rows(static_cast<size_t>(2 * stride)), initial(kColumns);
  const std::vector<int64_t> no_slots{kNoSlot, kNoSlot};
  const SharedTable shared(table);
  stage_rows(*shared, no_slots.data(), second.data(), 2, true, {}, rows.data());
  table->initializer().fill(7, initial.data());
  CHECK(std::equal(initial.begin(), initial.end(), rows.begin()));
  stage_rows(*shared, no_slots.data(), second.data(), 2, false, {}, rows.data());
  CHECK(rows == std::vector<float>(rows.size(), 0.0f));

  // Id 1 has changed on the host, so that its device slot is stale. Id 9 has no row.
  const std::vector<int64_t> read{9, 1, 2, 1};
  const Slot slot = table->index().find(1);
  table->device()->wrote(slot);
  StagedRows of_read(0);
  numbers.resize(4);
  find_on_device(*shared, read.data(), 4, 10, false, of_read, numbers.data(), serial);
  CHECK(numbers == (std::vector<int32_t>{-1, -2, 11, -2}));
  CHECK(of_read.ids() == (std::vector<int64_t>{1}) && of_read.slots() == (std::vector<int64_t>{slot}));
  StagedRows with_missing(0);
  find_on_device(*shared, read.data(), 4, 10, true, with_missing, numbers.data(), serial);
  CHECK(numbers == (std::vector<int32_t>{-2, -3, 11, -3}));
  const int64_t elsewhere_id = 9;
  const std::vector<float> elsewhere(kColumns, 4.0f);
  const auto* elsewhere_row = reinterpret_cast<const char*>(elsewhere.data());
  stage_rows(*shared, with_missing.slots().data(), with_missing.ids().data(), 2, false,
             {&elsewhere_id, 1, elsewhere_row, kColumns * 4}, rows.data());
  CHECK(std::equal(elsewhere.begin(), elsewhere.end(), rows.begin()));
  CHECK(std::equal(rows.begin() + stride, rows.begin() + stride + kColumns, table->rows().row(slot)));
}

// The staged rows of two tables that share an arena are numbered one table after the other, and the numbers of device
// slots stay as they are.
void test_staged_rows_of_two_tables(Executor& executor) {
  TableConfig config;
  config.column_end = kColumns;
  config.bounds.min_frequency = 2;
  config.bounds.counter_bytes = 1 << 12;
  std::vector<std::shared_ptr<Table>> tables;
  for (int t = 0; t < 2; ++t) {
    tables.push_back(std::make_shared<Table>(config));
    tables.back()->make_device_slots(4);
  }
  const auto group =
      std::make_shared<const Group>(tables, std::vector<Routing>(2), std::vector<int64_t>{0, 1, 0}, false);
  const std::vector<int64_t> offsets{0, 2, 4, 6}, first{1, 1, 1, 1, 1, 1}, second{1, 8, 7, 1, 9, 8};
  begun(group, {first.data(), 6, offsets.data(), nullptr, 1}, nullptr, executor).reset();
  const auto pass = begun(group, {second.data(), 6, offsets.data(), nullptr, 1}, nullptr, executor);
  std::vector<int32_t> numbers(6);
  std::vector<int64_t> staged{3, 1};
  CHECK(pass->plan_on_device({10, 20}, {0, 0}, staged, numbers.data(), executor));
  CHECK(numbers == (std::vector<int32_t>{10, -5, -7, 20, -6, -5}));
  CHECK(pass->refused_ids() == (std::vector<std::vector<int64_t>>{{8, 9}, {7}}));
  CHECK(staged == (std::vector<int64_t>{6, 1}));
}

// A table without room leaves no plan in the others.
void test_no_room_in_one_table(Executor& executor) {
  std::vector<std::shared_ptr<Table>> tables{make_table(false), make_table(false), make_table(false)};
  for (const auto& table : tables) table->make_device_slots(2);
  const auto group =
      std::make_shared<const Group>(tables, std::vector<Routing>(3), std::vector<int64_t>{0, 1, 2}, false);
  const std::vector<int64_t> ids{1, 2, 1, 2, 3, 1}, offsets{0, 2, 5, 6};
  const auto pass = begun(group, {ids.data(), 6, offsets.data(), nullptr, 1}, nullptr, executor);
  std::vector<int32_t> numbers(6);
  std::vector<int64_t> staged{0};
  CHECK(!pass->plan_on_device({0, 2, 4}, {0, 0, 0}, staged, numbers.data(), executor));
  for (const auto& table : tables) CHECK(table->device()->planned().rows.empty());
  CHECK(staged[0] == 0);
}

void test_refusals() {
  SerialExecutor serial;
  const auto table = make_table(false);
  CHECK_THROWS(table->make_device_slots(0), InvalidArgument);
  CHECK_THROWS(device_slots(*table), InvalidArgument);
  const std::vector<std::shared_ptr<Table>> tables{table};
  const auto group = std::make_shared<const Group>(tables, std::vector<Routing>(1), std::vector<int64_t>{0}, false);
  const std::vector<int64_t> ids{1, 2, 1};
  const Batch batch{ids.data(), 3, nullptr, nullptr, 3};
  const auto pass = begun(group, batch, nullptr, serial);
  std::vector<int32_t> slots(3);
  std::vector<int64_t> staged{0};
  CHECK_THROWS(pass->plan_on_device({0}, {0}, staged, slots.data(), serial), InvalidArgument);  // no device slots
  table->make_device_slots(2);
  CHECK_THROWS(table->make_device_slots(2), InvalidArgument);
  CHECK_THROWS(pass->plan_on_device({}, {}, staged, slots.data(), serial), InvalidArgument);
  CHECK(pass->plan_on_device({5}, {0}, staged, slots.data(), serial) && slots[0] == 5 && slots[1] == 6 &&
        slots[2] == 5);
  commit_moves(pass->group().tables, serial);
  CHECK_THROWS(pass->plan_on_device({5}, {0}, staged, slots.data(), serial), InvalidArgument);  // once
  const float row[8] = {};
  CHECK_THROWS(land(*table, row, 1), InvalidArgument);
  const int32_t wrong = 2;
  CHECK_THROWS(settle_device_slots(*table, &wrong, 1, row), InvalidArgument);
}

}  // namespace

int main() {
  SerialExecutor serial;
  Threads threads(3);
  test_random_calls(serial, kIsSlow ? 2 : 8);
  test_random_calls(threads, kIsSlow ? 1 : 4);  // an emulator starts threads slowly
  test_moves();
  test_staged_rows();
  test_staged_rows_of_two_tables(serial);
  test_staged_rows_of_two_tables(threads);
  test_no_room_in_one_table(threads);
  test_refusals();
  return 0;
}
