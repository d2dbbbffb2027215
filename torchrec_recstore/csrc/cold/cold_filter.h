#pragma once

#include <cstdint>
#include <vector>

#include "base/memory.h"

namespace recstore {

// Recognises most ids that were never written to the cold store, so that the store is not asked for them. It is a chain
// of blocked Bloom filters (Putze, Sanders, Singler 2007) with one byte for each id. Each filter is twice as large as
// the one before.
//
// A Bloom filter cannot forget an id. The owner of the store renews the chain instead: it begins a new one, keeps the
// ids that a scan of the store finds in it, and then replaces the old one. Ids that are added meanwhile are in both.
class ColdFilter {
 public:
  // ids: the number of ids for which the first filter has room.
  explicit ColdFilter(int64_t ids);

  // Adds ids (n,). Throws OutOfMemory, and adds none of them then.
  void add(const int64_t* ids, int64_t n);
  // False is certain; true may be wrong.
  bool may_contain(int64_t id) const { return contains(levels_, id); }
  void clear();

  // Begins a renewal, in place of one that has not ended.
  void begin_renewal();
  // Keeps ids (n,) beyond the end of the renewal. Throws OutOfMemory, and keeps none of them then.
  void keep(const int64_t* ids, int64_t n);
  // Returns whether the id may have been kept or added since the renewal began. False is certain; true may be wrong.
  bool may_be_kept(int64_t id) const { return !renewing_ || contains(next_, id); }
  // Forgets all ids that were neither kept nor added since the renewal began.
  void end_renewal();

  int64_t bytes() const;

 private:
  static constexpr int64_t kBlockWords = 8;  // a cache line
  struct Level {
    Region memory;
    int64_t blocks = 0;
    int64_t ids = 0;
  };
  struct Mask {
    uint64_t words[kBlockWords];
  };
  static bool contains(const std::vector<Level>& levels, int64_t id);
  void reserve(std::vector<Level>& levels, const int64_t* ids, int64_t n) const;
  static void add(std::vector<Level>& levels, const int64_t* ids, int64_t n) noexcept;
  static Mask mask_of(uint64_t hash);
  static uint64_t* block_of(const Level& level, uint64_t hash);

  int64_t first_ids_;
  std::vector<Level> levels_;  // filled one after the other
  std::vector<Level> next_;    // those of the renewal
  bool renewing_ = false;
};

}  // namespace recstore
