#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/executor.h"
#include "base/parts.h"
#include "bounds/eviction.h"
#include "index/index.h"
#include "rows/table.h"

namespace recstore {

// An id of a batch that has no row.
struct Miss {
  int64_t id;
  uint64_t hash;
  int64_t position;  // in the array of slots of the batch
};

// The misses of one table, by the part of the index and by id.
class DistinctMisses {
 public:
  // misses: in the order of the batch.
  explicit DistinctMisses(std::vector<Miss> misses);

  // Number of tasks of group(), which may run in parallel.
  int64_t tasks() const { return tasks_; }
  // Finds the distinct ids of the task. Throws OutOfMemory.
  void group(int64_t task);
  void group(Executor& executor) {
    for_each_task(executor, tasks_, [&](int64_t task) { group(task); });
  }

  int64_t misses() const { return static_cast<int64_t>(misses_.size()); }
  // Number of distinct ids, after group().
  int64_t count() const;
  // The distinct ids in the order of the batch, which does not depend on the hash, after group().
  std::vector<int64_t> ids() const;

 private:
  friend class Insertion;
  template <class Work>  // work(part), for the parts of a task that have misses
  void for_each_part(int64_t task, const Work& work) const;

  std::vector<Miss> misses_;
  int64_t tasks_ = 1;
  std::array<size_t, Index::kParts + 1> begins_;  // of the parts in order_
  std::vector<int32_t> order_;                    // misses by part; within a part in the order of the batch
  std::vector<uint32_t> numbers_;                 // of the ids of the misses in order_
  // The first miss of each distinct id of a part; the position here is the number of the id.
  std::array<std::vector<int32_t>, Index::kParts> fresh_;
};

// Makes the missing rows of one table, one for each distinct id, and writes the slot of each row to all positions of
// its id. The steps are group(), take_slots(), resolve(), fill() and finish(), in this order.
class Insertion {
 public:
  // slots: the slots of the batch, which are written at the positions of the misses.
  // initialise: whether fill() writes the weights of the new rows; otherwise the caller writes them.
  Insertion(Table& table, DistinctMisses misses, Slot* slots, bool initialise = true);

  // Number of tasks of group(), resolve() and fill(). The tasks of one step may run in parallel.
  int64_t tasks() const { return misses_.tasks(); }
  // See DistinctMisses; the misses may have been grouped before.
  void group(int64_t task) { misses_.group(task); }
  // Gets a slot for every new row, and room in the index. The slots of `leaving` come first; these rows are removed
  // before fill(). Throws OutOfMemory.
  void take_slots(const std::vector<Leaver>& leaving = {});
  // Writes the slots of the batch.
  void resolve(int64_t task) noexcept;
  // Makes the rows.
  void fill(int64_t task) noexcept;
  // Makes the entries of the index that fill() could not make in parallel.
  void finish() noexcept;
  // Restores the table after any of the steps, as long as no row of `leaving` has been removed.
  void undo() noexcept;

  bool finished() const { return finished_; }
  int64_t misses() const { return misses_.misses(); }
  int64_t rows_made() const { return static_cast<int64_t>(taken_.size()); }
  // Number of new rows that use slots of `leaving`, which are the first slots there.
  int64_t reused() const { return reused_; }

 private:
  // The new rows of one part of the index.
  struct NewRows {
    int64_t first = 0;  // in taken_
    // Number of rows that are not in the index after fill(); the order of the misses has their numbers.
    int32_t left = 0;
  };

  Table& table_;
  DistinctMisses misses_;
  Slot* slots_;
  bool initialise_;
  std::array<NewRows, Index::kParts> rows_;
  std::vector<Slot> taken_;
  int64_t reused_ = 0;  // this many slots at the front of taken_ come from `leaving`
  bool finished_ = false;
};

// The tasks of several insertions, which belong to different tables.
class InsertionTasks {
 public:
  explicit InsertionTasks(const std::vector<Insertion*>& insertions);

  template <class Work>  // work(insertion, task), in parallel
  void run(Executor& executor, const Work& work) const {
    for_each_task(executor, static_cast<int64_t>(tasks_.size()),
                  [&](int64_t t) { work(*tasks_[t].insertion, tasks_[t].task); });
  }

 private:
  struct Task {
    Insertion* insertion;
    int64_t task;
  };
  std::vector<Task> tasks_;
};

}  // namespace recstore
