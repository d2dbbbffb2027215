#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "base/executor.h"
#include "base/memory.h"
#include "bounds/eviction_queue.h"
#include "bounds/sightings.h"
#include "bounds/wall_clock.h"
#include "cold/cold_filter.h"
#include "index/index.h"
#include "index/sets.h"
#include "lookup/vacated.h"
#include "rows/config.h"
#include "rows/device_slots.h"
#include "rows/initializer.h"
#include "rows/rows.h"
#include "rows/table_mutex.h"
#include "snapshot/departures.h"

namespace recstore {

// Counts of distinct ids; TableStats of torchrec_recstore.store explains them.
struct Counters {
  int64_t lookups = 0;
  int64_t misses = 0;
  int64_t inserts = 0;
  int64_t refused = 0;
  int64_t evicted = 0;
  int64_t expired = 0;
  int64_t cold_hits = 0;
  int64_t updates = 0;
  int64_t nonfinite = 0;
  int64_t steps = 0;
};

class Table;

// A row has moved from one slot to another.
struct Move {
  Slot from;
  Slot to;
  bool operator<(const Move& other) const { return from < other.from; }
};

// A training forward whose backward has not run. Its slots are not reused until it ends. For all functions, the caller
// holds the lock of the table.
class PendingPass {
 public:
  virtual ~PendingPass() = default;
  // Records the step in the bookkeeping of the table and counts the distinct ids, if this has not been done.
  virtual void settle(const Table& table, Executor& executor) = 0;
  // Forgets the slots of the table, because the table gets other rows.
  virtual void forget(const Table& table) = 0;
  // Adds the slots of the table that the pass refers to.
  virtual void pin(const Table& table, SlotSet& pinned) const = 0;
  // Whether settle() has nothing to do. A caller that shares the lock may call it.
  virtual bool is_settled(const Table& table) const = 0;
  // Replaces the slots of rows that have moved. moves: in ascending order of `from`.
  virtual void moved(const Table& table, const std::vector<Move>& moves) noexcept = 0;
};

class Snapshot;
struct Leaver;

// One shard of one table: the rows of the ids that it has seen. The caller of any function below mutex() holds the
// mutex, unless the function says otherwise: a caller of const functions alone shares it, any other holds it alone.
class Table {
 public:
  explicit Table(TableConfig config);

  const TableConfig& config() const { return config_; }
  TableMutex& mutex() { return mutex_; }

  // Frees the rows. Later calls throw InvalidArgument.
  void close();
  bool is_open() const { return open_; }
  void check_open() const;

  const Index& index() const { return index_; }
  Index& index() { return index_; }
  const Rows& rows() const { return rows_; }
  Rows& rows() { return rows_; }
  const Initializer& initializer() const { return initializer_; }
  const Counters& counters() const { return counters_; }
  Counters& counters() { return counters_; }
  // Number of updates of the table; each backward is one update. It is the clock of the bias correction of Adam and
  // LAMB, like FBGEMM's iter, and a checkpoint contains it.
  int64_t optimizer_steps() const { return optimizer_steps_; }
  void set_optimizer_steps(int64_t steps) { optimizer_steps_ = steps; }
  // Counts an update of `rows` rows, of which `nonfinite` were left as they are.
  void count_update(int64_t rows, int64_t nonfinite) {
    counters_.updates += rows - nonfinite;
    counters_.nonfinite += nonfinite;
    ++optimizer_steps_;
  }
  int64_t size() const { return index_.size(); }
  int64_t bytes() const;
  // Bytes of a row in a cold store: the layout in memory, followed by the RowAside. If the images have marks, the mark
  // after which the row has changed last lies before the RowMeta (uint32). Needs no lock.
  int64_t image_bytes() const { return image_bytes_; }
  // Whether images have marks. Those of a shared cold store have none, because the marks of a table mean nothing to
  // others.
  bool images_have_marks() const { return config_.bounds.cold_store && !config_.bounds.shared; }
  // Number of training lookups, which is the clock of the rows' last steps.
  int64_t clock() const { return counters_.steps; }
  void set_clock(int64_t steps) noexcept;

  // The counts of ids that admission refuses; null if the table has no admission.
  Sightings* sightings() { return sightings_ ? &*sightings_ : nullptr; }
  const Sightings* sightings() const { return sightings_ ? &*sightings_ : nullptr; }
  // The clock by which rows expire; null if rows do not expire after a time.
  WallClock* wall_clock() { return wall_clock_ ? &*wall_clock_ : nullptr; }
  const WallClock* wall_clock() const { return wall_clock_ ? &*wall_clock_ : nullptr; }
  // Tells which ids may be in the cold store.
  ColdFilter& cold_filter() { return cold_filter_; }
  const ColdFilter& cold_filter() const { return cold_filter_; }

  EvictionQueue& evictions() { return evictions_; }
  // Begins to record which rows leave for good, up to this number of ids.
  void record_departures(int64_t most) { departures_.emplace(most); }
  // nullptr if departures are not recorded.
  Departures* departures() { return departures_ ? &*departures_ : nullptr; }
  // Gives the table this number of device slots. It has none at first. Throws InvalidArgument if it has some already.
  void make_device_slots(int64_t slots);
  // nullptr if the table has no device slots.
  DeviceSlots* device() const { return device_.get(); }
  // The slots that rows have left, for slots that were resolved ahead.
  Vacated& vacated() { return vacated_; }
  const Vacated& vacated() const { return vacated_; }

  // Call this before an existing row changes. Calls for distinct slots may run in parallel.
  void before_change(Slot slot) {
    if (watched()) note_change(slot);
  }
  // Call this instead before the weights or the states of an existing row change, and not its bookkeeping alone.
  void before_write(Slot slot) {
    before_change(slot);
    if (device_ != nullptr) device_->wrote(slot);
  }
  bool notes_writes() const { return watched() || device_ != nullptr; }
  // Whether a snapshot or a mark needs to know which rows change.
  bool watched() const { return snapshot_ != nullptr || rows_.changes().tracks(); }
  Snapshot* snapshot() const { return snapshot_; }
  void set_snapshot(Snapshot* snapshot) { snapshot_ = snapshot; }
  // Exchanges the rows, their changes and the clocks with another table of the same shape, without touching the rows.
  // The caller holds both locks. Throws InvalidArgument if the shapes differ or a table has a snapshot, OutOfMemory.
  void exchange_rows(Table& other);

  // Grows the index for `rows` rows in all, at most max_rows, so that no entries move while they arrive. The memory of
  // the rows grows with them, and is checked then. Throws OutOfMemory if the rows cannot fit now.
  void reserve(int64_t rows);
  // Removes the rows of ids (n,). Returns the number of removed rows. Throws std::bad_alloc; nothing is removed then.
  int64_t remove(const int64_t* ids, int64_t n);
  // Makes room for leave() with `rows` rows. Throws std::bad_alloc.
  void reserve_leave(int64_t rows);
  // Removes rows that no pending pass refers to. They are by the parts of the index, unless the executor has one
  // thread. The slots of the first `reused` rows already belong to new rows. to_cold_store: the rows are in the cold
  // store, so that they do not leave for good.
  void leave(std::vector<Leaver>& rows, int64_t reused, Executor& executor, bool to_cold_store = false) noexcept;
  // Whether the slots of removed rows can be reused at once.
  bool slots_are_free_at_once() const { return snapshot_ == nullptr && !rows_.is_compacting(); }
  // Returns memory to the system if more slots are free than in use. Each call does a part of the work: it visits some
  // thousand entries of the index, and more if `rows` rows have just been removed. Rows may move. Nothing happens while
  // the table has a snapshot.
  void give_memory_back(int64_t rows = 0) noexcept {
    if (rows_.wants_compaction()) compact(rows);
  }
  // Returns the memory of all free slots to the system, but for about a huge page. Rows may move. The call walks over
  // the index. Nothing happens while the table has a snapshot or a pass is pending.
  void shrink() noexcept;
  // Writes the ids that have a row, in any order. out: (size(),).
  void ids(int64_t* out) const;

  // Begins a step and returns its number; the first step has the number 1.
  uint32_t begin_step();
  // Makes room for a call of begin_pass(). Throws std::bad_alloc.
  void reserve_pass() { reserve_more(pending_, 1); }
  // Begins a pass and returns its number. Slots that are freed afterwards wait for its end.
  uint64_t begin_pass(PendingPass* pass) noexcept;
  // Returns the number of a pass that does not begin: it lies between those of the passes before and after the call.
  uint64_t take_pass_number() noexcept { return next_pass_++; }
  void end_pass(uint64_t number) noexcept;
  // The number of the oldest pending pass, or of the next one.
  uint64_t oldest_pass() const { return pending_.empty() ? next_pass_ : pending_.front().number; }
  void settle_passes(Executor& executor);
  bool passes_are_settled() const;
  template <class Visit>  // visit(pass)
  void for_each_pass(const Visit& visit) const {
    for (const Numbered& numbered : pending_) visit(*numbered.pass);
  }

 private:
  void note_change(Slot slot);
  void vacate(Slot slot) noexcept {
    vacated_.add(slot);
    if (device_ != nullptr) device_->left(slot);
  }
  void compact(int64_t rows) noexcept;
  struct Numbered {
    uint64_t number;
    PendingPass* pass;
  };

  TableConfig config_;
  TableMutex mutex_;
  bool open_ = true;
  Index index_;
  Rows rows_;
  const int64_t image_bytes_;  // a copy, because another thread may be exchanging rows_
  Initializer initializer_;
  Counters counters_;
  int64_t optimizer_steps_ = 0;
  std::optional<Sightings> sightings_;
  std::optional<WallClock> wall_clock_;
  ColdFilter cold_filter_;
  std::optional<Departures> departures_;
  Snapshot* snapshot_ = nullptr;
  EvictionQueue evictions_;
  Vacated vacated_;
  std::unique_ptr<DeviceSlots> device_;
  uint64_t next_position_ = 0;  // the position in the index at which compaction continues
  uint64_t next_pass_ = 1;
  std::vector<Numbered> pending_;  // number ascends
};

// An open table that this object holds alone for as long as it lives: for a call that changes the table.
class LockedTable {
 public:
  // Throws InvalidArgument if the table is closed.
  explicit LockedTable(std::shared_ptr<Table> table) : table_(std::move(table)), lock_(table_->mutex()) {
    table_->check_open();
  }

  Table& operator*() const { return *table_; }
  Table* operator->() const { return table_.get(); }

 private:
  std::shared_ptr<Table> table_;
  std::lock_guard<TableMutex> lock_;
};

// An open table that this object shares with other readers for as long as it lives: for a call that changes nothing.
class SharedTable {
 public:
  // Throws InvalidArgument if the table is closed.
  explicit SharedTable(std::shared_ptr<Table> table) : table_(std::move(table)), lock_(table_->mutex()) {
    table_->check_open();
  }
  // Settles the pending passes first (see Table::settle_passes), for a call that reads the bookkeeping of the rows.
  SharedTable(std::shared_ptr<Table> table, Executor& executor);

  const Table& operator*() const { return *table_; }
  const Table* operator->() const { return table_.get(); }

 private:
  std::shared_ptr<Table> table_;
  std::shared_lock<TableMutex> lock_;
};

}  // namespace recstore
