#pragma once

#include <cstdint>
#include <vector>

#include "memory.h"

namespace recstore {

// Tells of ids that have never left for the cold store that they have not: a chain of blocked Bloom filters (Putze,
// Sanders, Singler 2007), each twice as large as the one before, of a byte an id.
class ColdFilter {
 public:
  // ids: that the first filter is made for.
  explicit ColdFilter(int64_t ids);

  // ids: (n,). All of them, or none where it throws OutOfMemory.
  void add(const int64_t* ids, int64_t n);
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
  std::vector<Level> levels_;  // full, but for the last of those that have an id, and those behind it
};

}  // namespace recstore
