#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/executor.h"
#include "lookup/group.h"
#include "row_loops/row_loops.h"

namespace recstore {

// A batch and the slots of its ids, by which a backward finds the rows again.
struct ResolvedBatch {
  const Group& group;
  const Batch& batch;
  const Slot* slots;  // (n_ids,)
};

// For each table, the step that is to be recorded in the rows' bookkeeping; 0 for none.
using Steps = std::vector<uint32_t>;
// A value of Steps: the table's rows were exchanged after the forward, so the backward does not update the table.
constexpr uint32_t kForgotten = 0xFFFFFFFFu;

// For each table, the number of distinct ids.
using Distinct = std::vector<int64_t>;

// Applies the fused optimizer once to every row of the batch, on the sum of the row's gradients. The sum is taken in
// the order of the batch. This counts as one update of each table. The constructor does everything that can fail, and
// changes no row. The caller holds the locks of the group throughout.
class Update {
 public:
  // grad: (bags, columns), contiguous, already clipped by value. The gradient and the arrays of `resolved` must outlive
  // this object. learning_rates: one for each table. Throws OutOfMemory.
  Update(const ResolvedBatch& resolved, const float* grad, const std::vector<float>& learning_rates, const Steps& steps,
         Executor& executor);
  ~Update();
  // Call it once.
  Distinct run() noexcept;

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

// Records the step of a batch that has had no backward. Tables whose step is 0 are skipped; the caller holds the locks
// of the other tables. Throws OutOfMemory; nothing is recorded then.
Distinct record_step(const ResolvedBatch& resolved, const Steps& steps, Executor& executor);

// Returns how the next update of the table rounds its weights and states. It refers to the routing.
StochasticRounding rounding_of(const Table& table, const Routing& routing);

// Writes the gradient of each per-sample weight, which is the dot product of the id's present row and the gradient of
// its bag. grad_weights: (n_ids,).
void weight_gradients(const ResolvedBatch& resolved, const float* grad, float* grad_weights, Executor& executor);

}  // namespace recstore
