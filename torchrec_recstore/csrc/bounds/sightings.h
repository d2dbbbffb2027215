#pragma once

#include <cstdint>
#include <vector>

#include "base/executor.h"
#include "base/memory.h"
#include "base/prefetch.h"

namespace recstore {

// Counts how often ids without a row have been seen, in a fixed amount of memory: two generations of a hash table of
// ids with their counts.
//
// The count of an id is the sum of its counts in both generations. It is exact, so no id is taken for another one, and
// the counts of any shards can be merged and divided by their ids. A generation ends when it has most() ids. The older
// generation is then forgotten.
//
// A sketch (count-min, conservative update, two generations of four rows) was measured before: it takes 8 bytes for a
// sighting, this table 11 bytes for an id, but 2.9 % of the ids that were seen once had a count above 1, and the
// sketches of several shards could not be merged without adding up these errors. It read eight cache lines for an id,
// this table reads two.
class Sightings {
 public:
  // bytes: memory of both generations, a power of two, at least 1024. Throws OutOfMemory.
  explicit Sightings(int64_t bytes);

  // Returns the count of an id, at most 255.
  int64_t count(int64_t id) const;
  void add(int64_t id);
  // Adds ids, with threads. They are in the order of by_part(); the call changes their order. The counts do not depend
  // on the threads.
  void add(std::vector<int64_t>& ids, Executor& executor) noexcept;
  std::vector<int64_t> by_part(const std::vector<int64_t>& ids) const;
  // Prefetches the cache lines that the other calls read for an id.
  RECSTORE_PREFETCHES void prefetch(int64_t id) const {
    for (const int generation : {0, 1}) __builtin_prefetch(buckets(generation) + bucket_of(id));
  }

  // The number of ids of a generation.
  int64_t most() const { return buckets_ * kFilled; }
  // The state for a checkpoint: each id of a generation with its count there. The generation is 0 for the present one
  // and 1 for the older one.
  int64_t size() const { return sizes_[0] + sizes_[1]; }
  void read(int64_t* ids, uint8_t* counts, uint8_t* generations) const;
  // Replaces the state by that of any number of counters of any sizes, which has n entries. If the present generation
  // has more than most() ids, the ids beyond go to the older generation. Ids that do not fit there are forgotten. A
  // hash of the ids chooses them.
  void write(const int64_t* ids, const uint8_t* counts, const uint8_t* generations, int64_t n);

  int64_t bytes() const { return 2 * buckets_ * static_cast<int64_t>(sizeof(Bucket)); }

 private:
  static constexpr int kParts = 64;
  static constexpr int kPlaces = 7;
  static constexpr int64_t kFilled = 6;  // ids for each bucket of a full generation: there is always a free place

  struct alignas(64) Bucket {  // a cache line
    int64_t ids[kPlaces];
    uint8_t counts[kPlaces];  // 0: a free place
    uint8_t unused;
  };
  struct Place {
    int64_t* id;
    uint8_t* count;
  };

  // Returns the place of an id in a generation, or the free place where it would be. Of a part alone: a place that is
  // null if the search leaves the part.
  Place find(int generation, int64_t id, bool of_part = false) const;
  int64_t bucket_of(int64_t id) const;
  // The part of the buckets in which the search for an id begins.
  int64_t part_of(int64_t id) const { return bucket_of(id) * kParts / buckets_; }
  Bucket* buckets(int generation) const { return reinterpret_cast<Bucket*>(memory_.data()) + generation * buckets_; }
  void clear(int generation);
  // Adds to the count of an id in a generation, if the id is there or there is room for it. Returns whether it was
  // added.
  bool add_to(int generation, int64_t id, int64_t count);
  void add_at(Place place, int64_t id, int64_t count, int64_t& size);

  int64_t buckets_;  // of a generation, a power of two
  int64_t sizes_[2] = {0, 0};
  int present_ = 0;  // the present generation, 0 or 1
  Region memory_;
};

}  // namespace recstore
