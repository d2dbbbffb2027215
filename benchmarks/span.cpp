// How fast the core is with more threads than this machine has, by simulation: `make span`.
//
// Every call runs on one thread, but the core divides its work as for kMostThreads threads. The time of each task of
// for_each_task() is measured, and the time between the parallel runs. For N threads, tasks are given in their order to the
// thread that is free first, as the core gives them. The span of a call is the sum of the serial times, of the simulated
// times of its runs, and of kWake for each run. Its work is the sum of all times. The efficiency is work / (N * span).
//
// The simulation has no limit of the memory: docs/performance.md has the results.

#include "span.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <time.h>
#include <vector>

#include "find.h"
#include "pass.h"
#include "snapshot.h"

namespace {

using namespace recstore;

constexpr int kThreads[] = {2, 8, 16, 32, 64};
constexpr int kMostThreads = 64;
constexpr double kWake = 5e-6;  // seconds to wake the threads and to wait for the last one, with libgomp and spinning threads
constexpr int64_t kColumns = 64;
constexpr int kSteps = 5;

// The processor time of the thread, which does not count other processes.
double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// The times of one call.
struct Times {
  double serial = 0;
  std::vector<std::vector<double>> runs;  // for each parallel run, the times of its tasks

  double work() const {
    double sum = serial;
    for (const auto& run : runs) {
      for (const double task : run) sum += task;
    }
    return sum;
  }
  double span(int threads) const {
    double sum = serial;
    for (const auto& run : runs) {
      std::priority_queue<double, std::vector<double>, std::greater<>> free;
      for (int i = 0; i < threads; ++i) free.push(0.0);
      double last = 0;
      for (const double task : run) {
        const double end = free.top() + task;
        free.pop();
        free.push(end);
        last = std::max(last, end);
      }
      sum += last + kWake;
    }
    return sum;
  }
};

class Recorder final : public Executor {
 public:
  int threads() const override { return kMostThreads; }
  void run(int, Body body, void* context) override {
    times_.serial += now() - mark_;
    times_.runs.emplace_back();
    running_ = true;
    body(context);
    running_ = false;
    mark_ = now();
  }
  void task_begins() {
    if (running_ && depth_++ == 0) task_ = now();
  }
  void task_ends() {
    if (running_ && --depth_ == 0) times_.runs.back().push_back(now() - task_);
  }
  Times measured(const std::function<void()>& call) {
    times_ = {};
    mark_ = now();
    call();
    times_.serial += now() - mark_;
    return std::move(times_);
  }

 private:
  Times times_;
  double mark_ = 0, task_ = 0;
  bool running_ = false;
  int depth_ = 0;
};

Recorder recorder;

}  // namespace

recstore::MeasuredTask::MeasuredTask() { recorder.task_begins(); }
recstore::MeasuredTask::~MeasuredTask() { recorder.task_ends(); }

namespace {

// The numbers of distinct ids of the 26 features of Criteo's Kaggle data set, as DLRM counts them.
constexpr int64_t kIds[] = {1460,    583,   10131227, 2202608, 305, 24, 12517,   633, 3,      93145, 5683,   8351593, 3194,
                            27,      14992, 5461306,  10,      5652, 2173, 4,    7046547, 18, 15,    286181, 105,     142572};

struct Model {
  std::shared_ptr<Group> group;
  std::vector<int64_t> ids;
  std::vector<float> out, grad;
  Batch batch;
};

Model make_model(int64_t bags, int64_t tables, const Bounds& bounds = {}) {
  Model model;
  std::vector<std::shared_ptr<Table>> made;
  std::vector<int64_t> features;
  for (int64_t t = 0; t < tables; ++t) {
    TableConfig config;
    config.name = "t" + std::to_string(t);
    config.column_end = kColumns;
    config.init = {InitKind::kUniform, -0.1, 0.1, 0.0};
    config.optimizer.kind = OptimizerKind::kRowWiseAdagrad;
    config.bounds = bounds;
    made.push_back(std::make_shared<Table>(config));
  }
  for (int64_t f = 0; f < 26; ++f) features.push_back(f % tables);
  model.group = std::make_shared<Group>(made, std::vector<Routing>(made.size()), features, false);
  model.ids.resize(static_cast<size_t>(26 * bags));
  model.out.resize(static_cast<size_t>(bags * model.group->columns()));
  model.grad.assign(model.out.size(), 0.01f);
  model.batch.ids = model.ids.data();
  model.batch.n_ids = 26 * bags;
  model.batch.bags = bags;
  return model;
}

// Ids whose frequencies are those of a power law.
void draw(Model& model, std::mt19937_64& random) {
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const int64_t bags = model.batch.bags;
  for (int64_t f = 0; f < 26; ++f) {
    for (int64_t b = 0; b < bags; ++b) {
      const double rank = std::pow(static_cast<double>(kIds[f]), uniform(random)) - 1.0;
      model.ids[static_cast<size_t>(f * bags + b)] = f << 40 | static_cast<int64_t>(rank);
    }
  }
}
// Ids that no earlier batch had, in a share of the positions.
void renew(Model& model, std::mt19937_64& random, double share) {
  static int64_t next = int64_t{1} << 50;
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int64_t& id : model.ids) {
    if (uniform(random) < share) id = next++ * 7919;
  }
}

void print(const char* part, int64_t bags, int64_t tables, std::vector<Times> calls) {
  std::sort(calls.begin(), calls.end(), [](const Times& a, const Times& b) { return a.span(64) < b.span(64); });
  const Times& t = calls[calls.size() / 2];
  double longest = 0;
  for (const auto& run : t.runs) {
    for (const double task : run) longest = std::max(longest, task);
  }
  std::printf("| %s | %lld | %lld | %.2f | %.1f %% | %zu | %.2f |", part, static_cast<long long>(bags), static_cast<long long>(tables), t.work() * 1e3,
              100 * t.serial / t.work(), t.runs.size(), longest * 1e3);
  for (const int threads : kThreads) std::printf(" %.2f |", t.work() / (threads * t.span(threads)));
  std::printf("\n");
  if (std::getenv("SPAN_RUNS") != nullptr) {
    std::printf("    serial %.3f ms\n", t.serial * 1e3);
    for (const auto& run : t.runs) {
      double sum = 0, most = 0;
      for (const double task : run) sum += task, most = std::max(most, task);
      std::printf("    run of %zu tasks: %.3f ms, the longest task %.3f ms\n", run.size(), sum * 1e3, most * 1e3);
    }
  }
  std::fflush(stdout);
}

std::shared_ptr<Pass> begin(Model& model) {
  const auto pass = std::make_shared<Pass>(model.group, model.batch, nullptr, recorder);
  Pass::begin({{pass.get(), model.out.data()}}, recorder);
  return pass;
}

void steps(int64_t bags, int64_t tables) {
  std::mt19937_64 random(1);
  Model model = make_model(bags, tables);
  const std::vector<float> rates(static_cast<size_t>(tables), 0.1f);
  std::vector<Times> forward, backward, growth;
  for (int i = 0; i < kSteps + 2; ++i) {
    draw(model, random);
    begin(model)->backward(model.grad.data(), rates, nullptr, recorder);
    std::shared_ptr<Pass> pass;
    forward.push_back(recorder.measured([&] { pass = begin(model); }));
    backward.push_back(recorder.measured([&] { pass->backward(model.grad.data(), rates, nullptr, recorder); }));
  }
  print("forward", bags, tables, forward);
  print("backward", bags, tables, backward);
  for (int i = 0; i < kSteps; ++i) {
    renew(model, random, 1.0);
    std::shared_ptr<Pass> pass;
    growth.push_back(recorder.measured([&] { pass = begin(model); }));
  }
  print("forward, all ids new", bags, tables, growth);
  const int64_t rows = model.group->tables[0]->size();
  std::vector<Times> save;
  std::vector<int64_t> ids(static_cast<size_t>(rows)), last_step(ids.size()), frequency(ids.size());
  std::vector<float> weights(ids.size() * kColumns), state(ids.size());
  for (int i = 0; i < 3; ++i) {
    const auto snapshot = open_snapshot(model.group->tables[0], std::nullopt, recorder);
    save.push_back(recorder.measured([&] {
      snapshot->read(rows, ids.data(), {weights.data(), {}, state.data(), last_step.data(), frequency.data()}, false, recorder);
    }));
  }
  print("save: the rows of a table", bags, tables, save);
}

void bounded(const char* part, int64_t bags, int64_t tables, const Bounds& bounds, double share) {
  std::mt19937_64 random(1);
  Model model = make_model(bags, tables, bounds);
  const std::vector<float> rates(static_cast<size_t>(tables), 0.1f);
  std::vector<Times> calls;
  for (int i = 0; i < 24; ++i) {
    draw(model, random);
    renew(model, random, share);
    std::shared_ptr<Pass> pass;
    const Times times = recorder.measured([&] { pass = begin(model); });
    if (i >= 16) calls.push_back(times);
    pass->backward(model.grad.data(), rates, nullptr, recorder);
  }
  print(part, bags, tables, calls);
}

}  // namespace

int main() {
  std::printf("| part | batch | tables | work, ms | serial | runs | longest task, ms |");
  for (const int threads : kThreads) std::printf(" %d threads |", threads);
  std::printf("\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (const int64_t bags : {int64_t{8192}, int64_t{65536}}) {
    for (const int64_t tables : {int64_t{26}, int64_t{1}}) {
      steps(bags, tables);
      Bounds bounds;
      bounds.max_rows = 26 * bags * 2 / tables;
      bounds.eviction = Eviction::kLeastRecent;
      bounded("forward, a third of the ids evict", bags, tables, bounds, 0.33);
      Bounds admitting;
      admitting.min_frequency = 2;
      admitting.counter_bytes = 64 << 20;
      bounded("forward, a third not admitted", bags, tables, admitting, 0.33);
      Bounds expiring;
      expiring.expiry = 8;
      bounded("forward, a third expire", bags, tables, expiring, 0.33);
    }
  }
}
