#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/buffer_pool.h"
#include "lookup/batch.h"
#include "lookup/vacated.h"

namespace recstore {

class Table;

// The slots of a batch, which a prefetch has resolved ahead of the training lookup. They do not pin the rows: the
// lookup probes the index again for the positions whose row has left its slot (see StaleSlots), and for those without a
// row.
struct SlotsAhead {
  // Throws OutOfMemory.
  SlotsAhead(const int64_t* given_ids, int64_t n, std::vector<int64_t> feature_counts, size_t tables);

  const int64_t* id_data() const { return static_cast<const int64_t*>(ids.data()); }
  Slot* slot_data() const { return static_cast<Slot*>(slots.data()); }
  // Whether the batch has as many ids of each feature, and the same ids at some positions. The offsets of the batch may
  // be wrong.
  bool resembles(const Batch& batch) const;

  int64_t n_ids;
  std::vector<int64_t> counts;         // by feature: number of ids
  std::vector<Vacated::Stamp> stamps;  // by table of the group
  BufferPool::Buffer ids;              // (n_ids,) copy of the batch, because its array may be changed or freed
  BufferPool::Buffer slots;            // (n_ids,) by position; kNoSlot for an id without a row
};

// The slots of a group's coming batches. Thread-safe.
//
// Memory is bounded: there are at most kMost batches, the oldest one is dropped for a new one, and a batch is dropped
// when kMost lookups of the group have used other batches, or none.
class ComingBatches {
 public:
  static constexpr size_t kMost = 4;

  ComingBatches() { coming_.reserve(kMost); }

  void add(std::unique_ptr<SlotsAhead> batch) noexcept;
  // Removes and returns the slots of a batch that resembles this one; null if there are none. Older batches are
  // dropped, because batches are used in the order of their prefetches.
  std::unique_ptr<SlotsAhead> take(const Batch& batch);
  // Calls visit(batch) for the batch that was added last, if it has not been taken or dropped.
  template <class Visit>
  void with_newest(const Visit& visit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!coming_.empty()) visit(*coming_.back().batch);
  }

 private:
  struct Coming {
    std::unique_ptr<SlotsAhead> batch;
    size_t passed_over;  // number of lookups that have not used it
  };

  std::mutex mutex_;
  std::vector<Coming> coming_;  // the oldest first
};

// The slots of a table that rows have left since a stamp. Some other slots may belong to the set, too: to probe the
// index for them needlessly is cheaper than an exact set.
class StaleSlots {
 public:
  // The caller holds the lock of the table. Throws std::bad_alloc.
  StaleSlots(const Vacated& vacated, Vacated::Stamp stamp);

  bool all() const { return all_; }  // whether every slot belongs to the set
  bool none() const { return bits_.empty(); }
  bool contains(Slot slot) const { return (bits_[(slot & mask_) / 64] >> (slot % 64) & 1) != 0; }

 private:
  bool all_ = false;
  Slot mask_ = 0;
  std::vector<uint64_t> bits_;  // by the low bits of a slot
};

}  // namespace recstore
