#pragma once

#include <cstdint>
#include <memory>

#include "base/memory.h"
#include "index/index_lines.h"

namespace recstore {

// The index of a served table: lines as in index_lines.h, whose number is fixed and whose entries are never moved or
// removed. Any number of threads may search it while one thread inserts: an entry becomes visible with the bit of its
// place, which is written last, and the id in a free place is one that is never searched in that line.
class IdIndex {
 public:
  // An index with room for `capacity` ids. Throws OutOfMemory.
  explicit IdIndex(int64_t capacity, uint64_t salt);
  // An index in memory that the caller owns, such as that of a loaded file. Throws InvalidArgument if a search could
  // read memory after the lines.
  IdIndex(char* lines, int64_t bytes, int64_t home_lines, int64_t size, uint64_t salt);

  // Writes the slot of each of ids (n,) to slots (n,); kNoSlot for an id without an entry.
  void find(const int64_t* ids, int64_t n, Slot* slots) const;
  // Number of inserts for which there is room if ids spread evenly.
  int64_t room() const { return capacity_ - size_; }
  int64_t size() const { return size_; }
  // Makes the entry of an id that has none. Returns false, and changes nothing, if there is no free place.
  bool insert(int64_t id, Slot slot) noexcept;
  // Requests the line of an id.
  void prefetch(int64_t id) const;

  template <class Visit>  // visit(int64_t id, Slot slot), for all entries in no particular order
  void for_each(const Visit& visit) const {
    for (int64_t l = 0; l < line_count_; ++l) {
      const IndexLine& line = view_.lines[l];
      for (uint32_t used = line.used(); used != 0; used &= used - 1) {
        const int entry = __builtin_ctz(used);
        visit(line.ids[entry], line.words[entry]);
      }
    }
  }

  // The size of the lines of an index with this number of home lines.
  static int64_t bytes_of(int64_t home_lines);
  const char* data() const { return reinterpret_cast<const char*>(view_.lines); }
  int64_t bytes() const { return line_count_ * static_cast<int64_t>(sizeof(IndexLine)); }
  int64_t home_lines() const { return view_.lines_above; }
  uint64_t salt() const { return view_.salt; }

 private:
  uint32_t home(int64_t id) const;
  bool may_search(int64_t id, int64_t line) const;
  void fill_free_places();

  Region region_;
  IndexView view_{};
  int64_t line_count_ = 0;
  int64_t capacity_ = 0;
  int64_t size_ = 0;
};

}  // namespace recstore
