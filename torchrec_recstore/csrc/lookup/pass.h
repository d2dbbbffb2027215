#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/buffer_pool.h"
#include "lookup/backward.h"
#include "lookup/forward.h"
#include "lookup/group.h"
#include "lookup/slots_ahead.h"

namespace recstore {

// A training forward of a group, from its lookup until its backward has run or its graph has been freed.
class Pass final : public PendingPass {
 public:
  // Makes a pass that has not begun. inputs: keeps the arrays of the batch alive. Throws OutOfMemory.
  Pass(std::shared_ptr<const Group> group, const Batch& batch, std::shared_ptr<void> inputs, Executor& executor);
  ~Pass() override;

  // A pass that begins, and the array that receives its output; null if only the step is wanted.
  struct Start {
    Pass* pass;
    float* out;
  };
  // Looks up the batches of all passes (see TrainingLookup) and keeps their slots. If one fails, nothing changes. The
  // caller holds no lock. Throws InvalidArgument if two passes have a table in common, or if a lookup does.
  static void begin(const std::vector<Start>& starts, Executor& executor);

  // A pass of one table that ends with its backward, its gradient and its learning rate.
  struct End {
    Pass* pass;
    const float* grad;
    float learning_rate;
  };
  // Calls backward() of all passes, which have no table in common. If one has no memory, no row changes.
  static void end(const std::vector<End>& ends, Executor& executor);

  int64_t columns() const { return group_->columns(); }
  const Batch& batch() const { return batch_; }
  size_t table_count() const { return group_->tables.size(); }

  // Updates the rows with the gradients (see Update). If grad_weights is not null, the gradients of the per-sample
  // weights are written to it before the rows change.
  void backward(const float* grad, const std::vector<float>& learning_rates, float* grad_weights, Executor& executor);

  // Writes the gradients of the per-sample weights, and does not change the rows.
  void weight_gradients_only(const float* grad, float* grad_weights, Executor& executor);

  // A pass whose rows are on a device. All tables have device slots. The caller copies rows and runs the kernels, makes
  // one call after the other, and lets nobody else use the device slots of these tables meanwhile; the passes lock the
  // tables for each call alone.
  //
  // Plans that all rows of this pass have device slots. firsts: the number of the first device slot of each table.
  // arenas: the arena of each table. staged: by arena, the number of rows in its staging, to which this call adds the
  // initial rows that the pass reads because admission has refused their ids. out: (n_ids,), receives the number of a
  // device slot, or -2 - r for row r of the staging. Returns false, and plans nothing, if the device has no room. A
  // pass is planned once. Throws std::bad_alloc, InvalidArgument.
  bool plan_on_device(const std::vector<int64_t>& firsts, const std::vector<int64_t>& arenas,
                      std::vector<int64_t>& staged, int32_t* out, Executor& executor);
  // The ids, by table, whose initial rows the plan has added to the staging, each once and in their order there.
  const std::vector<std::vector<int64_t>>& refused_ids() const { return refused_ids_; }
  // Plans that the stale rows of this pass are copied to the device again. Returns for each table whether it counts the
  // update; it does not if its rows were exchanged after the forward. commit_moves() and abort_moves() end both plans.
  std::vector<bool> plan_refresh(Executor& executor);
  // Notes that the device has updated the rows: their marks, their step, and the count of updates.
  void updated_on_device(Executor& executor);
  // The output of a pass that has begun without one, from the rows of the host. out: (bags, columns).
  void read_on_host(float* out, Executor& executor) const;
  const Group& group() const { return *group_; }
  // The slots of the host that the pass looks up in a table.
  std::vector<DeviceSlots::Range> ranges(int64_t table) const;

  void settle(const Table& table, Executor& executor) override;
  bool is_settled(const Table& table) const override;
  void forget(const Table& table) override;
  void pin(const Table& table, SlotSet& pinned) const override;
  void moved(const Table& table, const std::vector<Move>& moves) noexcept override;

 private:
  friend void accumulated_backward(const std::vector<std::shared_ptr<Pass>>&, const std::vector<const float*>&,
                                   const std::vector<float>&, Executor&);
  void count(const Distinct& distinct) noexcept;
  template <class Visit>
  void for_each_position(int64_t table, const Visit& visit) const {
    const auto* slots = static_cast<const Slot*>(slots_.data());
    for (const DeviceSlots::Range& range : ranges(table)) {
      const int64_t first = range.slots - slots;
      for (int64_t p = first; p < first + range.n; ++p) visit(p);
    }
  }
  // Writes the number of each position of a table to out, after its plan, as if the table's rows were the first in the
  // staging; see plan_on_device(). Returns the ids of these rows.
  std::vector<int64_t> number_positions(int64_t table, int64_t first, int32_t* out) const;
  // Changes the numbers of a table's rows in the staging, which begin after those of other tables.
  void move_staged_numbers(int64_t table, int64_t rows_before, int32_t* out) const;
  // Marks the rows of a table as changed on the device, and records the step for each of them unless it is 0.
  void mark_updated(int64_t table, uint32_t step);
  void settle_without_memory() noexcept;
  ResolvedBatch resolved() const { return {*group_, batch_, static_cast<const Slot*>(slots_.data())}; }

  std::shared_ptr<const Group> group_;
  Batch batch_;
  std::shared_ptr<void> inputs_;
  std::unique_ptr<SlotsAhead> ahead_;  // only until the pass has begun; its slots are in slots_
  BufferPool::Buffer slots_;
  Steps steps_;                    // by table: the step to be recorded, or 0 if it has been recorded
  std::vector<uint64_t> numbers_;  // by table: the number of this pass; empty before the pass has begun
  std::vector<std::vector<DeviceSlots::DeviceSlot>> on_device_;  // by table; empty for a pass on the host
  std::vector<std::vector<int64_t>> refused_ids_;                // by table; empty for a pass on the host
  bool planned_ = false;
  Executor& executor_;
};

// One backward for several passes of one group: each row is updated once, on the sum of its gradients over all passes.
// The sum is taken feature by feature, and within a feature pass by pass. grads: for each pass, contiguous.
void accumulated_backward(const std::vector<std::shared_ptr<Pass>>& passes, const std::vector<const float*>& grads,
                          const std::vector<float>& learning_rates, Executor& executor);

// Updates the rows of ids with gradients, without a pass. An id without a row gets its initial row first, if admission
// permits it; otherwise its gradient is dropped. The function locks the table.
// group: of one table; batch: without offsets; grad: (bags, columns).
// Throws InvalidArgument if the table has no room, OutOfMemory; the table is then unchanged.
void update_rows(const Group& group, const Batch& batch, const float* grad, float learning_rate, Executor& executor);

}  // namespace recstore
