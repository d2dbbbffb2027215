#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "cold_filter.h"
#include "config.h"
#include "executor.h"
#include "index.h"
#include "initializer.h"
#include "memory.h"
#include "rows.h"
#include "sightings.h"
#include "sets.h"

namespace recstore {

// Counted in distinct ids; TableStats in store/stats.py says what each means.
struct Counters {
  int64_t lookups = 0;
  int64_t misses = 0;
  int64_t inserts = 0;
  int64_t refused = 0;
  int64_t evicted = 0;
  int64_t expired = 0;
  int64_t cold_hits = 0;
  int64_t updates = 0;
  int64_t steps = 0;
};

class Table;

// A row lies in another slot now.
struct Move {
  Slot from;
  Slot to;
  bool operator<(const Move& other) const { return from < other.from; }
};

// A training forward whose backward has not run yet. Its slots are not reused until it ends.
class PendingPass {
 public:
  virtual ~PendingPass() = default;
  // Writes the bookkeeping of one of its tables, whose lock the caller holds, and counts the distinct
  // ids, if that has not been done.
  virtual void settle(const Table& table, Executor& executor) = 0;
  // The table, whose lock the caller holds, gets other rows: the pass has none of it any more.
  virtual void forget(const Table& table) = 0;
  // Adds the slots of the table, whose lock the caller holds, that the pass refers to.
  virtual void pin(const Table& table, SlotSet& pinned) const = 0;
  // Rows of the table, whose lock the caller holds, have moved. moves: by ascending `from`.
  virtual void moved(const Table& table, const std::vector<Move>& moves) noexcept = 0;
};

class Snapshot;
struct Leaver;

// One shard of one table: the rows of the ids that it has seen. The members below mutex() are for
// whoever holds it.
class Table {
 public:
  explicit Table(TableConfig config);

  const TableConfig& config() const { return config_; }
  std::mutex& mutex() { return mutex_; }

  // Frees the rows; any later use throws.
  void close();
  bool is_open() const { return open_; }
  void check_open() const;

  const Index& index() const { return index_; }
  Index& index() { return index_; }
  const Rows& rows() const { return rows_; }
  Rows& rows() { return rows_; }
  const Initializer& initializer() const { return initializer_; }
  Counters& counters() { return counters_; }
  // Updates of the table so far, one a backward whatever its ids: the clock of Adam's and LAMB's bias
  // correction, as FBGEMM's iter is. A checkpoint carries it.
  int64_t optimizer_steps() const { return optimizer_steps_; }
  void set_optimizer_steps(int64_t steps) { optimizer_steps_ = steps; }
  // Counts an update of `rows` rows.
  void count_update(int64_t rows) {
    counters_.updates += rows;
    ++optimizer_steps_;
  }
  int64_t size() const { return index_.size(); }
  int64_t bytes() const;
  // Of a row as it goes to a cold store: as it lies in memory, its RowMeta behind. Needs no lock.
  int64_t image_bytes() const { return image_bytes_; }
  // Training lookups so far: what last steps are told by.
  int64_t clock() const { return counters_.steps; }

  // Counts the sightings of ids that admission holds back; null where it holds none back.
  Sightings* sightings() { return sightings_ ? &*sightings_ : nullptr; }
  const Sightings* sightings() const { return sightings_ ? &*sightings_ : nullptr; }
  // Which ids may be in the cold store.
  ColdFilter& cold_filter() { return cold_filter_; }
  const ColdFilter& cold_filter() const { return cold_filter_; }

  // A row, which is there already, is about to change. Distinct slots may come in parallel.
  void before_change(Slot slot) {
    if (watched()) note_change(slot);
  }
  // Whether anybody wants to know what changes.
  bool watched() const { return snapshot_ != nullptr || rows_.changes().tracks(); }
  Snapshot* snapshot() const { return snapshot_; }
  void set_snapshot(Snapshot* snapshot) { snapshot_ = snapshot; }
  // Exchanges rows, their changes and the clocks with another table of the same shape, without touching the rows.
  // The caller holds both locks. Throws InvalidArgument where the shapes differ or there is a snapshot, OutOfMemory.
  void exchange_rows(Table& other);

  // Removes ids (n,); returns how many had a row. Throws std::bad_alloc, and has removed nothing then.
  int64_t remove(const int64_t* ids, int64_t n);
  // Makes room for `rows` rows to leave. Throws std::bad_alloc.
  void reserve_leave(int64_t rows);
  // Removes rows that no pending pass refers to; the slots of the first `reused` of them are new rows' already.
  void leave(const std::vector<Leaver>& rows, int64_t reused = 0) noexcept;
  // Whether slots of rows that leave can be handed out at once.
  bool slots_are_free_at_once() const { return snapshot_ == nullptr && !rows_.is_compacting(); }
  // Gives memory back where more slots are free than hold a row, piece by piece: a call looks at some thousand entries of
  // the index, and at more where `rows` have just left. Rows may move then. Not while a snapshot is read.
  void give_memory_back(int64_t rows = 0) noexcept {
    if (rows_.wants_compaction()) compact(rows);
  }
  // The ids that have a row, ascending. out: (size(),)
  void ids(int64_t* out) const;

  // Starts a step's bookkeeping: returns its number, from 1.
  uint32_t begin_step();
  // Makes room for a call of begin_pass(). Throws std::bad_alloc.
  void reserve_pass() { reserve_more(pending_, 1); }
  // A pass is numbered when it begins; slots freed from then on wait for its end.
  uint64_t begin_pass(PendingPass* pass) noexcept;
  void end_pass(uint64_t number) noexcept;
  void settle_passes(Executor& executor);
  template <class Visit>  // visit(pass)
  void for_each_pass(const Visit& visit) const {
    for (const Numbered& numbered : pending_) visit(*numbered.pass);
  }

 private:
  void note_change(Slot slot);
  void compact(int64_t rows) noexcept;
  uint64_t oldest_pass() const { return pending_.empty() ? next_pass_ : pending_.front().number; }

  struct Numbered {
    uint64_t number;
    PendingPass* pass;
  };

  TableConfig config_;
  std::mutex mutex_;
  bool open_ = true;
  Index index_;
  Rows rows_;
  const int64_t image_bytes_;  // those of rows_, which another thread may be exchanging
  Initializer initializer_;
  Counters counters_;
  int64_t optimizer_steps_ = 0;
  std::optional<Sightings> sightings_;
  ColdFilter cold_filter_;
  Snapshot* snapshot_ = nullptr;
  uint32_t next_segment_ = 0;  // of the index: where compaction goes on
  uint64_t next_pass_ = 1;
  std::vector<Numbered> pending_;  // number ascends
};

// An open table, locked for as long as this object lives.
class LockedTable {
 public:
  // Throws InvalidArgument if the table is closed.
  explicit LockedTable(std::shared_ptr<Table> table) : table_(std::move(table)), lock_(table_->mutex()) { table_->check_open(); }

  Table& operator*() const { return *table_; }
  Table* operator->() const { return table_.get(); }

 private:
  std::shared_ptr<Table> table_;
  std::lock_guard<std::mutex> lock_;
};

}  // namespace recstore
