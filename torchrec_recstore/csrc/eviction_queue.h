#pragma once

#include <cstdint>
#include <vector>

#include "executor.h"
#include "index.h"
#include "memory.h"
#include "sets.h"

namespace recstore {

class Table;
struct Leaver;

// The rows that a table will evict next. It finds them ahead, in a walk over the index that each eviction continues by as
// much as it uses up, so that no step has to search a full table. It is a cache: next() returns what least_rows() would
// return, for any number of threads and also after a restart, which begins without a queue.
//
// Every row that ranks below a limit is in the queue. A walk keeps the lowest of the rows that rank above it, and at its
// end they join the queue and raise the limit. The rank of a row that is used only rises; a row is ranked again when its
// turn comes. Under LRU a new row ranks above all rows of before. Under LFU it ranks low, and so may a row that
// returns from a cold store: these rows are noted. What lowers ranks calls reset(): rows that are written with their
// bookkeeping, and another clock. next() follows the halving of LFU, after which the ranks of rows may have changed places.
//
// The caller holds the lock of the table alone.
class EvictionQueue {
 public:
  // Returns the `count` rows that the policy ranks lowest, among the rows whose slots are not in `kept`; fewer if there are
  // fewer such rows. Throws std::bad_alloc.
  std::vector<Leaver> next(const Table& table, const SlotSet& kept, int64_t count, Executor& executor);
  // Notes that the rows of the last next() have been evicted.
  void evicted() noexcept { offered_.clear(); }
  // Continues the walk of a table that is nearly full, and is to get `new_rows` rows. Throws std::bad_alloc.
  void prepare(const Table& table, int64_t new_rows, Executor& executor);
  // Makes room for calls of arrived(). Throws std::bad_alloc.
  void reserve(int64_t rows);
  bool notes_arrivals() const { return notes_arrivals_; }
  // Notes a new row, if notes_arrivals().
  void arrived(int64_t id) noexcept { arrivals_.push_back(id); }
  // Forgets everything: the next call of next() walks over the whole index.
  void reset() noexcept { *this = EvictionQueue(); }

 private:
  struct Ranked {
    uint64_t rank;
    uint64_t mixed_id;  // decides between rows of equal rank
    bool operator<(const Ranked& other) const { return rank != other.rank ? rank < other.rank : mixed_id < other.mixed_id; }
  };

  template <class Policy>
  std::vector<Leaver> next_by(const Policy& policy, const Table& table, const SlotSet& kept, int64_t count, Executor& executor);
  template <class Policy>
  void walk(const Policy& policy, const Table& table, double part, Executor& executor);
  void end_walk();
  struct RanksAbove {
    bool operator()(const Ranked& row, const Ranked& other) const { return other < row; }
  };
  void cut();
  void put_offered_back();
  void put_back(const Ranked& ranked);

  // The walk.
  bool walking_ = false;
  uint64_t position_ = 0;       // in the index, at which it continues
  uint32_t since_ = 0;          // the clock at its beginning
  int64_t most_ = 0;            // about how many of the rows it keeps
  std::vector<Ranked> lowest_;  // of the rows that it has visited
  std::vector<int64_t> passed_; // rows that have left the queue, because they rank above limit_, since the walk began
  Ranked bound_{};              // the other rows that it has visited do not rank below this

  // The queue.
  bool ready_ = false;
  std::vector<Ranked> queue_;    // a heap, whose first row ranks lowest
  Ranked limit_{};               // every row that ranks below this is in the queue, or will be when arrivals_ are
  std::vector<Ranked> offered_;  // by the last next()

  bool notes_arrivals_ = false;
  std::vector<int64_t> arrivals_;  // rows that the next call adds to the queue
  uint32_t era_ = 0;               // the number of halvings of LFU so far
};

}  // namespace recstore
