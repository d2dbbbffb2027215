// Concurrent use from several threads, mainly for ThreadSanitizer (make test-tsan): training, prefetch, evaluation,
// snapshots, statistics, eviction, expiry, admission, a cold store, loads, exchanges of rows.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bounds/eviction.h"
#include "cold/cold_rows.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "lookup/prefetch.h"
#include "ops/registry.h"
#include "rows/transfer.h"
#include "snapshot/snapshot.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kColumns = 6;
constexpr int64_t kMaxRows = 600;
constexpr int64_t kIds = 4000;
constexpr int64_t kBags = 40;
constexpr size_t kMostPending = 3;  // more pending passes could pin more than kMaxRows rows

std::shared_ptr<Table> make_table(const char* name, OptimizerKind kind, const Bounds& bounds = {}) {
  TableConfig config;
  config.name = name;
  config.column_end = kColumns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.optimizer.kind = kind;
  config.optimizer.beta1 = 0.9;
  config.optimizer.beta2 = 0.99;
  config.bounds = bounds;
  return std::make_shared<Table>(config);
}

Bounds evicting() {
  Bounds bounds;
  bounds.max_rows = kMaxRows;
  bounds.eviction = Eviction::kLeastFrequent;
  bounds.half_life = 20;
  bounds.expiry = 40;
  bounds.min_frequency = 2;
  bounds.counter_bytes = 1 << 12;
  return bounds;
}
Bounds with_cold_store() {
  Bounds bounds;
  bounds.max_rows = kMaxRows;
  bounds.eviction = Eviction::kLeastRecent;
  bounds.expiry = 60;
  bounds.cold_store = true;
  return bounds;
}

std::shared_ptr<const Group> group_of(std::vector<std::shared_ptr<Table>> tables, std::vector<int64_t> features,
                                      bool mean) {
  const size_t n = tables.size();
  return std::make_shared<const Group>(std::move(tables), std::vector<Routing>(n), std::move(features), mean);
}

// The random numbers of one thread, and the executor of its parallel work.
struct Worker {
  explicit Worker(uint64_t seed) : random(seed), executor(2) {}

  uint64_t below(uint64_t n) { return random() % n; }
  std::vector<int64_t> ids(int64_t n, int64_t of = kIds) {
    std::vector<int64_t> out(static_cast<size_t>(n));
    for (int64_t& id : out) id = static_cast<int64_t>(below(below(3) == 0 ? 50 : static_cast<uint64_t>(of)));
    return out;
  }
  std::vector<int64_t> distinct_ids(int64_t n) {
    const std::vector<int64_t> some = ids(n);
    const std::set<int64_t> once(some.begin(), some.end());
    return {once.begin(), once.end()};
  }

  std::mt19937_64 random;
  Threads executor;
};

// A batch, which must live as long as its pass.
struct Data {
  std::vector<int64_t> ids, offsets;
  std::vector<float> weights, out, grad;

  Data(Worker& worker, const Group& group) : offsets(1, 0) {
    for (int64_t bag = 0; bag < group.features() * kBags; ++bag) {
      offsets.push_back(offsets.back() + static_cast<int64_t>(worker.below(5)));
    }
    ids = worker.ids(offsets.back());
    weights.assign(ids.size(), 0.5f);
    out.resize(static_cast<size_t>(kBags * group.columns()));
    grad.assign(out.size(), 0.01f);
  }
  Batch batch() const {
    Batch b;
    b.ids = ids.data();
    b.n_ids = static_cast<int64_t>(ids.size());
    b.offsets = offsets.data();
    b.weights = weights.data();
    b.bags = kBags;
    return b;
  }
};

// Arrays for whole rows outside a table.
struct Images {
  std::vector<float> weights;
  std::vector<std::vector<float>> elements;
  std::vector<float> state;
  std::vector<int64_t> last_step, frequency;

  Images(const Table& table, int64_t n)
      : weights(static_cast<size_t>(n * kColumns)),
        elements(static_cast<size_t>(table.config().optimizer.element_states()), weights),
        state(static_cast<size_t>(n)),
        last_step(static_cast<size_t>(n)),
        frequency(static_cast<size_t>(n)) {}
  template <class Pointers>
  Pointers pointers() {
    Pointers out{weights.data(), {}, state.data(), last_step.data(), frequency.data()};
    for (auto& values : elements) out.elements.push_back(values.data());
    return out;
  }
};

template <class Work>
auto locked(Table& table, const Work& work) {
  const std::lock_guard<TableMutex> lock(table.mutex());
  return work();
}

class Stress {
 public:
  explicit Stress(int64_t rounds) : rounds_(rounds) {
    plain_ = make_table("plain", OptimizerKind::kRowWiseAdagrad);
    plain_spare_ = make_table("plain", OptimizerKind::kRowWiseAdagrad);
    evicting_ = make_table("evicting", OptimizerKind::kAdam, evicting());
    evicting_spare_ = make_table("evicting", OptimizerKind::kAdam, evicting());
    cold_ = make_table("cold", OptimizerKind::kSgd, with_cold_store());
    cold_spare_ = make_table("cold", OptimizerKind::kSgd, with_cold_store());
    trained_ = group_of({plain_, evicting_}, {0, 1, 1}, true);
    cold_group_ = group_of({cold_}, {0}, false);
  }

  void run() {
    const std::vector<std::function<void(Worker&)>> jobs = {
        [this](Worker& w) { train(w); },       [this](Worker& w) { train(w); },
        [this](Worker& w) { end_passes(w); },  [this](Worker& w) { prefetch(w); },
        [this](Worker& w) { evaluate(w); },    [this](Worker& w) { save(w, plain_); },
        [this](Worker& w) { save(w, cold_); }, [this](Worker& w) { ask(w); },
        [this](Worker& w) { load(w); },        [this](Worker& w) { train_cold(w); },
        [this](Worker& w) { exchange(w); },    [this](Worker& w) { share(w); },
        [this](Worker& w) { share(w); },       [this](Worker& w) { evaluate(w); },
    };
    std::vector<std::thread> threads;
    for (size_t j = 0; j < jobs.size(); ++j) {
      threads.emplace_back([this, &jobs, j] {
        Worker worker(j + 1);
        for (int64_t round = 0; round < rounds_; ++round) jobs[j](worker);
      });
    }
    for (auto& thread : threads) thread.join();
    Worker last(0);
    end_passes(last);
    check_at_the_end();
  }

 private:
  struct Pending {
    std::shared_ptr<Data> data;
    int64_t handle;
  };

  // A training step. Its backward runs here, in another thread, or never.
  void train(Worker& worker) {
    const auto data = std::make_shared<Data>(worker, *trained_);
    const int64_t handle = registry_.add(begun(trained_, data->batch(), data->out.data(), worker.executor, data));
    if (worker.below(3) == 0) {
      const std::lock_guard<std::mutex> lock(passes_mutex_);
      if (passes_.size() < kMostPending) {
        passes_.push_back({data, handle});
        return;
      }
    }
    std::vector<float> grad_weights(data->ids.size());
    if (worker.below(2) == 0) {
      registry_.get(handle)->weight_gradients_only(data->grad.data(), grad_weights.data(), worker.executor);
    }
    registry_.get(handle)->backward(data->grad.data(), {0.1f, 0.1f},
                                    worker.below(2) == 0 ? grad_weights.data() : nullptr, worker.executor);
    registry_.remove(handle);
  }
  void end_passes(Worker& worker) {
    std::vector<Pending> pending;
    {
      const std::lock_guard<std::mutex> lock(passes_mutex_);
      pending.swap(passes_);
    }
    std::vector<std::shared_ptr<Pass>> together;
    std::vector<const float*> grads;
    for (const Pending& each : pending) {
      together.push_back(registry_.get(each.handle));
      grads.push_back(each.data->grad.data());
    }
    if (!together.empty() && worker.below(2) == 0) accumulated_backward(together, grads, {0.1f, 0.1f}, worker.executor);
    for (const Pending& each : pending) registry_.remove(each.handle);
  }

  void prefetch(Worker& worker) {
    SerialExecutor serial;
    const std::vector<int64_t> ids = worker.ids(60);
    recstore::prefetch(*trained_, ids.data(), 60, {20, 20, 20}, serial);
  }

  void evaluate(Worker& worker) {
    Data data(worker, *trained_);
    read(*trained_, data.batch(), data.out.data(), worker.executor);
  }

  // Reads a snapshot, as a save does.
  void save(Worker& worker, const std::shared_ptr<Table>& table) {
    const std::optional<Changes::Mark> since = locked(*table, [&]() -> std::optional<Changes::Mark> {
      const Changes& changes = table->rows().changes();
      if (worker.below(2) == 0 && changes.knows(changes.last_mark())) return changes.last_mark();
      return std::nullopt;
    });
    std::shared_ptr<Snapshot> snapshot;
    try {
      snapshot = open_snapshot(table, since, worker.executor);
    } catch (const InvalidArgument&) {  // an exchange of rows has forgotten the mark
      return;
    }
    while (snapshot->rows_left() > 0) {
      const int64_t n = std::min<int64_t>(snapshot->rows_left(), 300);
      Images rows(*table, n);
      std::vector<int64_t> ids(static_cast<size_t>(n));
      snapshot->read(n, ids.data(), rows.pointers<RowImages>(), true, worker.executor);
      CHECK(std::is_sorted(ids.begin(), ids.end()));
      if (worker.below(20) == 0) return;
    }
  }

  // Queries that are no steps: statistics, ids, rows.
  void ask(Worker& worker) {
    for (const auto& table : {plain_, evicting_, cold_}) {
      const int64_t bytes = table->image_bytes();  // without the lock, as in the ops
      const std::vector<int64_t> some = worker.ids(30);
      std::vector<Slot> slots(some.size());
      const std::lock_guard<TableMutex> lock(table->mutex());
      table->settle_passes(worker.executor);
      std::vector<int64_t> ids(static_cast<size_t>(table->size()));
      table->ids(ids.data());
      CHECK(table->bytes() > 0 && table->counters().lookups >= 0 && table->optimizer_steps() >= 0);
      ids.resize(std::min<size_t>(ids.size(), 200));
      std::vector<char> images(ids.size() * static_cast<size_t>(bytes));
      read_images(*table, ids.data(), static_cast<int64_t>(ids.size()), images.data(), worker.executor);
      find(*table, some.data(), 30, slots.data(), worker.executor);
      if (table->sightings() != nullptr) {
        const int64_t size = table->sightings()->size();
        std::vector<int64_t> seen(static_cast<size_t>(size));
        std::vector<uint8_t> counts(seen.size()), generations(seen.size());
        table->sightings()->read(seen.data(), counts.data(), generations.data());
        table->sightings()->write(seen.data(), counts.data(), generations.data(), size);
      }
    }
  }

  // Reads that share the tables with each other.
  void share(Worker& worker) {
    for (const auto& table : {plain_, evicting_, cold_}) {
      const std::vector<int64_t> some = worker.ids(30);
      const auto found = std::make_unique<bool[]>(some.size());
      contains(*SharedTable(table), some.data(), 30, found.get(), worker.executor);
      absent_ids(*SharedTable(table), some.data(), 30, worker.executor);
      expired_ids(*SharedTable(table), worker.executor);
      const int64_t bytes = table->image_bytes();
      const SharedTable settled(table, worker.executor);
      CHECK(settled->bytes() > 0 && settled->counters().lookups >= 0 && settled->optimizer_steps() >= 0);
      if (settled->wall_clock() != nullptr) settled->wall_clock()->state();
      if (settled->sightings() != nullptr) settled->sightings()->count(some[0]);
      std::vector<int64_t> ids(static_cast<size_t>(settled->size()));
      settled->ids(ids.data());
      ids.resize(std::min<size_t>(ids.size(), 200));
      for (const int64_t id : ids) settled->cold_filter().may_contain(id);
      std::vector<char> images(ids.size() * static_cast<size_t>(bytes));
      read_images(*settled, ids.data(), static_cast<int64_t>(ids.size()), images.data(), worker.executor);
    }
  }

  // Writes whole rows, or removes rows.
  void load(Worker& worker) {
    for (const auto& table : {plain_, evicting_}) {
      const std::vector<int64_t> ids = worker.distinct_ids(40);
      Images rows(*table, static_cast<int64_t>(ids.size()));
      const std::lock_guard<TableMutex> lock(table->mutex());
      table->settle_passes(worker.executor);
      if (worker.below(2) == 0) {
        table->remove(ids.data(), static_cast<int64_t>(ids.size()));
      } else {
        write_rows(*table, ids.data(), static_cast<int64_t>(ids.size()), rows.pointers<ConstRowImages>(),
                   worker.executor);
      }
      if (worker.below(4) == 0) table->rows().mark();
    }
  }

  // A step of a table with a cold store, as in store/cold_tier.py: rows return, other rows are evicted, then the pass
  // runs.
  void train_cold(Worker& worker) {
    Data data(worker, *cold_group_);
    const int64_t bytes = cold_->image_bytes();
    const std::lock_guard<std::mutex> held(tier_);
    const std::vector<int64_t> absent = locked(*cold_, [&] {
      return absent_ids(*cold_, data.ids.data(), static_cast<int64_t>(data.ids.size()), worker.executor);
    });
    std::vector<int64_t> back;
    std::vector<char> images;
    for (const int64_t id : absent) {
      const auto stored = store_.find(id);
      if (stored == store_.end()) continue;
      back.push_back(id);
      images.insert(images.end(), stored->second.begin(), stored->second.end());
    }
    for (;;) {
      const std::vector<int64_t> leaving = locked(*cold_, [&] {
        return leaving_ids(*cold_, data.ids.data(), static_cast<int64_t>(data.ids.size()),
                           static_cast<int64_t>(absent.size()), worker.executor);
      });
      if (leaving.empty()) break;
      const auto n = static_cast<int64_t>(leaving.size());
      std::vector<char> some(leaving.size() * static_cast<size_t>(bytes));
      locked(*cold_, [&] {
        cold_->settle_passes(worker.executor);
        read_images(*cold_, leaving.data(), n, some.data(), worker.executor);
        cold_->cold_filter().add(leaving.data(), n);
      });
      for (size_t i = 0; i < leaving.size(); ++i) {
        const char* image = some.data() + i * static_cast<size_t>(bytes);
        store_[leaving[i]].assign(image, image + bytes);
      }
      const auto left = std::make_unique<bool[]>(leaving.size());
      locked(*cold_, [&] { evict(*cold_, leaving.data(), n, some.data(), left.get()); });
    }
    locked(*cold_, [&] {
      bring_back(*cold_, back.data(), static_cast<int64_t>(back.size()), images.data(), true, worker.executor);
    });
    const auto pass = begun(cold_group_, data.batch(), data.out.data(), worker.executor);
    pass->backward(data.grad.data(), {0.1f}, nullptr, worker.executor);
    locked(*cold_, [&] {
      if (expired_before(*cold_, cold_->clock()) == 0) return;
      auto expired = expired_rows(*cold_, cold_->clock(), pinned_slots(*cold_), worker.executor);
      cold_->reserve_leave(static_cast<int64_t>(expired.size()));
      cold_->leave(expired, 0, worker.executor);
    });
  }

  // Two tables exchange their rows, as in a load. This fails while one of them has a snapshot.
  void exchange(Worker& worker) {
    using Pair = std::pair<Table*, Table*>;
    for (const auto& [table, spare] :
         {Pair{plain_.get(), plain_spare_.get()}, Pair{evicting_.get(), evicting_spare_.get()},
          Pair{cold_.get(), cold_spare_.get()}}) {
      std::unique_lock<std::mutex> held(tier_, std::defer_lock);
      if (table == cold_.get()) held.lock();
      const std::scoped_lock locks(table->mutex(), spare->mutex());
      try {
        table->exchange_rows(*spare);
        if (held.owns_lock()) store_.swap(spare_store_);
      } catch (const InvalidArgument&) {
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(worker.below(5)));
  }

  void check_at_the_end() {
    for (const auto& table : {plain_, plain_spare_, evicting_, evicting_spare_, cold_, cold_spare_}) {
      CHECK(table->config().bounds.max_rows == 0 || table->size() <= kMaxRows);
      std::set<Slot> slots;
      table->index().for_each([&](int64_t, Slot slot) { slots.insert(slot); });
      CHECK(static_cast<int64_t>(slots.size()) == table->size());
      table->for_each_pass([](const PendingPass&) { CHECK(false); });
    }
  }

  int64_t rounds_;
  std::shared_ptr<Table> plain_, plain_spare_, evicting_, evicting_spare_, cold_, cold_spare_;
  std::shared_ptr<const Group> trained_, cold_group_;
  Registry<Pass> registry_{"pass"};
  std::mutex passes_mutex_;
  std::vector<Pending> passes_;
  std::mutex tier_;  // protects the stores
  std::map<int64_t, std::vector<char>> store_, spare_store_;
};

}  // namespace

int main(int argc, char** argv) {
  Stress(argc > 1 ? std::atoll(argv[1]) : kIsSlow ? 120 : 200).run();
  std::puts("test_stress passed");
}
