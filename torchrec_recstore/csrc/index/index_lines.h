#pragma once

#include <cstdint>

namespace recstore {

using Slot = uint32_t;
constexpr Slot kNoSlot = 0xFFFFFFFFu;

constexpr int kLineEntries = 5;

// Five entries of the index in one cache line. A line of zeros is empty.
struct alignas(64) IndexLine {
  int64_t ids[kLineEntries];
  // The slots of the entries; the last word has a bit for each entry in use, and above them the number of entries that
  // passed this line because it was full.
  uint32_t words[kLineEntries + 1];

  static constexpr uint32_t kAll = (1u << kLineEntries) - 1;
  static constexpr uint32_t kPassing = 1u << kLineEntries;

  uint32_t used() const { return words[kLineEntries] & kAll; }
  bool passed() const { return words[kLineEntries] >= kPassing; }
};
static_assert(sizeof(IndexLine) == 64);

// An entry whose home line is full lies in one of the lines 1, 3, 6, 10, 14, 18, ... after it: the first line with a
// free place. Steps that grow keep the entries of neighbouring homes apart. Their bound limits how far an insert can
// reach.
constexpr uint32_t kFirstStep = 1;
constexpr uint32_t kMostStep = 4;
inline uint32_t next_step(uint32_t step) { return step + (step < kMostStep); }

// The lines of an index, as the loops that search them see them. The home line of an entry depends on the upper half of
// its hash, its position. While the index grows, the entries from the position `frontier` on have their home among more
// lines.
struct IndexView {
  IndexLine* lines;
  uint64_t salt;
  uint64_t frontier;
  uint32_t lines_below;  // number of home lines of the positions below the frontier, if there were no others
  uint32_t lines_above;  // and of the other positions

  uint32_t home(uint64_t position) const {
    const uint64_t lines = position >= frontier ? lines_above : lines_below;
    return static_cast<uint32_t>(position * lines >> 32);
  }
};

}  // namespace recstore
