#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "executor.h"
#include "group.h"

namespace recstore {

// How a backward finds a batch's rows again: the batch as its forward saw it, and the slots that were found.
struct ResolvedBatch {
  const Group& group;
  const Batch& batch;
  const Slot* slots;  // (n_ids,)
};

// The step whose bookkeeping is to be written, for each table; 0 for none.
using Steps = std::vector<uint32_t>;
// In place of a step: the table has got other rows since, and this is no update of it.
constexpr uint32_t kForgotten = 0xFFFFFFFFu;

// The distinct ids of each table.
using Distinct = std::vector<int64_t>;

// Applies the fused optimizer to every row of the batch, once, on the sum of its gradients, taken in
// the order of the batch, and counts that as one update of each table. All that can fail is done by the constructor,
// which changes nothing. The caller holds the group's locks all the while.
class Update {
 public:
  // grad: (bags, columns), contiguous, clipped by value already; it, and what `resolved` refers to, must outlive this.
  // learning_rates: one a table. Throws OutOfMemory.
  Update(const ResolvedBatch& resolved, const float* grad, const std::vector<float>& learning_rates, const Steps& steps,
         Executor& executor);
  ~Update();
  // Once.
  Distinct run() noexcept;

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

// Writes the bookkeeping of a batch whose gradients never came; tables of step 0 are not touched. The
// caller holds the locks of the others. Throws OutOfMemory, and has written nothing then.
Distinct record_step(const ResolvedBatch& resolved, const Steps& steps, Executor& executor);

// The gradient of each id's per-sample weight: its row, as it is now, times its bag's gradient.
// grad_weights: (n_ids,)
void weight_gradients(const ResolvedBatch& resolved, const float* grad, float* grad_weights, Executor& executor);

}  // namespace recstore
