#include "lookup/device_pass.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "lookup/find.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

constexpr int64_t kMetaAhead = 48;  // rows whose bookkeeping is prefetched
constexpr int64_t kRowsAhead = 8;   // rows that are prefetched while those before are copied

}  // namespace

DeviceSlots& device_slots(const Table& table) {
  table.check_open();
  if (table.device() == nullptr) throw InvalidArgument("table '" + table.config().name + "' has no device slots");
  return *table.device();
}

DeviceSlots::Frequencies frequencies_in(const Table& table) {
  const auto read = [&table](const Slot* slots, int64_t n, uint32_t* frequencies) {
    const Rows& rows = table.rows();
    const auto now = static_cast<uint32_t>(table.clock());
    const auto half_life = static_cast<uint32_t>(table.config().bounds.half_life);
    const auto prefetch = [&](int64_t i) RECSTORE_PREFETCHES {
      if (i < n && slots[i] != kNoSlot) __builtin_prefetch(&rows.meta(slots[i]));
    };
    for (int64_t i = 0; i < kMetaAhead; ++i) prefetch(i);
    for (int64_t i = 0; i < n; ++i) {
      prefetch(i + kMetaAhead);
      frequencies[i] = slots[i] == kNoSlot ? 0 : aged_frequency(rows.meta(slots[i]), now, half_life);
    }
  };
  const Bounds& bounds = table.config().bounds;
  return {read, bounds.half_life == 0 && bounds.eviction != Eviction::kLeastScored};
}

void stage_planned(const Table& table, int64_t begin, int64_t end, float* out) {
  const ArenaLayout layout = ArenaLayout::of(table.config());
  const int64_t stride = layout.stride();
  const std::vector<Slot>& rows = device_slots(table).planned().rows;
  const auto prefetch = [&](int64_t i) RECSTORE_PREFETCHES {
    if (i < end && rows[i] != kNoSlot) table.rows().prefetch(rows[i]);
  };
  for (int64_t i = begin; i < begin + kRowsAhead; ++i) prefetch(i);
  for (int64_t i = begin; i < end; ++i, out += stride) {
    prefetch(i + kRowsAhead);
    if (rows[i] != kNoSlot) {
      to_arena(layout, table.rows(), rows[i], out);
    } else {
      std::fill(out, out + stride, 0.0f);
    }
  }
}

void land(Table& table, const float* rows, int64_t n) {
  DeviceSlots& device = device_slots(table);
  if (device.in_flight() != n) throw InvalidArgument(std::to_string(device.in_flight()) + " rows are in flight");
  const ArenaLayout layout = ArenaLayout::of(table.config());
  const int64_t stride = layout.stride();
  device.land([&](Slot slot) RECSTORE_PREFETCHES { table.rows().prefetch(slot); },
              [&](int64_t i, Slot slot) { from_arena(layout, rows + i * stride, table.rows(), slot); });
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

int32_t StagedRows::number(int64_t id, Slot slot) {
  const auto [found, is_new] = rows_.emplace(id, first_ + static_cast<int64_t>(ids_.size()));
  if (is_new) {
    ids_.push_back(id);
    slots_.push_back(slot);
  }
  return static_cast<int32_t>(-2 - found->second);
}

void find_on_device(const Table& table, const int64_t* ids, int64_t n, int64_t first, bool stages_missing,
                    StagedRows& staged, int32_t* out, Executor& executor) {
  const DeviceSlots& device = device_slots(table);
  if (device.in_flight() > 0) throw InvalidArgument("rows are in flight to the host: land them before a lookup");
  std::vector<Slot> slots(static_cast<size_t>(n));
  find(table, ids, n, slots.data(), executor);
  stages_missing = stages_missing || table.config().missing_reads_init;
  for (int64_t p = 0; p < n; ++p) {
    const Slot slot = slots[static_cast<size_t>(p)];
    if (slot == kNoSlot) {
      out[p] = stages_missing ? staged.number(ids[p], kNoSlot) : -1;
      continue;
    }
    const DeviceSlots::DeviceSlot on_device = device.device_slot(slot);
    const bool is_read_there = on_device != DeviceSlots::kNone && device.is_readable(on_device);
    out[p] = is_read_there ? static_cast<int32_t>(first + on_device) : staged.number(ids[p], slot);
  }
}

void stage_rows(const Table& table, const int64_t* slots, const int64_t* ids, int64_t n, bool initial,
                const RowsElsewhere& elsewhere, float* out) {
  const ArenaLayout layout = ArenaLayout::of(table.config());
  const auto weight_bytes = static_cast<size_t>(weight_floats(layout.row_type, layout.columns)) * sizeof(float);
  for (int64_t i = 0; i < n; ++i, out += layout.stride()) {
    if (slots[i] != kNoSlot) {
      to_arena(layout, table.rows(), static_cast<Slot>(slots[i]), out);
      continue;
    }
    std::fill(out, out + layout.stride(), 0.0f);
    if (const char* row = elsewhere.find(ids[i]); row != nullptr) {
      std::memcpy(out, row, weight_bytes);
    } else if (initial || table.config().missing_reads_init) {
      table.initializer().fill(ids[i], out);
    }
  }
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

bool Pass::plan_on_device(const std::vector<int64_t>& firsts, const std::vector<int64_t>& arenas,
                          std::vector<int64_t>& staged, int32_t* out, Executor& executor) {
  if (firsts.size() != table_count() || arenas.size() != table_count()) {
    throw InvalidArgument("firsts and arenas must have one entry for each table");
  }
  if (planned_) throw InvalidArgument("a pass is planned once");
  const auto locks = group_->lock();
  for (const auto& table : group_->tables) device_slots(*table);
  planned_ = true;
  std::vector<std::vector<DeviceSlots::DeviceSlot>> distinct(table_count());
  std::vector<std::vector<int64_t>> refused(table_count());
  std::vector<int64_t> staged_now = staged;
  std::atomic<bool> has_room{true};
  const auto abort = [&] {
    for (const auto& table : group_->tables) table->device()->abort();
  };
  try {
    for_each_task(executor, static_cast<int64_t>(table_count()), [&](int64_t t) {
      if (!has_room) return;
      const Table& table = *group_->tables[t];
      DeviceSlots& device = *table.device();
      const int64_t host_slots = table.rows().slots();
      if (!device.plan(ranges(t), numbers_[t], table.oldest_pass(), frequencies_in(table), host_slots)) {
        has_room = false;
        return;
      }
      distinct[t] = device.planned().distinct;
      refused[t] = number_positions(t, firsts[t], out);
    });
  } catch (...) {
    abort();
    throw;
  }
  if (!has_room) {
    abort();
    return false;
  }
  for (size_t t = 0; t < table_count(); ++t) {
    int64_t& rows_before = staged_now[arenas[t]];
    if (!refused[t].empty()) move_staged_numbers(static_cast<int64_t>(t), rows_before, out);
    rows_before += static_cast<int64_t>(refused[t].size());
  }
  on_device_ = std::move(distinct);
  refused_ids_ = std::move(refused);
  staged = std::move(staged_now);
  return true;
}

std::vector<int64_t> Pass::number_positions(int64_t table, int64_t first, int32_t* out) const {
  const DeviceSlots& device = *group_->tables[table]->device();
  StagedRows refused(0);
  int64_t position = 0;
  for_each_position(table, [&](int64_t p) {
    const DeviceSlots::DeviceSlot slot = device.planned_slot(position++);
    if (slot != DeviceSlots::kNone) {
      out[p] = static_cast<int32_t>(first + slot);
    } else {
      out[p] = refused.number(group_->routings[table].raw_id(batch_.ids[p]), kNoSlot);
    }
  });
  return refused.ids();
}

void Pass::move_staged_numbers(int64_t table, int64_t rows_before, int32_t* out) const {
  for_each_position(table, [&](int64_t p) {
    if (out[p] < -1) out[p] -= static_cast<int32_t>(rows_before);
  });
}

std::vector<bool> Pass::plan_refresh(Executor& executor) {
  const auto locks = group_->lock();
  try {
    for_each_task(executor, static_cast<int64_t>(on_device_.size()),
                  [&](int64_t t) { group_->tables[t]->device()->plan_refresh(on_device_[t]); });
  } catch (...) {
    for (const auto& table : group_->tables) table->device()->abort();
    throw;
  }
  std::vector<bool> counts;
  for (const uint32_t step : steps_) counts.push_back(step != kForgotten);
  return counts;
}

void Pass::updated_on_device(Executor& executor) {
  const auto locks = group_->lock();
  Steps counted_apart(steps_.size(), 0);
  for_each_task(executor, static_cast<int64_t>(on_device_.size()), [&](int64_t t) {
    const uint32_t step = steps_[t] == kForgotten ? 0 : steps_[t];
    if (step != 0 && group_->tables[t]->config().bounds.counts_apart()) counted_apart[t] = step;
    mark_updated(t, counted_apart[t] == 0 ? step : 0);
  });
  // Of all tables at once: a call for each of them would group the batch again and again.
  if (std::any_of(counted_apart.begin(), counted_apart.end(), [](uint32_t step) { return step != 0; })) {
    count(record_step(resolved(), counted_apart, executor));
  }
}

void Pass::mark_updated(int64_t t, uint32_t step) {
  Table& table = *group_->tables[t];
  const Rows& rows = table.rows();
  const auto half_life = static_cast<uint32_t>(table.config().bounds.half_life);
  const auto distinct = static_cast<int64_t>(on_device_[t].size());
  table.device()->changed_on_device(
      on_device_[t], [&](Slot slot) RECSTORE_PREFETCHES { __builtin_prefetch(&rows.meta(slot), 1); },
      [&](Slot slot) {
        table.before_change(slot);
        if (step != 0) count_step(rows.meta(slot), step, half_life);
      });
  if (steps_[t] != kForgotten) table.count_update(distinct, 0);
  if (step == 0) return;
  table.counters().lookups += distinct;
  steps_[t] = 0;
}

void Pass::read_on_host(float* out, Executor& executor) const { read_trained(*group_, batch_, out, executor); }

}  // namespace recstore
