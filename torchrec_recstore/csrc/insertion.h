#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "eviction.h"
#include "executor.h"
#include "index.h"
#include "table.h"

namespace recstore {

// An id of a batch that has no row.
struct Miss {
  int64_t id;
  uint64_t hash;
  int64_t position;  // in the array of slots of the batch
};

// Makes the missing rows of one table, one for each distinct id, and writes the slot of each row to all positions of
// its id. The steps are place(), take_slots(), resolve() and fill(), in this order.
class Insertion {
 public:
  // slots: the slots of the batch, which are written at the positions of the misses.
  // initialise: whether fill() writes the weights of the new rows; otherwise the caller writes them.
  Insertion(Table& table, std::vector<Miss> misses, Slot* slots, bool initialise = true);

  // Number of tasks of place(), resolve() and fill(). The tasks of one step may run in parallel.
  int64_t tasks() const { return tasks_; }
  // Makes an entry in the index for every distinct id of the task. Throws OutOfMemory.
  void place(int64_t task);
  // Gets a slot for every new row. The slots of `leaving` come first; these rows are removed before fill(). Throws
  // OutOfMemory.
  void take_slots(const std::vector<Leaver>& leaving = {});
  // Writes the slots of the batch.
  void resolve(int64_t task) noexcept;
  // Writes the rows.
  void fill(int64_t task) noexcept;
  // Restores the table after any of the steps, as long as no row of `leaving` has been removed.
  void undo() noexcept;

  int64_t misses() const { return static_cast<int64_t>(misses_.size()); }
  int64_t rows_made() const { return static_cast<int64_t>(taken_.size()); }
  // Number of new rows that use slots of `leaving`, which are the first slots there.
  int64_t reused() const { return reused_; }

 private:
  template <class Work>
  void for_each_part(int64_t task, const Work& work);

  Table& table_;
  std::vector<Miss> misses_;
  Slot* slots_;
  bool initialise_;
  int64_t tasks_;
  std::array<int32_t, Index::kParts + 1> begin_{};           // by part of the index: first miss in order_
  std::vector<int32_t> order_;                               // misses by part; within a part in the order of the batch
  std::array<std::vector<int32_t>, Index::kParts> fresh_;    // by part: the first miss of each distinct id
  std::array<int64_t, Index::kParts> base_{};                // by part: its first slot in taken_
  std::vector<Slot> taken_;
  int64_t reused_ = 0;                                       // this many slots at the front of taken_ come from `leaving`
};

// The tasks of several insertions, which belong to different tables.
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
