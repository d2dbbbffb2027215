#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/executor.h"
#include "lookup/pass.h"

// Ends the test and prints the place and the text of the condition if it is false.
#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                               \
    }                                                                             \
  } while (0)

#define CHECK_THROWS(expression, Exception)                                                        \
  do {                                                                                             \
    bool thrown = false;                                                                           \
    try {                                                                                          \
      expression;                                                                                  \
    } catch (const Exception&) {                                                                   \
      thrown = true;                                                                               \
    }                                                                                              \
    if (!thrown) {                                                                                 \
      std::fprintf(stderr, "%s:%d: no %s from %s\n", __FILE__, __LINE__, #Exception, #expression); \
      std::abort();                                                                                \
    }                                                                                              \
  } while (0)

// Under ThreadSanitizer, and in the emulator for aarch64, a test takes about ten times as long. Random tests make fewer
// rounds there: the programs with AddressSanitizer are those that meet every kind of state.
#if defined(__SANITIZE_THREAD__) || defined(__aarch64__)
constexpr bool kIsSlow = true;
#else
constexpr bool kIsSlow = false;
#endif

// Returns a pass that has begun.
inline std::shared_ptr<recstore::Pass> begun(const std::shared_ptr<const recstore::Group>& group,
                                             const recstore::Batch& batch, float* out, recstore::Executor& executor,
                                             std::shared_ptr<void> inputs = nullptr) {
  const auto pass = std::make_shared<recstore::Pass>(group, batch, std::move(inputs), executor);
  recstore::Pass::begin({{pass.get(), out}}, executor);
  return pass;
}

// Sets the optimizer, and options of all optimizers that are not their defaults.
inline void set_optimizer(recstore::TableConfig& config, recstore::OptimizerKind kind) {
  config.optimizer.kind = kind;
  config.optimizer.weight_decay = 0.01;
  config.optimizer.momentum = 0.9;
  config.optimizer.beta1 = config.optimizer.alpha = 0.9;
  config.optimizer.beta2 = 0.99;
  config.optimizer.eta = 0.1;
  config.optimizer.l1 = 0.01;
  config.optimizer.lr_power = -0.5;
}

// An executor that starts its own threads for each run. Torch's threads can count another number of threads than the
// thread that makes a call, and so do these if `counted_by_workers` is not 0.
class Threads final : public recstore::Executor {
 public:
  explicit Threads(int count, int counted_by_workers = 0) : count_(count), counted_by_workers_(counted_by_workers) {}
  int threads() const override {
    return counted_by_workers_ == 0 || std::this_thread::get_id() == maker_ ? count_ : counted_by_workers_;
  }
  void run(int workers, Body body, void* context) override {
    std::vector<std::thread> threads;
    for (int i = 0; i < workers; ++i) threads.emplace_back(body, context);
    for (auto& thread : threads) thread.join();
  }

 private:
  int count_, counted_by_workers_;
  std::thread::id maker_ = std::this_thread::get_id();
};
