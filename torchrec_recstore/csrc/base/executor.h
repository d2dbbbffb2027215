#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#ifdef RECSTORE_SPAN
#include "span.h"  // benchmarks/span.cpp simulates more threads than a machine has
#endif

namespace recstore {

// Runs parallel work. The ops use torch's thread pool; the C++ tests use std::thread.
class Executor {
 public:
  using Body = void (*)(void* context);

  virtual ~Executor() = default;
  virtual int threads() const = 0;
  // Calls body(context) in parallel, at least once and at most `workers` times, and returns after all calls. May throw
  // if no thread can be started; body has not been called then.
  virtual void run(int workers, Body body, void* context) = 0;
};

// Runs work on the calling thread alone, for work in the background of training.
class SerialExecutor final : public Executor {
 public:
  int threads() const override { return 1; }
  void run(int, Body body, void* context) override { body(context); }
};

// Calls work(task) or work(task, worker) for every task in [0, tasks). Threads take the tasks one by one, so that
// uneven tasks balance. A task must not depend on the thread that runs it. `worker` is less than executor.threads(),
// and no two tasks run at the same time with the same worker. If a task throws, tasks that have not begun are skipped,
// and the first exception is rethrown after the running tasks have ended. The function itself does not throw: if no
// other thread can be started, the calling thread runs all tasks.
template <class Work>
void for_each_task(Executor& executor, int64_t tasks, const Work& work) {
  struct Shared {
    const Work& work;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<int> workers{0};
    std::mutex mutex;
    std::exception_ptr error;
  } shared{work, tasks, {}, {}, {}, {}};
  const auto body = [](void* context) {
    auto& s = *static_cast<Shared*>(context);
    try {
      [[maybe_unused]] const int worker = s.workers.fetch_add(1, std::memory_order_relaxed);
      for (int64_t t; (t = s.next.fetch_add(1, std::memory_order_relaxed)) < s.tasks;) {
#ifdef RECSTORE_SPAN
        const MeasuredTask measured;
#endif
        if constexpr (std::is_invocable_v<const Work&, int64_t, int>) {
          s.work(t, worker);
        } else {
          s.work(t);
        }
      }
    } catch (...) {
      s.next.store(s.tasks, std::memory_order_relaxed);
      const std::lock_guard<std::mutex> lock(s.mutex);
      if (!s.error) s.error = std::current_exception();
    }
  };
  const int64_t workers = tasks < executor.threads() ? tasks : executor.threads();
#ifdef RECSTORE_SPAN
  const MeasuredRun run(workers > 1);
#endif
  if (workers <= 1) {
    body(&shared);
  } else {
    try {
      executor.run(static_cast<int>(workers), body, &shared);
    } catch (...) {
      body(&shared);
    }
  }
  if (shared.error) std::rethrow_exception(shared.error);
}

// Gives threads that have nothing else to do the tasks of others: a part of some work runs its own tasks in this
// executor, and a thread that finds no further part calls help().
class HelpedExecutor final : public Executor {
 public:
  HelpedExecutor(int threads, int64_t parts) : threads_(threads), parts_left_(parts) {}

  int threads() const override { return threads_; }
  void run(int workers, Body body, void* context) override {
    Job job{body, context, workers - 1, 0};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(&job);
      places_ += job.places;
    }
    body(context);
    std::unique_lock<std::mutex> lock(mutex_);
    places_ -= job.places;
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    for (; job.helpers > 0; lock.lock()) {
      lock.unlock();
      std::this_thread::yield();
    }
  }
  // Runs tasks of the parts until all parts have ended.
  void help() {
    while (parts_left_.load(std::memory_order_relaxed) > 0) {
      Job* job = places_.load(std::memory_order_relaxed) > 0 ? join() : nullptr;
      if (job == nullptr) {
        std::this_thread::yield();
        continue;
      }
      job->body(job->context);
      const std::lock_guard<std::mutex> lock(mutex_);
      --job->helpers;
    }
  }
  void part_ended() { --parts_left_; }
  void stop() { parts_left_ = 0; }

 private:
  struct Job {
    Body body;
    void* context;
    int places;   // how many threads may still help
    int helpers;  // how many do
  };
  Job* join() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) { return job->places > 0; });
    if (found == jobs_.end()) return nullptr;
    --(*found)->places;
    ++(*found)->helpers;
    --places_;
    return *found;
  }

  const int threads_;
  std::atomic<int64_t> parts_left_;
  std::atomic<int64_t> places_{0};  // of all jobs
  std::mutex mutex_;
  std::vector<Job*> jobs_;
};

// Calls work(part, executor) for every part in [0, parts), where the executor runs the tasks of the part and must not
// be used afterwards. at_once: the parts run in parallel, and the threads that are left over share their tasks. See
// for_each_task for errors.
template <class Work>
void for_each_part(Executor& executor, int64_t parts, bool at_once, const Work& work) {
  const int threads = executor.threads();
  if (!at_once || threads == 1) {
    for (int64_t p = 0; p < parts; ++p) work(p, executor);
    return;
  }
  HelpedExecutor helped(threads, parts);
  for_each_task(executor, parts + threads - 1, [&](int64_t p) {
    if (p >= parts) return helped.help();
    try {
      work(p, helped);
      helped.part_ended();
    } catch (...) {
      helped.stop();  // the parts that have not begun are skipped
      throw;
    }
  });
}
// The same. The parts run at once, each on one thread, if there are enough of them to keep all threads busy, because to
// wake threads costs more than the work on a small part.
template <class Work>
void for_each_part(Executor& executor, int64_t parts, const Work& work) {
  static SerialExecutor serial;  // it has no state
  if (parts < 2 * executor.threads()) {
    for (int64_t p = 0; p < parts; ++p) work(p, executor);
  } else {
    for_each_task(executor, parts, [&](int64_t p) { work(p, serial); });
  }
}

}  // namespace recstore
