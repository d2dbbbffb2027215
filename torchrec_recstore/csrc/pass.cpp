#include "pass.h"

#include <algorithm>
#include <utility>

namespace recstore {

Pass::Pass(std::shared_ptr<const Group> group, const Batch& batch, std::shared_ptr<void> inputs, float* out, Executor& executor)
    : group_(std::move(group)),
      batch_(batch),
      inputs_(std::move(inputs)),
      slots_(BufferPool::instance().take(static_cast<size_t>(batch.n_ids) * sizeof(Slot))),
      executor_(executor) {
  const auto locks = group_->lock();
  steps_ = lookup(*group_, batch_, true, static_cast<Slot*>(slots_.data()), out, executor).steps;
  for (const auto& table : group_->tables) numbers_.push_back(table->begin_pass(this));
}

Pass::~Pass() {
  const auto locks = group_->lock_even_closed();
  const bool all_open = std::all_of(group_->tables.begin(), group_->tables.end(), [](const auto& t) { return t->is_open(); });
  try {
    if (all_open) settle(executor_);
  } catch (...) {  // out of memory for the bookkeeping alone: the rows are as they were
  }
  for (size_t t = 0; t < numbers_.size(); ++t) group_->tables[t]->end_pass(numbers_[t]);
}

void Pass::backward(const float* grad, const std::vector<float>& learning_rates, float* grad_weights, Executor& executor) {
  const auto locks = group_->lock();
  if (grad_weights != nullptr) weight_gradients(resolved(), grad, grad_weights, executor);
  const Distinct distinct = apply_gradients(resolved(), grad, learning_rates, steps_, executor);
  for (size_t t = 0; t < distinct.size(); ++t) group_->tables[t]->counters().updates += distinct[t];
  count(distinct);
}

void Pass::settle(Executor& executor) {
  if (!settled_) count(record_step(resolved(), steps_, executor));
}

void Pass::count(const Distinct& distinct) {
  if (settled_) return;
  settled_ = true;
  for (size_t t = 0; t < distinct.size(); ++t) group_->tables[t]->counters().lookups += distinct[t];
  std::fill(steps_.begin(), steps_.end(), 0u);
}

}  // namespace recstore
