#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "backward.h"
#include "buffer_pool.h"
#include "forward.h"
#include "group.h"

namespace recstore {

// A training forward of a group, from its lookup until its backward has run or its graph is gone.
class Pass final : public PendingPass {
 public:
  // Not begun yet. inputs: keeps what `batch` points to alive. Throws OutOfMemory.
  Pass(std::shared_ptr<const Group> group, const Batch& batch, std::shared_ptr<void> inputs, Executor& executor);
  ~Pass() override;

  // A pass of tables of its own, and where its output goes.
  struct Start {
    Pass* pass;
    float* out;
  };
  // Looks the batches of passes of different tables up (see TrainingLookup) and keeps the slots: all of them, or
  // nothing changes. The caller holds no lock.
  static void begin(const std::vector<Start>& starts, Executor& executor);

  int64_t columns() const { return group_->columns(); }
  const Batch& batch() const { return batch_; }
  size_t table_count() const { return group_->tables.size(); }

  // Applies the gradients (see apply_gradients()), and before that, where grad_weights is not null,
  // writes the per-sample weights' gradients to it.
  void backward(const float* grad, const std::vector<float>& learning_rates, float* grad_weights, Executor& executor);

  // Writes the per-sample weights' gradients and leaves the rows alone.
  void weight_gradients_only(const float* grad, float* grad_weights, Executor& executor);

  void settle(const Table& table, Executor& executor) override;
  void forget(const Table& table) override;
  void pin(const Table& table, SlotSet& pinned) const override;
  void moved(const Table& table, const std::vector<Move>& moves) noexcept override;

 private:
  friend void accumulated_backward(const std::vector<std::shared_ptr<Pass>>&, const std::vector<const float*>&,
                                   const std::vector<float>&, Executor&);
  void count(const Distinct& distinct) noexcept;
  void settle_without_memory() noexcept;
  ResolvedBatch resolved() const { return {*group_, batch_, static_cast<const Slot*>(slots_.data())}; }

  std::shared_ptr<const Group> group_;
  Batch batch_;
  std::shared_ptr<void> inputs_;
  BufferPool::Buffer slots_;
  Steps steps_;                   // zero for a table whose bookkeeping is written
  std::vector<uint64_t> numbers_; // one a table; none before the pass has begun
  Executor& executor_;
};

// One backward for several passes of one group: each row is updated once, on the sum over all of them,
// taken feature by feature, and of a feature pass by pass. grads: of each pass, contiguous.
void accumulated_backward(const std::vector<std::shared_ptr<Pass>>& passes, const std::vector<const float*>& grads,
                          const std::vector<float>& learning_rates, Executor& executor);

}  // namespace recstore
