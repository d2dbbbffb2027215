#include "lookup/pass.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "bounds/eviction.h"
#include "bounds/row_uses.h"
#include "lookup/clipping.h"
#include "lookup/find.h"

namespace recstore {

Pass::Pass(std::shared_ptr<const Group> group, const Batch& batch, std::shared_ptr<void> inputs, Executor& executor)
    : group_(std::move(group)),
      batch_(batch),
      inputs_(std::move(inputs)),
      ahead_(group_->coming->take(batch)),
      slots_(ahead_ != nullptr ? std::move(ahead_->slots)
                               : BufferPool::instance().take(static_cast<size_t>(batch.n_ids) * sizeof(Slot))),
      executor_(executor) {}

void Pass::begin(const std::vector<Start>& starts, Executor& executor) {
  std::vector<Table*> tables;
  for (const Start& start : starts) {
    const std::vector<Table*>& own = start.pass->group_->lock_order;
    tables.insert(tables.end(), own.begin(), own.end());
  }
  std::sort(tables.begin(), tables.end());
  if (std::adjacent_find(tables.begin(), tables.end()) != tables.end()) {
    throw InvalidArgument("groups must be of different tables");
  }
  const TableLocks locks(tables);
  // Declared after the locks, so that an exception undoes them under the locks.
  std::vector<std::optional<TrainingLookup>> lookups(starts.size());
  for_each_part(executor, static_cast<int64_t>(starts.size()), [&](int64_t p, Executor& of_part) {
    const auto& [pass, out] = starts[p];
    for (const auto& table : pass->group_->tables) {
      table->check_open();
      table->reserve_pass();
    }
    pass->steps_.reserve(pass->group_->tables.size());
    pass->numbers_.reserve(pass->group_->tables.size());
    lookups[p].emplace(*pass->group_, pass->batch_, static_cast<Slot*>(pass->slots_.data()), out, of_part,
                       pass->ahead_.get());
  });
  for (size_t p = 0; p < starts.size(); ++p) {
    lookups[p]->commit();
    starts[p].pass->ahead_ = nullptr;
    for (const auto& table : starts[p].pass->group_->tables) {
      starts[p].pass->steps_.push_back(table->begin_step());
      starts[p].pass->numbers_.push_back(table->begin_pass(starts[p].pass));
      table->give_memory_back();
    }
  }
}

Pass::~Pass() {
  if (numbers_.empty()) return;
  const auto locks = group_->lock_even_closed();
  try {
    for (const auto& table : group_->tables) {
      if (table->is_open()) settle(*table, executor_);
    }
  } catch (...) {
    settle_without_memory();
  }
  for (size_t t = 0; t < numbers_.size(); ++t) group_->tables[t]->end_pass(numbers_[t]);
}

void Pass::backward(const float* grad, const std::vector<float>& learning_rates, float* grad_weights,
                    Executor& executor) {
  const auto locks = group_->lock();
  const ClippedGradient clipped(*group_, grad, batch_.bags, executor);
  if (grad_weights != nullptr) weight_gradients(resolved(), clipped.data(), grad_weights, executor);
  count(Update(resolved(), clipped.data(), learning_rates, steps_, executor).run());
}

void Pass::end(const std::vector<End>& ends, Executor& executor) {
  std::vector<Table*> tables;
  for (const End& end : ends) tables.push_back(end.pass->group_->lock_order.front());
  std::sort(tables.begin(), tables.end());
  const TableLocks locks(tables);
  std::vector<std::optional<ClippedGradient>> clipped(ends.size());
  std::vector<std::optional<Update>> updates(ends.size());
  const auto parts = static_cast<int64_t>(ends.size());
  for_each_part(executor, parts, [&](int64_t p, Executor& of_part) {
    const auto& [pass, grad, learning_rate] = ends[p];
    pass->group_->tables[0]->check_open();
    clipped[p].emplace(*pass->group_, grad, pass->batch_.bags, of_part);
    updates[p].emplace(pass->resolved(), clipped[p]->data(), std::vector<float>{learning_rate}, pass->steps_, of_part);
  });
  for_each_part(executor, parts, [&](int64_t p, Executor&) { ends[p].pass->count(updates[p]->run()); });
}

void Pass::weight_gradients_only(const float* grad, float* grad_weights, Executor& executor) {
  const auto locks = group_->lock_shared();
  const ClippedGradient clipped(*group_, grad, batch_.bags, executor);
  weight_gradients(resolved(), clipped.data(), grad_weights, executor);
}

void Pass::settle(const Table& table, Executor& executor) {
  Steps unsettled(steps_.size(), 0);
  for (size_t t = 0; t < steps_.size(); ++t) {
    if (group_->tables[t].get() == &table && steps_[t] != kForgotten) unsettled[t] = steps_[t];
  }
  if (std::any_of(unsettled.begin(), unsettled.end(), [](uint32_t step) { return step != 0; })) {
    count(record_step(resolved(), unsettled, executor));
  }
}

bool Pass::is_settled(const Table& table) const {
  for (size_t t = 0; t < steps_.size(); ++t) {
    if (group_->tables[t].get() == &table && steps_[t] != 0 && steps_[t] != kForgotten) return false;
  }
  return true;
}

void Pass::forget(const Table& table) {
  auto* slots = static_cast<Slot*>(slots_.data());
  for (int64_t f = 0; f < group_->features(); ++f) {
    const int64_t t = group_->feature_tables[f];
    if (group_->tables[t].get() != &table) continue;
    std::fill(slots + batch_.offset(f * batch_.bags), slots + batch_.offset((f + 1) * batch_.bags), kNoSlot);
    steps_[t] = kForgotten;
  }
}

void Pass::pin(const Table& table, SlotSet& pinned) const {
  const auto* slots = static_cast<const Slot*>(slots_.data());
  for (int64_t f = 0; f < group_->features(); ++f) {
    if (group_->tables[group_->feature_tables[f]].get() != &table) continue;
    const int64_t begin = batch_.offset(f * batch_.bags);
    pinned.add(slots + begin, batch_.offset((f + 1) * batch_.bags) - begin);
  }
}

void Pass::moved(const Table& table, const std::vector<Move>& moves) noexcept {
  if (moves.empty()) return;
  auto* slots = static_cast<Slot*>(slots_.data());
  for (int64_t f = 0; f < group_->features(); ++f) {
    if (group_->tables[group_->feature_tables[f]].get() != &table) continue;
    for (int64_t p = batch_.offset(f * batch_.bags); p < batch_.offset((f + 1) * batch_.bags); ++p) {
      if (slots[p] < moves.front().from || slots[p] > moves.back().from) continue;
      const auto move = std::lower_bound(moves.begin(), moves.end(), Move{slots[p], kNoSlot});
      if (move->from == slots[p]) slots[p] = move->to;
    }
  }
}

// Called when the pass ends, so that its slots may be sorted: this finds each row once without further memory.
void Pass::settle_without_memory() noexcept {
  auto* slots = static_cast<Slot*>(slots_.data());
  for (size_t t = 0; t < steps_.size(); ++t) {
    Table& table = *group_->tables[t];
    if (steps_[t] == 0 || steps_[t] == kForgotten || !table.is_open()) continue;
    const Bounds& bounds = table.config().bounds;
    const auto range = [&](int64_t f) {
      return std::make_pair(slots + batch_.offset(f * batch_.bags), slots + batch_.offset((f + 1) * batch_.bags));
    };
    const auto is_of_table = [&](int64_t f) { return group_->feature_tables[f] == static_cast<int64_t>(t); };
    for (int64_t f = 0; f < group_->features(); ++f) {
      if (is_of_table(f)) std::sort(range(f).first, range(f).second);
    }
    for (int64_t f = 0; f < group_->features(); ++f) {
      if (!is_of_table(f)) continue;
      const auto [begin, end] = range(f);
      for (Slot* slot = begin; slot != end && *slot != kNoSlot; ++slot) {
        bool seen = slot != begin && slot[-1] == *slot;
        for (int64_t before = 0; before < f && !seen; ++before) {
          if (!is_of_table(before)) continue;
          const auto [first, last] = range(before);
          seen = std::binary_search(first, last, *slot);
        }
        if (seen) continue;
        table.before_change(*slot);
        RowMeta& meta = table.rows().meta(*slot);
        if (bounds.counts_apart()) {
          int64_t times = 0;
          for (int64_t of = f; of < group_->features(); ++of) {
            if (!is_of_table(of)) continue;
            const auto places = std::equal_range(range(of).first, range(of).second, *slot);
            times += places.second - places.first;
          }
          note_use(meta, steps_[t], static_cast<uint32_t>(times), bounds);
        } else {
          count_step(meta, steps_[t], static_cast<uint32_t>(bounds.half_life));
        }
        ++table.counters().lookups;
      }
    }
    steps_[t] = 0;
  }
}

void Pass::count(const Distinct& distinct) noexcept {
  for (size_t t = 0; t < distinct.size(); ++t) {
    if (distinct[t] == 0 || steps_[t] == 0) continue;
    group_->tables[t]->counters().lookups += distinct[t];
    steps_[t] = 0;
  }
}

void accumulated_backward(const std::vector<std::shared_ptr<Pass>>& passes, const std::vector<const float*>& grads,
                          const std::vector<float>& learning_rates, Executor& executor) {
  const std::shared_ptr<const Group> group = passes.front()->group_;
  const bool weighted =
      std::any_of(passes.begin(), passes.end(), [](const auto& pass) { return pass->batch_.weights != nullptr; });
  Batch merged;
  for (const auto& pass : passes) {
    if (pass->group_ != group) throw InvalidArgument("contexts must come from one group");
    // A pass without ids has neither weights nor ids that lack them, also if it was called with weights.
    const bool fits = pass->batch_.n_ids == 0 || (pass->batch_.weights != nullptr) == weighted;
    if (!fits) throw InvalidArgument("either all contexts or no context must have weights");
    merged.n_ids += pass->batch_.n_ids;
    merged.bags += pass->batch_.bags;
  }
  if (merged.n_ids >= int64_t{kNotFirst}) {
    throw InvalidArgument("accumulated batches hold at most 2**31 - 1 ids together");
  }
  const int64_t columns = group->columns();
  std::vector<Slot> slots;
  std::vector<int64_t> offsets{0};
  std::vector<float> weights, grad;
  std::vector<int64_t> ids;
  slots.reserve(static_cast<size_t>(merged.n_ids));
  offsets.reserve(static_cast<size_t>(merged.bags * group->features()) + 1);
  grad.reserve(static_cast<size_t>(merged.bags * columns));
  const auto locks = group->lock();
  for (int64_t f = 0; f < group->features(); ++f) {
    for (const auto& pass : passes) {
      const Batch& batch = pass->batch_;
      const auto* found = static_cast<const Slot*>(pass->slots_.data());
      const int64_t first = batch.offset(f * batch.bags), last = batch.offset((f + 1) * batch.bags);
      const int64_t shift = static_cast<int64_t>(slots.size()) - first;
      for (int64_t bag = f * batch.bags; bag < (f + 1) * batch.bags; ++bag) {
        offsets.push_back(batch.offset(bag + 1) + shift);
      }
      slots.insert(slots.end(), found + first, found + last);
      ids.insert(ids.end(), batch.ids + first, batch.ids + last);
      if (weighted) weights.insert(weights.end(), batch.weights + first, batch.weights + last);
    }
  }
  for (size_t p = 0; p < passes.size(); ++p) {
    grad.insert(grad.end(), grads[p], grads[p] + passes[p]->batch_.bags * columns);
  }
  merged.ids = ids.data();
  merged.offsets = offsets.data();
  merged.weights = weighted ? weights.data() : nullptr;
  // The bookkeeping records each pass as a step of its own.
  for (const auto& pass : passes) {
    for (const auto& table : group->tables) pass->settle(*table, executor);
  }
  const ClippedGradient clipped(*group, grad.data(), merged.bags, executor);
  Update({*group, merged, slots.data()}, clipped.data(), learning_rates, Steps(group->tables.size(), 0), executor)
      .run();
}

void update_rows(const Group& group, const Batch& batch, const float* grad, float learning_rate, Executor& executor) {
  const auto slots = BufferPool::instance().take(static_cast<size_t>(batch.n_ids) * sizeof(Slot));
  auto* slot_data = static_cast<Slot*>(slots.data());
  const auto locks = group.lock();
  const ClippedGradient clipped(group, grad, batch.bags, executor);
  Upsert rows(*group.tables[0], batch.ids, batch.n_ids, slot_data, executor, Arrival::kUpdate);
  Update update({group, batch, slot_data}, clipped.data(), {learning_rate}, Steps{0}, executor);
  rows.commit();
  update.run();
}

}  // namespace recstore
