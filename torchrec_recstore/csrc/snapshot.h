#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "changes.h"
#include "executor.h"
#include "memory.h"
#include "table.h"
#include "transfer.h"

namespace recstore {

// The rows of a table as they were at one moment, read one after the other while the table goes on.
//
// Copy on write: whoever is about to change a row that has not been read yet has a copy of it kept. A row that is
// removed stays where it is, since its slot is not reused before the snapshot ends.
class Snapshot final : public PendingPass {
 public:
  // since: only rows that have changed after that mark. The caller holds the table's lock, and has had its passes
  // settled. Throws InvalidArgument where there is a snapshot already, or the mark is not known any more.
  Snapshot(std::shared_ptr<Table> table, std::optional<Changes::Mark> since);
  ~Snapshot() override;  // the caller does not hold the lock

  const Table& table() const { return *table_; }
  // What the table was at that moment: its rows and clocks, a mark of the moment, and, where `since` was given, the
  // ids that had left since, ascending; nothing where these are not known.
  int64_t table_rows() const { return table_rows_; }
  int64_t steps() const { return steps_; }
  int64_t optimizer_steps() const { return optimizer_steps_; }
  Changes::Mark mark() const { return mark_; }
  const std::optional<std::vector<int64_t>>& left() const { return left_; }
  // Rows that have not been read.
  int64_t rows_left() const { return rows_left_; }
  // Throws InvalidArgument unless n is within 0 and rows_left().
  void check_count(int64_t n) const;
  // Copies the next n rows, in ascending order of their ids. The caller does not hold the lock of the table.
  // polite: read on the calling thread alone, hold the lock for a tenth of a millisecond at a time, and pause in between.
  // Throws InvalidArgument (see check_count), OutOfMemory if there was no memory to keep the copy of a row.
  void read(int64_t n, int64_t* ids, const RowImages& out, bool polite, Executor& executor);

  // The row is about to change. The caller holds the lock; distinct slots may come in parallel.
  void keep(Slot slot);
  // Makes room for `count` calls of removed(). Throws std::bad_alloc.
  void reserve_removed(int64_t count) { reserve_more(removed_, static_cast<size_t>(count)); }
  // The id's row leaves. The caller holds the lock. Returns whether it is still to be read, from where it lies.
  bool removed(int64_t id, Slot slot) noexcept;

  void settle(const Table&, Executor&) override {}  // has no bookkeeping of its own
  void pin(const Table&, SlotSet&) const override {}  // has copies of what it still needs, or its slots wait for it
  void forget(const Table&) override {}             // rows are not exchanged while there is a snapshot
  void moved(const Table&, const std::vector<Move>&) noexcept override {}  // nor do they move

 private:
  struct Row {
    int64_t id;
    Slot slot;
    bool operator<(const Row& other) const { return id < other.id; }
    bool operator==(const Row& other) const { return id == other.id; }
  };
  class Least;

  bool pending(Slot slot) const { return slot < slots_ && (pending_[slot / 64] >> (slot % 64) & 1) != 0; }
  void find_next(bool polite);
  void read_next(int64_t n, int64_t* ids, const RowImages& out, bool polite, Executor& executor);
  char* block(int64_t number);
  uint32_t& number(Slot slot) const { return reinterpret_cast<uint32_t*>(numbers_.data())[slot]; }
  void read_one(const Row& row, const RowImages& out, int64_t position) const;

  std::shared_ptr<Table> table_;
  std::mutex reading_;             // one read() after the other
  bool broken_ = false;            // a read() has failed on its way
  int64_t slots_;
  int64_t table_rows_;
  int64_t steps_;
  int64_t optimizer_steps_;
  Changes::Mark mark_;
  std::optional<std::vector<int64_t>> left_;
  std::atomic<int64_t> rows_left_{0};
  std::vector<uint64_t> pending_;  // a bit a slot: a row of the snapshot that has not been read
  std::vector<Row> removed_;       // since the snapshot began, and not read before

  std::vector<Row> next_;          // ascending
  size_t read_ = 0;                // of next_
  std::optional<int64_t> last_id_; // that was in next_

  // Kept rows, as they lay in the table and their RowMeta behind.
  int64_t image_bytes_;
  int64_t block_images_;
  Region numbers_;                 // by slot, uint32: of its kept row, from 1; 0 where there is none
  std::vector<std::atomic<char*>> blocks_;
  std::atomic<int64_t> kept_{0};
  std::atomic<bool> out_of_memory_{false};
  uint64_t pass_;
};

// Locks the table and takes a snapshot of it; see Snapshot.
std::shared_ptr<Snapshot> open_snapshot(const std::shared_ptr<Table>& table, std::optional<Changes::Mark> since, Executor& executor);

}  // namespace recstore
