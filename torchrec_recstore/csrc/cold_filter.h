#pragma once

#include <cstdint>
#include <vector>

#include "memory.h"

namespace recstore {

// Recognises most ids that were never written to the cold store, so that the store is not asked for them. It is a chain
// of blocked Bloom filters (Putze, Sanders, Singler 2007) with one byte for each id. Each filter is twice as large as
// the one before.
class ColdFilter {
 public:
  // ids: the number of ids for which the first filter has room.
  explicit ColdFilter(int64_t ids);

  // Adds ids (n,). Throws OutOfMemory, and adds none of them then.
  void add(const int64_t* ids, int64_t n);
  // False is certain; true may be wrong.
  bool may_contain(int64_t id) const;
  void clear();
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
  int64_t room() const;
  void add(int64_t id) noexcept;
  static Mask mask_of(uint64_t hash);
  static uint64_t* block_of(const Level& level, uint64_t hash);

  int64_t first_ids_;
  std::vector<Level> levels_;  // filled one after the other
};

}  // namespace recstore
