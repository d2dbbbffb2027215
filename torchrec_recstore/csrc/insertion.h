#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "eviction.h"
#include "executor.h"
#include "index.h"
#include "table.h"

namespace recstore {

// An id that a batch looked up and found without a row.
struct Miss {
  int64_t id;
  uint64_t hash;
  int64_t position;  // in the batch's array of slots
};

// Makes the missing rows of one table: one for each distinct id, whose slot is then written to every
// position of the id.
class Insertion {
 public:
  // slots: the batch's, written at the positions of the misses.
  // initialise: whether fill() writes the new rows' weights; else the caller does.
  Insertion(Table& table, std::vector<Miss> misses, Slot* slots, bool initialise = true);

  // Tasks of place(), resolve() and fill(); they may run in parallel.
  int64_t tasks() const { return tasks_; }
  // Gives every distinct id of the task its place in the index. Throws OutOfMemory.
  void place(int64_t task);
  // After all place()s: gets slots for them, first those of rows that will have left before fill(). Throws OutOfMemory.
  void take_slots(const std::vector<Leaver>& leaving = {});
  // After take_slots(): writes the slots of the batch.
  void resolve(int64_t task) noexcept;
  // After take_slots(): writes the rows.
  void fill(int64_t task) noexcept;
  // Whatever has been done, as long as no row has left: leaves the table as it was.
  void undo() noexcept;

  int64_t misses() const { return static_cast<int64_t>(misses_.size()); }
  int64_t rows_made() const { return static_cast<int64_t>(taken_.size()); }
  // How many rows have the slots of rows that leave, the first of these.
  int64_t reused() const { return reused_; }

 private:
  template <class Work>
  void for_each_part(int64_t task, const Work& work);

  Table& table_;
  std::vector<Miss> misses_;
  Slot* slots_;
  bool initialise_;
  int64_t tasks_;
  std::array<int32_t, Index::kParts + 1> begin_{};           // misses of a part of the index in order_
  std::vector<int32_t> order_;                               // of the batch, within each part
  std::array<std::vector<int32_t>, Index::kParts> fresh_;    // each part's first miss of each distinct id
  std::array<int64_t, Index::kParts> base_{};                // of a part in taken_
  std::vector<Slot> taken_;
  int64_t reused_ = 0;                                       // of taken_, the first ones
};

// The tasks of insertions of different tables.
class InsertionTasks {
 public:
  explicit InsertionTasks(const std::vector<Insertion*>& insertions);

  template <class Work>  // work(insertion, task), in parallel
  void run(Executor& executor, const Work& work) const {
    for_each_task(executor, static_cast<int64_t>(tasks_.size()), [&](int64_t t) { work(*tasks_[t].insertion, tasks_[t].task); });
  }

 private:
  struct Task {
    Insertion* insertion;
    int64_t task;
  };
  std::vector<Task> tasks_;
};

}  // namespace recstore
