// Snapshots that are read while another thread updates, removes and inserts rows; row types; copies of rows; marks.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "lookup/forward.h"
#include "snapshot/snapshot.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kColumns = 5;

std::shared_ptr<Table> make_table(OptimizerKind kind, RowType type) {
  TableConfig config;
  config.name = "t";
  config.column_end = kColumns;
  config.row_type = type;
  config.optimizer.kind = kind;
  return std::make_shared<Table>(config);
}

// Arrays for whole rows. write() sets all numbers of a row except the weights to one value.
struct Image {
  std::vector<char> weights;
  std::vector<std::vector<float>> elements;
  std::vector<float> state;
  std::vector<int64_t> last_step, frequency;

  Image(const Table& table, int64_t n)
      : weights(static_cast<size_t>(n * weight_bytes(table.config().row_type, kColumns))),
        elements(static_cast<size_t>(table.config().optimizer.element_states()),
                 std::vector<float>(static_cast<size_t>(n * kColumns))),
        state(static_cast<size_t>(n)),
        last_step(static_cast<size_t>(n)),
        frequency(static_cast<size_t>(n)) {}

  template <class Images>
  Images images() {
    Images out{weights.data(), {}, state.data(), last_step.data(), frequency.data()};
    for (auto& values : elements) out.elements.push_back(values.data());
    return out;
  }
};

void write(Table& table, const std::vector<int64_t>& ids, int64_t value, Executor& executor) {
  const auto n = static_cast<int64_t>(ids.size());
  Image image(table, n);
  for (auto& values : image.elements) values.assign(values.size(), static_cast<float>(value));
  image.state.assign(image.state.size(), static_cast<float>(value));
  image.last_step.assign(image.last_step.size(), value);
  image.frequency.assign(image.frequency.size(), value);
  const std::lock_guard<TableMutex> lock(table.mutex());
  write_rows(table, ids.data(), n, image.images<ConstRowImages>(), executor);
}

void remove(Table& table, const std::vector<int64_t>& ids) {
  const std::lock_guard<TableMutex> lock(table.mutex());
  table.remove(ids.data(), static_cast<int64_t>(ids.size()));
}

std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> ids;
  for (int64_t id = begin; id < end; ++id) ids.push_back(id * 977 - 5000);
  return ids;
}

std::unique_ptr<Snapshot> snapshot_of(const std::shared_ptr<Table>& table,
                                      std::optional<Changes::Mark> since = std::nullopt) {
  const std::lock_guard<TableMutex> lock(table->mutex());
  return std::make_unique<Snapshot>(table, since);
}

// Reads all rows, checks that they have `value` everywhere, and returns their ids.
std::vector<int64_t> read(Snapshot& snapshot, int64_t value, int64_t step, bool polite, Executor& executor) {
  std::vector<int64_t> ids;
  while (snapshot.rows_left() > 0) {
    const int64_t n = std::min(step, snapshot.rows_left());
    Image image(snapshot.table(), n);
    std::vector<int64_t> some(static_cast<size_t>(n));
    snapshot.read(n, some.data(), image.images<RowImages>(), polite, executor);
    for (const int64_t number : image.last_step) CHECK(number == value);
    for (const int64_t number : image.frequency) CHECK(number == value);
    for (const float number : image.state) CHECK(number == static_cast<float>(value));
    for (const auto& values : image.elements) {
      for (const float number : values) CHECK(number == static_cast<float>(value));
    }
    for (const int64_t id : some) {
      CHECK(ids.empty() || ids.back() < id);
      ids.push_back(id);
    }
  }
  return ids;
}

void beside_changes(OptimizerKind kind, RowType type, int threads) {
  Threads executor(threads);
  const auto table = make_table(kind, type);
  const std::vector<int64_t> old = range(0, 8000);
  write(*table, old, 1, executor);
  for (int64_t round = 1; round <= 3; ++round) {
    const auto snapshot = snapshot_of(table);
    std::atomic<bool> stop{false};
    std::thread training([&] {
      Threads own(threads);
      for (int64_t i = 0; !stop; ++i) {
        write(*table, old, round + 1, own);
        write(*table, range(30000 + i * 700, 30000 + (i + 1) * 700), round + 1, own);
        remove(*table, range(i * 50 % 8000, i * 50 % 8000 + 300));
      }
      write(*table, old, round + 1, own);
    });
    const std::vector<int64_t> ids = read(*snapshot, round, 777, round % 2 == 1, executor);
    stop = true;
    training.join();
    CHECK(ids.size() >= old.size());
    CHECK(static_cast<int64_t>(ids.size()) == snapshot->table_rows());
    std::vector<int64_t> later;
    {
      const std::lock_guard<TableMutex> lock(table->mutex());
      later.resize(static_cast<size_t>(table->size()));
      table->ids(later.data());
    }
    write(*table, later, round + 1, executor);
  }
}

// Several threads find the rows and sort them, also if most ids are close to each other.
void many_rows() {
  const auto table = make_table(OptimizerKind::kSgd, RowType::kFloat32);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 150000; ++i) ids.push_back(i - 70000);
  for (int64_t i = 0; i < 50000; ++i) ids.push_back(i * i * i * 73000 + 80000 + (i % 2 == 0 ? 0 : INT64_MIN));
  Threads two(2);
  write(*table, ids, 1, two);
  std::sort(ids.begin(), ids.end());
  for (const int threads : {1, 2, 7, 64}) {
    Threads executor(threads);
    CHECK(read(*snapshot_of(table), 1, 100000, false, executor) == ids);
  }
}

void marks() {
  Threads executor(2);
  const auto table = make_table(OptimizerKind::kSgd, RowType::kFloat32);
  write(*table, range(0, 1000), 1, executor);
  const Changes::Mark mark = snapshot_of(table)->mark();
  write(*table, range(10, 20), 1, executor);
  remove(*table, range(15, 17));
  remove(*table, range(500, 510));
  write(*table, range(505, 507), 1, executor);
  const auto changed = snapshot_of(table, mark);
  CHECK(changed->left().has_value());
  CHECK(changed->left()->size() == 10);
  CHECK(read(*changed, 1, 3, false, executor).size() == 10);
  CHECK_THROWS(snapshot_of(table), InvalidArgument);
}

void exchange() {
  Threads executor(2);
  const auto one = make_table(OptimizerKind::kAdam, RowType::kFloat32),
             other = make_table(OptimizerKind::kAdam, RowType::kFloat32);
  write(*one, range(0, 3000), 1, executor);
  write(*other, range(100, 200), 2, executor);
  const Changes::Mark mark = snapshot_of(one)->mark();
  {
    const std::scoped_lock locks(one->mutex(), other->mutex());
    one->exchange_rows(*other);
  }
  CHECK_THROWS(snapshot_of(one, mark), InvalidArgument);
  CHECK(read(*snapshot_of(one), 2, 64, false, executor) == range(100, 200));
  CHECK(read(*snapshot_of(other), 1, 64, false, executor) == range(0, 3000));
  remove(*other, range(0, 3000));
  write(*other, range(0, 10), 1, executor);
  CHECK(read(*snapshot_of(other), 1, 64, false, executor) == range(0, 10));
}

template <class Between>  // between(), after each part
std::vector<int64_t> ids_of(Snapshot& snapshot, Executor& executor, const Between& between) {
  std::vector<int64_t> all;
  while (snapshot.rows_left() > 0) {
    const int64_t n = std::min<int64_t>(150, snapshot.rows_left());
    all.resize(all.size() + static_cast<size_t>(n));
    Image image(snapshot.table(), n);
    snapshot.read(n, all.data() + all.size() - n, image.images<RowImages>(), false, executor);
    between();
  }
  return all;
}

void check_positions(Table& table) {
  const std::lock_guard<TableMutex> lock(table.mutex());
  const Changes& changes = table.rows().changes();
  CHECK(changes.locates_rows());
  table.index().for_each(
      [&](int64_t id, Slot slot) { CHECK(table.index().id_of(slot, changes.position(slot)) == id); });
}

// A table that records where its index has each row has the same snapshots of changes as a table that searches its
// index.
void located() {
  Threads executor(2);
  for (int seed = 0; seed < 2; ++seed) {
    std::mt19937_64 random(seed);
    const auto by_slot = make_table(OptimizerKind::kSgd, RowType::kFloat32),
               searched = make_table(OptimizerKind::kSgd, RowType::kFloat32);
    const auto change = [&](int64_t most) {
      const auto begin = static_cast<int64_t>(random() % 40000), end = begin + static_cast<int64_t>(random() % most);
      const bool removes = random() % 3 == 0;
      for (const auto& table : {by_slot, searched}) {
        removes ? remove(*table, range(begin, end)) : write(*table, range(begin, end), 1, executor);
      }
    };
    for (int i = 0; i < 5; ++i) change(12000);
    locate_rows(by_slot);
    for (int round = 0; round < 12; ++round) {
      const Changes::Mark one = snapshot_of(by_slot)->mark(), other = snapshot_of(searched)->mark();
      // Mostly few rows change, and are found by their slots. At times the index grows, or rows move to free slots.
      for (uint64_t i = random() % 4; i-- > 0;) change(random() % 5 == 0 ? 20000 : 200);
      const auto first = snapshot_of(by_slot, one), second = snapshot_of(searched, other);
      CHECK(first->left() == second->left());
      const auto ids = ids_of(*first, executor, [&] { change(100); });
      CHECK(ids == ids_of(*second, executor, [] {}));
    }
    check_positions(*by_slot);
  }
}

// The record is begun while another thread inserts, removes and moves rows.
void located_beside_changes() {
  Threads executor(2);
  const auto table = make_table(OptimizerKind::kSgd, RowType::kFloat32),
             other = make_table(OptimizerKind::kSgd, RowType::kFloat32);
  for (int round = 0; round < 2; ++round) {
    write(*table, range(0, 200000), 1, executor);
    std::atomic<bool> stop{false};
    std::thread training([&] {
      Threads own(2);
      remove(*table, range(0, 150000));  // more slots are free than in use: the calls that follow move rows
      for (int64_t i = 0; !stop || i < 20; ++i) {
        write(*table, range(200000 + i * 100, 200000 + (i + 1) * 100), 1, own);
        remove(*table, range(150000 + i * 500, 150000 + i * 500 + 500));
      }
    });
    locate_rows(table);
    stop = true;
    training.join();
    check_positions(*table);
    const std::scoped_lock locks(table->mutex(), other->mutex());
    table->exchange_rows(*other);
    CHECK(!table->rows().changes().places_rows());
  }
}

}  // namespace

int main() {
  for (const RowType type : {RowType::kFloat32, RowType::kBfloat16, RowType::kInt8}) {
    for (const OptimizerKind kind : {OptimizerKind::kRowWiseAdagrad, OptimizerKind::kAdam}) {
      beside_changes(kind, type, 3);
    }
  }
  beside_changes(OptimizerKind::kSgd, RowType::kFloat32, 1);
  many_rows();
  marks();
  exchange();
  located();
  located_beside_changes();
  std::puts("test_snapshot passed");
}
