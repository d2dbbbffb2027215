// Parts of some work run at the same time, and threads without a part help: each task runs once, an error ends all, and
// the rows of many tables depend neither on the threads nor on who helps.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.h"
#include "lookup/pass.h"
#include "testing.h"

using namespace recstore;

namespace {

void each_task_runs_once(int threads, int64_t parts) {
  Threads executor(threads);
  std::vector<std::atomic<int>> runs(static_cast<size_t>(parts * 1000));
  for_each_part(executor, parts, true, [&](int64_t p, Executor& of_part) {
    for (int64_t first = 0; first < 1000; first += 250) {
      std::atomic<int64_t> sum{0};
      for_each_task(of_part, 250, [&](int64_t task, int worker) {
        CHECK(worker < of_part.threads());
        ++runs[p * 1000 + first + task];
        sum += task;
      });
      CHECK(sum == 250 * 249 / 2);  // all tasks of a run have ended when it returns
    }
  });
  CHECK(std::all_of(runs.begin(), runs.end(), [](const auto& count) { return count == 1; }));
}

void errors_end_all_parts(int threads) {
  Threads executor(threads);
  const auto run = [&](bool in_task) {
    for_each_part(executor, 9, true, [&](int64_t p, Executor& of_part) {
      for_each_task(of_part, 50, [&](int64_t task) {
        if (in_task && p == 3 && task == 17) throw InvalidArgument("a task");
      });
      if (!in_task && p == 2) throw InvalidArgument("a part");
    });
  };
  for (int round = 0; round < 50; ++round) {
    CHECK_THROWS(run(true), InvalidArgument);
    CHECK_THROWS(run(false), InvalidArgument);
  }
}

// The rows of tables after steps in which most ids are new.
std::vector<float> trained(const Bounds& bounds, int threads) {
  constexpr int64_t kTables = 5, kBags = 3000, kColumns = 4;
  Threads executor(threads);
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<int64_t> features;
  for (int64_t t = 0; t < kTables; ++t) {
    TableConfig config;
    config.name = "t" + std::to_string(t);
    config.column_end = kColumns;
    config.init = {InitKind::kUniform, -1.0, 1.0};
    set_optimizer(config, OptimizerKind::kAdam);
    config.bounds = bounds;
    tables.push_back(std::make_shared<Table>(config));
    features.push_back(t);
  }
  const auto group = std::make_shared<Group>(tables, std::vector<Routing>(kTables), features, false);
  std::mt19937_64 random(5);
  std::vector<float> out(kBags * kTables * kColumns), all;
  for (int step = 0; step < 6; ++step) {
    std::vector<int64_t> ids(kTables * kBags);
    for (int64_t& id : ids) id = static_cast<int64_t>(random() % (random() % 2 == 0 ? 500 : 12000));
    Batch batch;
    batch.ids = ids.data();
    batch.n_ids = static_cast<int64_t>(ids.size());
    batch.bags = kBags;
    const auto pass = begun(group, batch, out.data(), executor);
    all.insert(all.end(), out.begin(), out.end());
    pass->backward(std::vector<float>(out.size(), 0.25f).data(), std::vector<float>(kTables, 0.1f), nullptr, executor);
  }
  for (const auto& table : tables) {
    for (int64_t id = 0; id < 12000; ++id) {
      const Slot slot = table->index().find(id);
      if (slot != kNoSlot) all.insert(all.end(), table->rows().row(slot), table->rows().row(slot) + kColumns);
    }
    const Counters& counters = table->counters();
    for (const int64_t count : {table->size(), counters.evicted, counters.expired, counters.refused}) {
      all.push_back(static_cast<float>(count));
    }
    CHECK(counters.evicted + counters.expired + counters.refused > 0);
  }
  return all;
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 5, 16}) {
    for (const int64_t parts : {1, 3, 26}) each_task_runs_once(threads, parts);
    errors_end_all_parts(threads);
  }
  Bounds least_recent, least_frequent, expiring, admitting;
  least_recent.max_rows = least_frequent.max_rows = 5000;
  least_recent.eviction = Eviction::kLeastRecent;
  least_frequent.eviction = Eviction::kLeastFrequent;
  expiring.expiry = 4;
  admitting.min_frequency = 2;
  admitting.counter_bytes = 1 << 16;
  for (const Bounds& bounds : {least_recent, least_frequent, expiring, admitting}) {
    const std::vector<float> expected = trained(bounds, 1);
    CHECK(trained(bounds, 40) == expected);
    if (!kIsSlow) CHECK(trained(bounds, 3) == expected);
  }
  std::puts("test_parts passed");
}
