// How calls share a table: reads go on beside each other, and neither readers nor writers wait for ever.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "cold/cold_rows.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "rows/transfer.h"
#include "snapshot/snapshot.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kColumns = 4;
constexpr int64_t kRows = 20000;  // more than a task of any read has
constexpr std::chrono::seconds kDeadline{60};

// An event that other threads wait for.
class Event {
 public:
  void set() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  // Returns whether the event was set before the deadline.
  bool wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kDeadline, [&] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

// An executor whose first run waits, in the middle of the call that holds the lock, until it is released.
class Paused final : public Executor {
 public:
  int threads() const override { return 2; }
  void run(int, Body body, void* context) override {
    running.set();
    CHECK(released.wait());
    body(context);
  }

  Event running, released;
};

std::vector<int64_t> ids_up_to(int64_t n) {
  std::vector<int64_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

std::shared_ptr<Table> filled(int64_t rows, Bounds bounds = {}) {
  TableConfig config;
  config.name = "t";
  config.column_end = kColumns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.bounds = bounds;
  const auto table = std::make_shared<Table>(config);
  SerialExecutor serial;
  const std::vector<int64_t> ids = ids_up_to(rows);
  std::vector<Slot> slots(ids.size());
  find_or_insert(*table, ids.data(), rows, slots.data(), serial, Arrival::kUpdate);
  return table;
}

struct Plain {
  explicit Plain(int64_t n) : ids(ids_up_to(n)), out(static_cast<size_t>(n * kColumns)) {
    batch.ids = ids.data();
    batch.n_ids = batch.bags = n;
  }
  std::vector<int64_t> ids;
  std::vector<float> out;
  Batch batch;
};

// Calls first(executor) with an executor that pauses it in the middle, and then second() in another thread. Returns
// whether the second call has returned while the first was paused.
bool goes_on_beside(const std::function<void(Executor&)>& first, const std::function<void()>& second) {
  Paused paused;
  std::thread one([&] { first(paused); });
  CHECK(paused.running.wait());
  Event done;
  std::thread other([&] {
    second();
    done.set();
  });
  const bool in_time = done.wait();
  paused.released.set();
  one.join();
  other.join();
  return in_time;
}

// Each call that changes nothing returns while any other one is in the middle of its work.
void reads_go_on_beside_each_other() {
  Bounds bounds;
  bounds.max_rows = kRows;
  bounds.eviction = Eviction::kLeastRecent;
  bounds.expiry = 1;
  const auto table = filled(kRows, bounds);
  const auto group = one_table_group(table);
  SerialExecutor serial;
  Plain step(10);
  const auto pass = begun(group, step.batch, step.out.data(), serial);
  Plain large(kRows);
  std::vector<Slot> slots(static_cast<size_t>(kRows));
  const auto has_rows = std::make_unique<bool[]>(static_cast<size_t>(kRows));
  std::vector<char> images(static_cast<size_t>(kRows * table->image_bytes()));
  const int64_t* ids = large.ids.data();
  const std::vector<std::function<void(Executor&)>> reads = {
      [&](Executor& e) { read(*group, large.batch, large.out.data(), e); },
      [&](Executor& e) { contains(*SharedTable(table), ids, kRows, has_rows.get(), e); },
      [&](Executor& e) { read_images(*SharedTable(table, serial), ids, kRows, images.data(), e); },
      [&](Executor& e) { absent_ids(*SharedTable(table), ids, kRows, e); },
  };
  const auto snapshot = open_snapshot(table, std::nullopt, serial);
  const auto small_reads = [&] {
    SerialExecutor own;
    Plain small(10);
    read(*group, small.batch, small.out.data(), own);
    std::vector<char> some(static_cast<size_t>(10 * table->image_bytes()));
    read_images(*SharedTable(table, own), small.ids.data(), 10, some.data(), own);
    std::vector<int64_t> all(static_cast<size_t>(kRows));
    {
      const SharedTable shared(table);
      shared->ids(all.data());
      CHECK(shared->bytes() > 0 && shared->counters().steps == 1 && shared->snapshot() == snapshot.get());
    }
    expired_ids(*SharedTable(table), own);
    std::vector<float> weights(10 * kColumns), state(10);
    std::vector<int64_t> read_ids(10), last_step(10), frequency(10);
    snapshot->read(10, read_ids.data(), {weights.data(), {}, state.data(), last_step.data(), frequency.data()}, false,
                   own);
    CHECK(std::equal(weights.begin(), weights.begin() + kColumns, table->rows().row(table->index().find(read_ids[0]))));
    std::vector<float> grad(10 * kColumns, 1.0f), grad_weights(10);
    pass->weight_gradients_only(grad.data(), grad_weights.data(), own);
  };
  for (const auto& large_read : reads) CHECK(goes_on_beside(large_read, small_reads));
}

// Statistics record a pending pass first, which changes rows; then they share the table.
void a_read_of_the_bookkeeping_settles_passes_and_then_shares() {
  const auto table = filled(10);
  const auto group = one_table_group(table);
  SerialExecutor serial;
  Plain step(10);
  const auto pass = begun(group, step.batch, step.out.data(), serial);
  CHECK(!SharedTable(table)->passes_are_settled());
  {
    const SharedTable settled(table, serial);
    CHECK(settled->passes_are_settled() && settled->counters().lookups == 10);
    std::thread([&] {
      CHECK(!table->mutex().try_lock());
      CHECK(table->mutex().try_lock_shared());
      table->mutex().unlock_shared();
    }).join();
  }
  {
    const std::lock_guard<TableMutex> lock(table->mutex());
    table->close();
  }
  CHECK_THROWS(SharedTable(table, serial), InvalidArgument);
  CHECK(table->mutex().try_lock());  // the call that failed has released the lock
  table->mutex().unlock();
}

// Until `done`, each of several readers keeps the lock until a later one has it, so that it is never free of readers
// unless a writer keeps the later ones out.
void a_stream_of_readers_does_not_starve_a_writer() {
  TableMutex mutex;
  std::atomic<bool> done{false};
  std::atomic<int> inside{0};
  std::atomic<int64_t> entries{0};
  std::vector<std::thread> readers;
  for (int r = 0; r < 3; ++r) {
    readers.emplace_back([&] {
      while (!done) {
        const std::shared_lock<TableMutex> lock(mutex);
        ++inside;
        const int64_t entry = ++entries;
        const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
        while (entries == entry && !done && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        --inside;
      }
    });
  }
  Event written;
  std::thread writer([&] {
    for (int i = 0; i < 20; ++i) {
      const std::lock_guard<TableMutex> lock(mutex);
      CHECK(inside == 0);
    }
    written.set();
  });
  const bool in_time = written.wait();
  done = true;
  for (auto& reader : readers) reader.join();
  writer.join();
  CHECK(in_time);
}

// A writer that takes the lock again at once does not overtake a reader that waits.
void a_stream_of_writers_does_not_starve_a_reader() {
  TableMutex mutex;
  std::atomic<bool> done{false};
  std::atomic<int64_t> writes{0};
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&] {
      while (!done) {
        const std::lock_guard<TableMutex> lock(mutex);
        ++writes;
      }
    });
  }
  Event read;
  std::thread reader([&] {
    for (int i = 0; i < 100; ++i) {
      for (const int64_t before = writes; writes == before;) std::this_thread::yield();
      const std::shared_lock<TableMutex> lock(mutex);
      const int64_t seen = writes;
      std::this_thread::yield();
      CHECK(writes == seen);
    }
    read.set();
  });
  const bool in_time = read.wait();
  done = true;
  for (auto& writer : writers) writer.join();
  reader.join();
  CHECK(in_time);
}

// A reader that comes after a writer waits for it.
void readers_wait_behind_a_waiting_writer() {
  TableMutex mutex;
  mutex.lock_shared();
  std::atomic<int> order{0};
  std::thread writer([&] {
    const std::lock_guard<TableMutex> lock(mutex);
    CHECK(order++ == 0);
  });
  const auto until = std::chrono::steady_clock::now() + kDeadline;
  while (mutex.try_lock_shared()) {  // until the writer waits
    mutex.unlock_shared();
    CHECK(std::chrono::steady_clock::now() < until);
    std::this_thread::yield();
  }
  std::thread reader([&] {
    const std::shared_lock<TableMutex> lock(mutex);
    CHECK(order++ == 1);
  });
  mutex.unlock_shared();
  writer.join();
  reader.join();
}

}  // namespace

int main() {
  reads_go_on_beside_each_other();
  a_read_of_the_bookkeeping_settles_passes_and_then_shares();
  a_stream_of_readers_does_not_starve_a_writer();
  a_stream_of_writers_does_not_starve_a_reader();
  readers_wait_behind_a_waiting_writer();
  std::puts("test_locks passed");
}
