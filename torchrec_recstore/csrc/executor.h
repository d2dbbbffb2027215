#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace recstore {

// Where parallel work runs. The torch binding lends torch's pool; the C++ tests lend std::thread.
class Executor {
 public:
  using Body = void (*)(void* context);

  virtual ~Executor() = default;
  virtual int threads() const = 0;
  // Calls body(context) at most `workers` and at least one time, in parallel; returns when all have.
  virtual void run(int workers, Body body, void* context) = 0;
};

// The calling thread alone, for work beside what keeps the other threads busy.
class SerialExecutor final : public Executor {
 public:
  int threads() const override { return 1; }
  void run(int, Body body, void* context) override { body(context); }
};

// Calls work(task) for every task in [0, tasks), handed out one by one, so uneven tasks balance.
// Which thread takes which task is open: tasks must not depend on it. Rethrows the first exception
// after every running task has ended; tasks not yet begun are then skipped.
template <class Work>
void for_each_task(Executor& executor, int64_t tasks, const Work& work) {
  struct Shared {
    const Work& work;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::exception_ptr error;
  } shared{work, tasks, {}, {}, {}};
  const auto body = [](void* context) {
    auto& s = *static_cast<Shared*>(context);
    try {
      for (int64_t t; (t = s.next.fetch_add(1, std::memory_order_relaxed)) < s.tasks;) s.work(t);
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
    executor.run(static_cast<int>(workers), body, &shared);
  }
  if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace recstore
