#include "rows/table.h"

#include <algorithm>
#include <random>
#include <utility>

#include "base/error.h"
#include "base/parts.h"
#include "bounds/eviction.h"
#include "snapshot/snapshot.h"

namespace recstore {
namespace {

constexpr int64_t kAhead = 8;              // entries of the index that are prefetched ahead
constexpr int64_t kTaskLeavers = 1024;     // about the least number of rows that leave in a task
constexpr int64_t kLeastEntries = 16384;   // entries that a call of compact() visits at least
constexpr int64_t kStepEntries = 256;      // entries that it visits between two looks at the room
constexpr int64_t kEntriesForRow = 32;     // entries that it visits for each row that has just been removed
constexpr int64_t kLeastBytes = 64 << 20;  // memory that it returns at most, unless many rows have just been removed

uint64_t random_salt() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

Table::Table(TableConfig config)
    : config_(std::move(config)),
      index_(random_salt()),
      rows_(config_),
      image_bytes_(rows_.image_bytes() + (images_have_marks() ? static_cast<int64_t>(sizeof(uint32_t)) : 0)),
      initializer_(config_),
      cold_filter_(config_.bounds.max_rows) {
  if (config_.bounds.expiry_time > 0) wall_clock_.emplace(config_.bounds.expiry_time, config_.bounds.max_jump);
  if (config_.bounds.min_frequency > 1) sightings_.emplace(config_.bounds.counter_bytes);
}

void Table::close() {
  if (!open_) return;
  index_.clear();
  rows_.clear();
  sightings_.reset();
  cold_filter_.clear();
  departures_.reset();
  evictions_.reset();
  if (device_ != nullptr) device_->clear();
  open_ = false;
}

void Table::check_open() const {
  if (!open_) throw InvalidArgument("table '" + config_.name + "' is closed");
}

void Table::make_device_slots(int64_t slots) {
  if (device_ != nullptr) throw InvalidArgument("table '" + config_.name + "' has device slots already");
  if (slots < 1 || slots > DeviceSlots::kMost) throw InvalidArgument("device slots must be from 1 to 2**30");
  device_ = std::make_unique<DeviceSlots>(slots);
}

void Table::reserve(int64_t rows) {
  if (config_.bounds.max_rows > 0) rows = std::min(rows, config_.bounds.max_rows);
  if (rows <= size()) return;
  rows_.check_room(rows);
  index_.grow_for(rows - size());
}

int64_t Table::remove(const int64_t* ids, int64_t n) {
  reserve_leave(n);
  if (!pending_.empty()) rows_.reserve_give_back(n);
  int64_t removed = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Slot slot = index_.erase(ids[i]);
    if (slot == kNoSlot) continue;
    vacate(slot);
    if (pending_.empty()) {
      rows_.give_back_now(slot);
    } else {
      rows_.give_back(slot, next_pass_ - 1);
    }
    if (rows_.changes().tracks()) rows_.changes().left(ids[i], index_.size());
    if (departures_) departures_->add(ids[i]);
    if (snapshot_ != nullptr) snapshot_->removed(ids[i], slot);
    ++removed;
  }
  rows_.reclaim(oldest_pass());
  give_memory_back(removed);
  return removed;
}

void Table::compact(int64_t rows) noexcept {
  if (snapshot_ != nullptr) return;  // a snapshot finds rows by their slots
  const int64_t steps = std::max(kLeastEntries, rows * kEntriesForRow) / kStepEntries;
  const int64_t bytes = std::max(kLeastBytes, 2 * rows * rows_.row_bytes());
  if (!rows_.is_compacting()) {
    next_position_ = 0;
    if (!rows_.begin_compaction()) return rows_.give_memory_back(bytes);
  }
  std::vector<Move> moves;
  try {
    for (int64_t s = 0; s < steps && rows_.has_room_below() && next_position_ < Index::kPositions; ++s) {
      const uint64_t end = std::min(Index::kPositions, next_position_ + index_.positions(kStepEntries));
      size_t entries = 0;
      index_.for_each(next_position_, end, [&](int64_t, Slot) { ++entries; });
      reserve_more(moves, entries);
      index_.map_slots(next_position_, end, [&](Slot slot) {
        if (int64_t{slot} < rows_.limit() || !rows_.has_room_below()) return slot;
        moves.push_back({slot, rows_.move(slot)});
        return moves.back().to;
      });
      next_position_ = end;
    }
  } catch (const std::bad_alloc&) {  // a later call continues
  }
  std::sort(moves.begin(), moves.end());
  for (const Move& move : moves) {
    vacated_.add(move.from);
    if (device_ != nullptr) device_->moved(move.from, move.to);
  }
  for (const Numbered& numbered : pending_) numbered.pass->moved(*this, moves);
  // Start again at the first position: some rows found no room below the limit, or some slots wait for a pass.
  if (!rows_.finish_compaction() && next_position_ >= Index::kPositions) next_position_ = 0;
  rows_.give_memory_back(bytes);
}

void Table::shrink() noexcept {
  if (snapshot_ != nullptr || !pending_.empty()) return;
  // A compaction that is under way has another limit, so a tight one follows it. The first may need a second walk, from
  // the first position. Without memory for the moves, a later call continues.
  for (int walk = 0; walk < 3; ++walk) {
    if (!rows_.is_compacting()) next_position_ = 0;
    if (!rows_.begin_compaction(true)) return;
    compact(std::max(rows_.slots(), index_.size()));
  }
}

void Table::reserve_leave(int64_t rows) {
  if (rows_.changes().tracks()) rows_.changes().reserve_left(rows);
  if (departures_) departures_->reserve(rows);
  if (snapshot_ == nullptr) return;
  snapshot_->reserve_removed(rows);
  rows_.reserve_give_back(rows);
}

void Table::leave(std::vector<Leaver>& rows, int64_t reused, Executor& executor, bool to_cold_store) noexcept {
  if (rows.empty()) return;
  const auto begins = part_begins<Index::kParts>(rows.size(), [&](size_t i) { return index_.part_of_id(rows[i].id); });
  const int64_t tasks = std::min<int64_t>(Index::kParts, 1 + static_cast<int64_t>(rows.size()) / kTaskLeavers);
  for_each_task(executor, tasks, [&](int64_t task) {
    for (size_t i = begins[task * Index::kParts / tasks], end = begins[(task + 1) * Index::kParts / tasks]; i < end;
         ++i) {
      if (i + kAhead < end) index_.prefetch(index_.hash(rows[i + kAhead].id));
      rows[i].is_in_index = !index_.erase_within_part(rows[i].id, index_.hash(rows[i].id));
    }
  });
  const auto n = static_cast<int64_t>(rows.size());
  index_.inserted(std::count_if(rows.begin(), rows.end(), [](const Leaver& row) { return row.is_in_index; }) - n);
  for (int64_t i = 0; i < n; ++i) {
    const Leaver& row = rows[i];
    if (row.is_in_index) index_.erase(row.id);
    vacate(row.slot);
    if (rows_.changes().tracks()) rows_.changes().left(row.id, index_.size());
    if (departures_ && !to_cold_store) departures_->add(row.id);
    if (snapshot_ != nullptr && snapshot_->removed(row.id, row.slot)) {
      rows_.give_back(row.slot, next_pass_ - 1);
    } else if (i >= reused) {
      rows_.give_back_now(row.slot);
    }
  }
}

int64_t Table::bytes() const {
  const int64_t counted = (sightings_ ? sightings_->bytes() : 0) + (departures_ ? departures_->bytes() : 0);
  const int64_t of_device_slots = device_ != nullptr ? device_->bytes() : 0;
  return rows_.bytes() + index_.bytes() + cold_filter_.bytes() + counted + of_device_slots;
}

void Table::note_change(Slot slot) {
  if (rows_.changes().tracks()) rows_.changes().touch(slot);
  if (snapshot_ != nullptr) snapshot_->keep(slot);
}

void Table::exchange_rows(Table& other) {
  if (config_.column_begin != other.config_.column_begin || config_.column_end != other.config_.column_end ||
      config_.row_type != other.config_.row_type || config_.state_type != other.config_.state_type ||
      config_.optimizer.kind != other.config_.optimizer.kind ||
      config_.optimizer.element_states() != other.config_.optimizer.element_states()) {
    throw InvalidArgument("the tables have different shapes");
  }
  if (!(config_.bounds == other.config_.bounds)) throw InvalidArgument("the tables have different bounds");
  for (Table* table : {this, &other}) {
    if (table->snapshot_ != nullptr) throw InvalidArgument("the table is being saved: wait until the save has ended");
  }
  // A mark of one table must not be used as a mark of the other table.
  const Changes::Mark last = std::max(rows_.changes().last_mark(), other.rows_.changes().last_mark());
  SerialExecutor serial;
  for (Table* table : {this, &other}) {
    table->settle_passes(serial);
    if (last > 0) table->rows_.changes().reserve(table->rows_.slots());
  }
  for (Table* table : {this, &other}) {
    for (const Numbered& numbered : table->pending_) numbered.pass->forget(*table);
    table->rows_.reclaim(table->next_pass_);
  }
  std::swap(index_, other.index_);
  std::swap(rows_, other.rows_);
  std::swap(optimizer_steps_, other.optimizer_steps_);
  std::swap(counters_.steps, other.counters_.steps);
  std::swap(sightings_, other.sightings_);
  if (wall_clock_) wall_clock_->exchange(*other.wall_clock_);
  std::swap(cold_filter_, other.cold_filter_);
  next_position_ = other.next_position_ = 0;
  for (Table* table : {this, &other}) {
    table->evictions_.reset();
    table->rows_.changes().restart(last);
    table->vacated_.add_all();
    if (table->device_ != nullptr) table->device_->clear();
  }
}

void Table::ids(int64_t* out) const {
  index_.for_each([&](int64_t id, Slot) { *out++ = id; });
}

void Table::set_clock(int64_t steps) noexcept {
  counters_.steps = steps;
  evictions_.reset();
  if (wall_clock_) wall_clock_->set_steps(steps);
}

uint32_t Table::begin_step() { return static_cast<uint32_t>(++counters_.steps); }

uint64_t Table::begin_pass(PendingPass* pass) noexcept {
  pending_.push_back({next_pass_, pass});
  return next_pass_++;
}

void Table::end_pass(uint64_t number) noexcept {
  const auto ended =
      std::lower_bound(pending_.begin(), pending_.end(), number,
                       [](const Numbered& numbered, uint64_t wanted) { return numbered.number < wanted; });
  pending_.erase(ended);
  rows_.reclaim(oldest_pass());
}

void Table::settle_passes(Executor& executor) {
  for (const Numbered& numbered : pending_) numbered.pass->settle(*this, executor);
}

bool Table::passes_are_settled() const {
  return std::all_of(pending_.begin(), pending_.end(),
                     [&](const Numbered& numbered) { return numbered.pass->is_settled(*this); });
}

SharedTable::SharedTable(std::shared_ptr<Table> table, Executor& executor) : SharedTable(std::move(table)) {
  if (table_->passes_are_settled()) return;
  lock_.unlock();
  table_->mutex().lock_shared_after([&] {
    table_->check_open();
    table_->settle_passes(executor);
  });
  lock_ = std::shared_lock<TableMutex>(table_->mutex(), std::adopt_lock);
}

}  // namespace recstore
