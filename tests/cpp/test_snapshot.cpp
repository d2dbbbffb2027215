// Snapshots that are read while another thread updates, removes and inserts rows; row types; copies of rows; marks.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "error.h"
#include "forward.h"
#include "snapshot.h"
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
        elements(static_cast<size_t>(table.config().optimizer.element_states()), std::vector<float>(static_cast<size_t>(n * kColumns))),
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
  const std::lock_guard<std::mutex> lock(table.mutex());
  write_rows(table, ids.data(), n, image.images<ConstRowImages>(), executor);
}

void remove(Table& table, const std::vector<int64_t>& ids) {
  const std::lock_guard<std::mutex> lock(table.mutex());
  table.remove(ids.data(), static_cast<int64_t>(ids.size()));
}

std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> ids;
  for (int64_t id = begin; id < end; ++id) ids.push_back(id * 977 - 5000);
  return ids;
}

std::unique_ptr<Snapshot> snapshot_of(const std::shared_ptr<Table>& table, std::optional<Changes::Mark> since = std::nullopt) {
  const std::lock_guard<std::mutex> lock(table->mutex());
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
  const std::vector<int64_t> old = range(0, 20000);
  write(*table, old, 1, executor);
  for (int64_t round = 1; round <= 3; ++round) {
    const auto snapshot = snapshot_of(table);
    std::atomic<bool> stop{false};
    std::thread training([&] {
      Threads own(threads);
      for (int64_t i = 0; !stop; ++i) {
        write(*table, old, round + 1, own);
        write(*table, range(30000 + i * 700, 30000 + (i + 1) * 700), round + 1, own);
        remove(*table, range(i * 50 % 20000, i * 50 % 20000 + 300));
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
      const std::lock_guard<std::mutex> lock(table->mutex());
      later.resize(static_cast<size_t>(table->size()));
      table->ids(later.data());
    }
    write(*table, later, round + 1, executor);
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
  const auto one = make_table(OptimizerKind::kAdam, RowType::kFloat32), other = make_table(OptimizerKind::kAdam, RowType::kFloat32);
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

}  // namespace

int main() {
  for (const RowType type : {RowType::kFloat32, RowType::kBfloat16, RowType::kInt8}) {
    for (const OptimizerKind kind : {OptimizerKind::kRowWiseAdagrad, OptimizerKind::kAdam}) beside_changes(kind, type, 3);
  }
  beside_changes(OptimizerKind::kSgd, RowType::kFloat32, 1);
  marks();
  exchange();
  std::puts("test_snapshot passed");
}
