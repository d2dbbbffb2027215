#include "pass.h"

#include <algorithm>
#include <utility>

#include "clipping.h"

namespace recstore {

Pass::Pass(std::shared_ptr<const Group> group, const Batch& batch, std::shared_ptr<void> inputs, float* out, Executor& executor)
    : group_(std::move(group)),
      batch_(batch),
      inputs_(std::move(inputs)),
      slots_(BufferPool::instance().take(static_cast<size_t>(batch.n_ids) * sizeof(Slot))),
      executor_(executor) {
  const auto locks = group_->lock();
  steps_ = lookup(*group_, batch_, true, static_cast<Slot*>(slots_.data()), out, executor).steps;
  numbers_.reserve(group_->tables.size());
  try {
    for (const auto& table : group_->tables) numbers_.push_back(table->begin_pass(this));
  } catch (...) {  // no destructor runs for what was not constructed
    end();
    throw;
  }
}

Pass::~Pass() {
  const auto locks = group_->lock_even_closed();
  try {
    for (const auto& table : group_->tables) {
      if (table->is_open()) settle(*table, executor_);
    }
  } catch (...) {  // out of memory for the bookkeeping alone: the rows are as they were
  }
  end();
}

void Pass::end() {
  for (size_t t = 0; t < numbers_.size(); ++t) group_->tables[t]->end_pass(numbers_[t]);
}

void Pass::backward(const float* grad, const std::vector<float>& learning_rates, float* grad_weights, Executor& executor) {
  const auto locks = group_->lock();
  const ClippedGradient clipped(*group_, grad, batch_.bags, executor);
  if (grad_weights != nullptr) weight_gradients(resolved(), clipped.data(), grad_weights, executor);
  count(apply_gradients(resolved(), clipped.data(), learning_rates, steps_, executor));
}

void Pass::settle(const Table& table, Executor& executor) {
  Steps unsettled(steps_.size(), 0);
  for (size_t t = 0; t < steps_.size(); ++t) {
    if (group_->tables[t].get() == &table) unsettled[t] = steps_[t];
  }
  if (std::any_of(unsettled.begin(), unsettled.end(), [](uint32_t step) { return step != 0; })) {
    count(record_step(resolved(), unsettled, executor));
  }
}

void Pass::count(const Distinct& distinct) {
  for (size_t t = 0; t < distinct.size(); ++t) {
    if (distinct[t] == 0 || steps_[t] == 0) continue;
    group_->tables[t]->counters().lookups += distinct[t];
    steps_[t] = 0;
  }
}

}  // namespace recstore
