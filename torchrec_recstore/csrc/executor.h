#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

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

// Calls work(part, executor) for every part in [0, parts), where the executor runs the tasks of the part. See
// for_each_task for errors. at_once: the parts run in parallel, each on one thread.
template <class Work>
void for_each_part(Executor& executor, int64_t parts, bool at_once, const Work& work) {
  static SerialExecutor serial;  // it has no state
  if (at_once) return for_each_task(executor, parts, [&](int64_t p) { work(p, serial); });
  for (int64_t p = 0; p < parts; ++p) work(p, executor);
}
// The same. The parts run at once if there are enough of them to keep all threads busy, because to wake threads costs
// more than the work on a small part.
template <class Work>
void for_each_part(Executor& executor, int64_t parts, const Work& work) {
  for_each_part(executor, parts, parts >= 2 * executor.threads(), work);
}

}  // namespace recstore
