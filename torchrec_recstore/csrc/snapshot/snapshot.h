#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/executor.h"
#include "base/memory.h"
#include "rows/table.h"
#include "rows/transfer.h"
#include "snapshot/changes.h"

namespace recstore {

// The rows of a table at one moment, which are read one after the other while the table continues to change.
//
// A snapshot copies on write: before a row that has not been read changes, the snapshot keeps a copy of it. A removed
// row stays in its slot, because the slot is not reused before the snapshot ends.
class Snapshot final : public PendingPass {
 public:
  // since: if given, the snapshot contains only the rows that have changed after this mark. The caller holds the lock
  // of the table and has called Table::settle_passes(). Throws InvalidArgument if the table has a snapshot already, or
  // if the mark is no longer known.
  Snapshot(std::shared_ptr<Table> table, std::optional<Changes::Mark> since);
  ~Snapshot() override;  // the caller must not hold the lock

  const Table& table() const { return *table_; }
  // The state of the table at that moment: its number of rows, its clocks, and a mark. If `since` was given, left() has
  // the ids that had left since then, in ascending order, or nothing if they are no longer known.
  int64_t table_rows() const { return table_rows_; }
  int64_t steps() const { return steps_; }
  int64_t optimizer_steps() const { return optimizer_steps_; }
  Changes::Mark mark() const { return mark_; }
  const std::optional<std::vector<int64_t>>& left() const { return left_; }
  // Number of rows that have not been read.
  int64_t rows_left() const { return rows_left_; }
  // Throws InvalidArgument unless n is within 0 and rows_left().
  void check_count(int64_t n) const;
  // Copies the next n rows, in ascending order of their ids. The caller does not hold the lock of the table.
  // polite: read on the calling thread alone, hold the lock for a tenth of a millisecond at a time, and pause in
  // between. Throws InvalidArgument (see check_count), OutOfMemory if there was no memory to keep the copy of a row.
  void read(int64_t n, int64_t* ids, const RowImages& out, bool polite, Executor& executor);

  // Keeps a copy of a row that is about to change. The caller holds the lock; calls for distinct slots may run in
  // parallel.
  void keep(Slot slot);
  // Makes room for `count` calls of removed(). Throws std::bad_alloc.
  void reserve_removed(int64_t count) { reserve_more(removed_, static_cast<size_t>(count)); }
  // Notes that the row of an id is removed from the table. The caller holds the lock. Returns whether the snapshot
  // still has to read the row from its slot.
  bool removed(int64_t id, Slot slot) noexcept;

  void settle(const Table&, Executor&) override {}  // a snapshot has no bookkeeping
  bool is_settled(const Table&) const override { return true; }
  void pin(const Table&, SlotSet&) const override {}  // a snapshot needs no pins: it copies rows, and slots wait for it
  void forget(const Table&) override {}               // a table with a snapshot does not exchange rows
  void moved(const Table&, const std::vector<Move>&) noexcept override {}  // nor does it move rows

 private:
  struct Row {
    int64_t id;
    Slot slot;
    bool operator<(const Row& other) const { return id < other.id; }
    bool operator==(const Row& other) const { return id == other.id; }
  };
  class Least;

  bool pending(Slot slot) const { return slot < slots_ && (pending_[slot / 64] >> (slot % 64) & 1) != 0; }
  void find_next(bool polite, Executor& executor);
  void search_index(bool polite, Least& least, Executor& executor);
  void find_pending(bool polite, Least& least);
  bool is_next(int64_t id, Slot slot) const;
  void add_removed(Least& least) const;
  void read_next(int64_t n, int64_t* ids, const RowImages& out, bool polite, Executor& executor);
  char* block(int64_t number);
  uint32_t& number(Slot slot) const { return reinterpret_cast<uint32_t*>(numbers_.data())[slot]; }
  void read_one(const Row& row, const RowImages& out, int64_t position) const;

  std::shared_ptr<Table> table_;
  std::mutex reading_;   // serialises read()
  bool broken_ = false;  // a read() has failed after it read some rows
  int64_t slots_;
  int64_t table_rows_;
  int64_t steps_;
  int64_t optimizer_steps_;
  Changes::Mark mark_;
  std::optional<std::vector<int64_t>> left_;
  std::atomic<int64_t> rows_left_{0};
  std::vector<uint64_t> pending_;  // one bit for each slot: it has a row of the snapshot that has not been read
  bool finds_by_slot_ = false;     // whether the table records where its index has each row
  std::vector<Row> removed_;       // rows that were removed from the table before they were read

  std::vector<Row> next_;           // the rows to be read next, in ascending order of their ids
  size_t read_ = 0;                 // this many rows of next_ have been read
  std::optional<int64_t> last_id_;  // the last id that was in next_

  // Copies of rows: the layout in the table, followed by the RowAside.
  int64_t image_bytes_;
  int64_t block_images_;
  Region numbers_;  // by slot, uint32: the number of its copy, from 1, or 0
  std::vector<std::atomic<char*>> blocks_;
  std::atomic<int64_t> kept_{0};
  std::atomic<bool> out_of_memory_{false};
  uint64_t pass_;
};

// Locks the table and takes a snapshot of it; see Snapshot.
std::shared_ptr<Snapshot> open_snapshot(const std::shared_ptr<Table>& table, std::optional<Changes::Mark> since,
                                        Executor& executor);

// Makes the table record where its index has each row, so that snapshots of changed rows take time for these rows only.
// The first call walks over the index; it holds the lock for short times. Throws OutOfMemory.
void locate_rows(const std::shared_ptr<Table>& table);

}  // namespace recstore
