#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

namespace recstore {

// Where parallel work runs. The torch binding lends torch's pool; the C++ tests lend std::thread.
class Executor {
 public:
  using Body = void (*)(void* context);

  virtual ~Executor() = default;
  virtual int threads() const = 0;
  // Calls body(context) at most `workers` and at least one time, in parallel; returns when all have. May throw where
  // no thread can be had, and has not called body then.
  virtual void run(int workers, Body body, void* context) = 0;
};

// The calling thread alone, for work beside what keeps the other threads busy.
class SerialExecutor final : public Executor {
 public:
  int threads() const override { return 1; }
  void run(int, Body body, void* context) override { body(context); }
};

// Calls work(task), or work(task, worker), for every task in [0, tasks), handed out one by one, so uneven tasks balance.
// Which thread takes which task is open: tasks must not depend on it. `worker` is below executor.threads(), and no two
// tasks run at once with the same one. Rethrows the first exception after every running task has ended; tasks not yet
// begun are then skipped. Throws nothing itself: the calling thread does all tasks where no other can be had.
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

}  // namespace recstore
