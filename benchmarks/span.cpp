// How fast the core is with more threads than this machine has, by simulation: `make span`.
//
// Every call runs on one thread, but the core divides its work as for kMostThreads threads. The time of each task of
// for_each_task() is measured, and the time between the parallel runs. For N threads, tasks are given in their order to
// the thread that is free first, as the core gives them, and so are the tasks of tasks (see HelpedExecutor). The span
// of a call is the sum of the serial times, of the simulated times of its runs, and of kWake for each run. Its work is
// the sum of all times. The efficiency is work / (N * span).
//
// The simulation has no limit of the memory: docs/performance.md has the results.

#include "span.h"

#include <time.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lookup/find.h"
#include "lookup/pass.h"
#include "snapshot/snapshot.h"

namespace {

using namespace recstore;

constexpr int kThreads[] = {2, 8, 16, 32, 64};
constexpr int kMostThreads = 64;
// Seconds to wake the threads and to wait for the last one, with libgomp and spinning threads.
constexpr double kWake = 5e-6;
constexpr double kJoin = 1e-6;  // seconds until a thread that spins helps another one
constexpr int64_t kColumns = 64;
constexpr int kSteps = 5;

// The processor time of the thread, which does not count other processes.
double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// A task, and what it does in its own parallel runs, with which threads help that have no task.
struct Task {
  struct Segment {
    double serial = 0;  // before the run
    std::vector<double> tasks;
  };
  std::vector<Segment> segments;
  double rest = 0;  // after the last run

  double work() const {
    double sum = rest;
    for (const Segment& segment : segments) {
      sum += std::accumulate(segment.tasks.begin(), segment.tasks.end(), segment.serial);
    }
    return sum;
  }
};
using Run = std::vector<Task>;

// Simulates the threads of a run.
class Simulation {
 public:
  Simulation(const Run& run, int threads) : run_(run), progress_(run.size()) {
    for (int i = 0; i < threads; ++i) free(0.0);
  }
  // Returns when the last task ends.
  double end() {
    double last = 0;
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      last = std::max(last, event.at);
      if (event.task == kNone) {
        free(event.at);
        continue;
      }
      Progress& progress = progress_[event.task];
      if (event.of_run) --progress.running;
      if (event.is_owner) {
        own(event.task, event.at);
      } else {
        if (progress.waits && progress.running == 0) own(event.task, event.at);
        free(event.at);
      }
    }
    return last;
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;
  struct Event {  // a thread has done what it did
    double at;
    size_t task;
    bool is_owner;
    bool of_run;
    bool operator<(const Event& other) const { return at > other.at; }
  };
  struct Progress {
    size_t segment = 0, next = 0;
    int running = 0;
    bool is_open = false, waits = false;
  };

  bool help(size_t task, double at, bool is_owner) {
    Progress& progress = progress_[task];
    if (!progress.is_open || progress.next == run_[task].segments[progress.segment].tasks.size()) return false;
    ++progress.running;
    events_.push({at + run_[task].segments[progress.segment].tasks[progress.next++], task, is_owner, true});
    return true;
  }
  void free(double at) {
    if (next_ < run_.size()) return begin_segment(next_++, at);
    for (size_t task = 0; task < run_.size(); ++task) {
      if (help(task, at, false)) return;
    }
    ++idle_;
  }
  void begin_segment(size_t task, double at) {
    const auto& segments = run_[task].segments;
    const size_t segment = progress_[task].segment;
    if (segment == segments.size()) {
      events_.push({at + run_[task].rest, kNone, false, false});
    } else {
      events_.push({at + segments[segment].serial, task, true, false});
    }
  }
  // The thread that began a task goes on with it.
  void own(size_t task, double at) {
    Progress& progress = progress_[task];
    if (!progress.is_open) {
      progress.is_open = true;
      for (; idle_ > 0 && help(task, at + kJoin, false); --idle_) {
      }
    }
    if (help(task, at, true)) return;
    progress.waits = progress.running > 0;
    if (progress.waits) return;
    progress.is_open = false;
    progress.next = 0;
    ++progress.segment;
    begin_segment(task, at);
  }

  const Run& run_;
  std::vector<Progress> progress_;
  std::priority_queue<Event> events_;
  size_t next_ = 0;
  int idle_ = 0;
};

// The times of one call.
struct Times {
  double serial = 0;
  std::vector<Run> runs;

  double work() const {
    double sum = serial;
    for (const Run& run : runs) {
      for (const Task& task : run) sum += task.work();
    }
    return sum;
  }
  double span(int threads) const {
    double sum = serial;
    for (const Run& run : runs) sum += Simulation(run, threads).end() + kWake;
    return sum;
  }
};

class Recorder final : public Executor {
 public:
  int threads() const override { return kMostThreads; }
  void run(int, Body body, void* context) override {
    times_.serial += lap();
    times_.runs.emplace_back();
    running_ = true;
    body(context);
    running_ = false;
    lap();
  }
  void task_begins() {
    if (!running_) return;
    if (depth_ == 0) times_.runs.back().emplace_back();
    if (depth_ == 0 || (depth_ == 1 && inside_)) lap();
    ++depth_;
  }
  void task_ends() {
    if (!running_) return;
    --depth_;
    if (depth_ == 0) task().rest = lap();
    if (depth_ == 1 && inside_) task().segments.back().tasks.push_back(lap());
  }
  void run_begins(bool is_parallel) {
    if (!running_ || depth_ != 1 || !is_parallel) return;
    inside_ = true;
    task().segments.push_back({lap(), {}});
  }
  void run_ends() {
    if (!running_ || depth_ != 1 || !inside_) return;
    inside_ = false;
    lap();
  }
  Times measured(const std::function<void()>& call) {
    times_ = {};
    lap();
    call();
    times_.serial += lap();
    return std::move(times_);
  }

 private:
  Task& task() { return times_.runs.back().back(); }
  // Returns the time since the last call.
  double lap() { return now() - std::exchange(mark_, now()); }

  Times times_;
  double mark_ = 0;
  bool running_ = false, inside_ = false;  // inside_: in a run of a task
  int depth_ = 0;
};

Recorder recorder;

}  // namespace

recstore::MeasuredTask::MeasuredTask() { recorder.task_begins(); }
recstore::MeasuredTask::~MeasuredTask() { recorder.task_ends(); }
recstore::MeasuredRun::MeasuredRun(bool is_parallel) { recorder.run_begins(is_parallel); }
recstore::MeasuredRun::~MeasuredRun() { recorder.run_ends(); }

namespace {

// The numbers of distinct ids of the 26 features of Criteo's Kaggle data set, as DLRM counts them.
constexpr int64_t kIds[] = {1460,  583,  10131227, 2202608, 305, 24,     12517,   633,   3,
                            93145, 5683, 8351593,  3194,    27,  14992,  5461306, 10,    5652,
                            2173,  4,    7046547,  18,      15,  286181, 105,     142572};

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
    config.init = {InitKind::kUniform, -0.1, 0.1};
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
  for (const Run& run : t.runs) {
    for (const Task& task : run) longest = std::max(longest, task.work());
  }
  std::printf("| %s | %lld | %lld | %.2f | %.1f %% | %zu | %.2f |", part, static_cast<long long>(bags),
              static_cast<long long>(tables), t.work() * 1e3, 100 * t.serial / t.work(), t.runs.size(), longest * 1e3);
  for (const int threads : kThreads) std::printf(" %.2f |", t.work() / (threads * t.span(threads)));
  std::printf("\n");
  if (std::getenv("SPAN_RUNS") != nullptr) {
    std::printf("    serial %.3f ms\n", t.serial * 1e3);
    for (const Run& run : t.runs) {
      double sum = 0, most = 0, alone = 0;
      for (const Task& task : run) {
        double serial = task.rest;
        for (const Task::Segment& segment : task.segments) serial += segment.serial;
        sum += task.work(), most = std::max(most, task.work()), alone = std::max(alone, serial);
      }
      std::printf(
          "    run of %zu tasks: %.3f ms, the longest task %.3f ms, of which alone %.3f ms; with 64 threads %.3f ms\n",
          run.size(), sum * 1e3, most * 1e3, alone * 1e3, Simulation(run, 64).end() * 1e3);
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
      snapshot->read(rows, ids.data(), {weights.data(), {}, state.data(), last_step.data(), frequency.data()}, false,
                     recorder);
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
