#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/executor.h"
#include "base/memory.h"
#include "index/index.h"
#include "index/sets.h"

namespace recstore {

class Table;
struct Leaver;

// The rows that a table will evict next. It finds them ahead, in a walk over the index that each eviction continues by
// as much as it uses up, so that no step has to search a full table. It is a cache: next() returns what least_rows()
// would return, for any number of threads and also after a restart, which begins without a queue.
//
// Every row that ranks below a limit is in the queue. A walk keeps the lowest of the rows that rank above it, and at
// its end they join the queue and raise the limit. The rank of a row that is used only rises; a row is ranked again
// when its turn comes. A row whose score becomes lower is noted like a new row, and is then in the queue at both ranks.
// Under LRU a new row ranks above all rows of before. Under LFU it ranks low, and so may a row that returns from a cold
// store: these rows are noted. What else lowers ranks calls reset(): rows that are written with their bookkeeping, and
// another clock.
//
// A halving of LFU changes the places of rows, but it is known before which rows rank low after it: another queue ranks
// by the first step of the next era, the time between two halvings. It is filled shortly before the halving, and takes
// the place of this one there.
//
// The caller holds the lock of the table alone.
class EvictionQueue {
 public:
  // Returns the `count` rows that the policy ranks lowest, among the rows whose slots are not in `kept`; fewer if there
  // are fewer such rows. Throws std::bad_alloc.
  std::vector<Leaver> next(const Table& table, const SlotSet& kept, int64_t count, Executor& executor);
  // Notes that the rows of the last next() have been evicted.
  void evicted() noexcept { offered_.clear(); }
  // Continues the walk of a table that is nearly full, and is to get `new_rows` rows. Throws std::bad_alloc.
  void prepare(const Table& table, int64_t new_rows, Executor& executor);
  // Makes room for calls of arrived(). Throws std::bad_alloc.
  void reserve(int64_t rows);
  // Makes room for calls of arrived() with rows whose ranks have become lower. Throws std::bad_alloc.
  void reserve_lowered(int64_t rows) {
    // The queue has the rows at their former ranks, too. If there are too many, a search of the whole table takes less
    // time.
    if (static_cast<int64_t>(queue_.size() + arrivals_.size()) > kMostLowered * most_) reset();
    reserve(rows);
  }
  bool notes_arrivals() const { return notes_arrivals_; }
  // Notes a new row, or a row whose rank has become lower, if notes_arrivals().
  void arrived(int64_t id) noexcept {
    arrivals_.push_back(id);
    if (next_era_) next_era_->arrived(id);
  }
  // Forgets everything: the next call of next() walks over the whole index.
  void reset() noexcept { *this = EvictionQueue(); }

 private:
  static constexpr int64_t kMostLowered = 8;

  struct Ranked {
    uint64_t rank;
    uint64_t mixed_id;  // decides between rows of equal rank
    bool operator<(const Ranked& other) const {
      return rank != other.rank ? rank < other.rank : mixed_id < other.mixed_id;
    }
  };

  // Rows, of which the first one ranks lowest. Only the lowest ones are in a heap, which fits into a cache, so that
  // many rows can be added at once.
  class Queue {
   public:
    bool empty() const { return heap_.empty() && rest_.empty(); }
    size_t size() const { return heap_.size() + rest_.size(); }
    void push(const Ranked& row);
    void push(std::vector<Ranked>& rows);  // and clears them
    const Ranked& first();
    Ranked pop();

   private:
    std::vector<Ranked> heap_;
    Ranked highest_{};  // in the heap; the others rank higher
    std::vector<Ranked> rest_;
  };

  template <class Policy>
  std::vector<Leaver> next_by(const Policy& policy, const Table& table, const SlotSet& kept, int64_t count,
                              Executor& executor);
  template <class Policy>
  void enter_era(const Policy& policy);
  template <class Policy>
  void prepare_next_era(const Policy& policy, const Table& table, int64_t count, Executor& executor);
  template <class Policy>
  void walk(const Policy& policy, const Table& table, double part, Executor& executor);
  template <class Policy>
  Ranked first_bound(const Policy& policy, const Table& table) const;
  void end_walk();
  void cut();
  void put_offered_back();
  template <class Policy>
  void rank_arrivals(const Policy& policy, const Table& table);
  void place(const Ranked& ranked);
  template <class Policy>
  Slot first_row(const Policy& policy, const Table& table);

  // The walk.
  bool walking_ = false;
  uint64_t position_ = 0;        // in the index, at which it continues
  uint32_t since_ = 0;           // the clock at its beginning
  int64_t most_ = 0;             // about how many of the rows it keeps
  std::vector<Ranked> lowest_;   // of the rows that it has visited
  std::vector<int64_t> passed_;  // rows that have left the queue, because they rank above limit_, since the walk began
  Ranked bound_{};               // the other rows that it has visited do not rank below this

  // The queue.
  bool ready_ = false;
  Queue queue_;
  Ranked limit_{};               // every row that ranks below this is in the queue, or will be when arrivals_ are
  std::vector<Ranked> offered_;  // by the last next()

  bool notes_arrivals_ = false;
  std::vector<int64_t> arrivals_;  // rows that the next call adds to the queue
  uint32_t era_ = 0;               // the number of halvings of LFU so far
  uint32_t last_next_ = 0;         // the clock at the last next(); in the queue of the next era, when it was begun
  std::unique_ptr<EvictionQueue> next_era_;
};

}  // namespace recstore
