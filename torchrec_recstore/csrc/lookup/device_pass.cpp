#include "lookup/device_pass.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace recstore {

DeviceSlots& device_slots(const Table& table) {
  table.check_open();
  if (table.device() == nullptr) throw InvalidArgument("table '" + table.config().name + "' has no device slots");
  return *table.device();
}

void stage_planned(const Table& table, float* out) {
  const ArenaLayout layout = ArenaLayout::of(table.config());
  const int64_t stride = layout.stride();
  for (const Slot slot : device_slots(table).planned().rows) {
    std::fill(out, out + stride, 0.0f);
    if (slot != kNoSlot) to_arena(layout, table.rows(), slot, out);
    out += stride;
  }
}

void land(Table& table, const float* rows, int64_t n) {
  DeviceSlots& device = device_slots(table);
  if (device.in_flight() != n) throw InvalidArgument(std::to_string(device.in_flight()) + " rows are in flight");
  const ArenaLayout layout = ArenaLayout::of(table.config());
  device.land([&](int64_t i, Slot slot) { from_arena(layout, rows + i * layout.stride(), table.rows(), slot); });
}

void settle_device_slots(Table& table, const int32_t* dirty, int64_t n, const float* rows) {
  DeviceSlots& device = device_slots(table);
  const auto is_wrong = [&](int32_t slot) { return slot < 0 || slot >= device.size(); };
  if (std::any_of(dirty, dirty + n, is_wrong)) throw InvalidArgument("a device slot is out of range");
  const ArenaLayout layout = ArenaLayout::of(table.config());
  const std::vector<DeviceSlots::DeviceSlot> slots(dirty, dirty + n);
  device.settled(slots,
                 [&](int64_t i, Slot slot) { from_arena(layout, rows + i * layout.stride(), table.rows(), slot); });
}

std::vector<DeviceSlots::Range> Pass::ranges(int64_t table) const {
  std::vector<DeviceSlots::Range> ranges;
  const auto* slots = static_cast<const Slot*>(slots_.data());
  for (int64_t f = 0; f < group_->features(); ++f) {
    if (group_->feature_tables[f] != table) continue;
    const int64_t begin = batch_.offset(f * batch_.bags);
    ranges.push_back({slots + begin, batch_.offset((f + 1) * batch_.bags) - begin});
  }
  return ranges;
}

bool Pass::plan_on_device(const std::vector<int64_t>& firsts, int32_t* out) {
  if (firsts.size() != table_count()) throw InvalidArgument("firsts must have one entry for each table");
  if (planned_) throw InvalidArgument("a pass is planned once");
  const auto locks = group_->lock();
  for (const auto& table : group_->tables) device_slots(*table);
  const auto* slots = static_cast<const Slot*>(slots_.data());
  if (std::find(slots, slots + batch_.n_ids, kNoSlot) != slots + batch_.n_ids) return false;
  planned_ = true;
  std::vector<std::vector<DeviceSlots::DeviceSlot>> distinct;
  size_t planned = 0;
  const auto abort = [&] {
    for (size_t t = 0; t < planned; ++t) group_->tables[t]->device()->abort();
  };
  try {
    for (; planned < table_count(); ++planned) {
      const Table& table = *group_->tables[planned];
      const auto now = static_cast<uint32_t>(table.clock());
      const auto half_life = static_cast<uint32_t>(table.config().bounds.half_life);
      const auto rank = [&](Slot slot) -> uint64_t { return aged_frequency(table.rows().meta(slot), now, half_life); };
      const auto of_table = ranges(static_cast<int64_t>(planned));
      if (!table.device()->plan(of_table, numbers_[planned], table.oldest_pass(), rank, table.rows().slots())) {
        abort();
        return false;
      }
      distinct.push_back(table.device()->planned().distinct);
    }
  } catch (...) {
    abort();
    throw;
  }
  for (int64_t f = 0; f < group_->features(); ++f) {
    const int64_t t = group_->feature_tables[f];
    const DeviceSlots& device = *group_->tables[t]->device();
    for (int64_t p = batch_.offset(f * batch_.bags); p < batch_.offset((f + 1) * batch_.bags); ++p) {
      out[p] = static_cast<int32_t>(firsts[t] + device.planned_slot(slots[p]));
    }
  }
  on_device_ = std::move(distinct);
  return true;
}

void Pass::plan_refresh() {
  const auto locks = group_->lock();
  try {
    for (size_t t = 0; t < on_device_.size(); ++t) group_->tables[t]->device()->plan_refresh(on_device_[t]);
  } catch (...) {
    for (const auto& table : group_->tables) table->device()->abort();
    throw;
  }
}

void Pass::commit_plan() {
  const auto locks = group_->lock();
  for (const auto& table : group_->tables) device_slots(*table).commit();
}

void Pass::abort_plan() noexcept {
  const auto locks = group_->lock_even_closed();
  for (const auto& table : group_->tables) {
    if (table->device() != nullptr) table->device()->abort();
  }
}

void Pass::updated_on_device(Executor& executor) {
  const auto locks = group_->lock();
  for (size_t t = 0; t < on_device_.size(); ++t) {
    Table& table = *group_->tables[t];
    table.device()->changed_on_device(on_device_[t], [&](Slot slot) { table.before_change(slot); });
    if (steps_[t] != kForgotten) table.count_update(static_cast<int64_t>(on_device_[t].size()), 0);
  }
  for (const auto& table : group_->tables) settle(*table, executor);
}

void Pass::read_on_host(float* out, Executor& executor) const { read_trained(*group_, batch_, out, executor); }

}  // namespace recstore
