#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/memory.h"
#include "base/mix.h"
#include "base/prefetch.h"
#include "index/index_lines.h"

namespace recstore {

// Maps ids to slots: a hash table with open addressing over lines of five entries, a cache line each, in one region of
// huge pages.
//
// The upper 32 bits of an id's hash are its position, and position * lines / 2**32 is the number of its home line. The
// number of lines can therefore be any number, and an entry with a higher position never has a lower home. To grow by a
// fifth, the index moves entries to their new homes from the highest position down, in place and a few lines at a time,
// so that the growth takes place during the inserts that need it, and the index is equally full at every size.
//
// A search ends at a line that no entry has passed. A removed entry leaves its place to an entry that has passed the
// line, so that searches do not become longer when entries are removed and made again and again. At no other time but
// this and growth do entries move.
//
// Every int64 is a legal id. Thread safety: any number of concurrent calls of const functions; or, after reserve(),
// parallel calls of insert_within_part() for different parts; or parallel calls of erase_within_part() for different
// parts.
class Index {
 public:
  static constexpr int kPartBits = 6;
  static constexpr int kParts = 1 << kPartBits;
  static constexpr uint64_t kPositions = uint64_t{1} << 32;

  explicit Index(uint64_t salt);

  // The salt is random for each table, so that nobody can choose ids that all fall into one line.
  uint64_t hash(int64_t id) const { return mix(static_cast<uint64_t>(id) ^ salt_); }
  static int part_of(uint64_t hash) { return static_cast<int>(hash >> (64 - kPartBits)); }
  int part_of_id(int64_t id) const { return part_of(hash(id)); }
  static uint32_t position_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }
  RECSTORE_PREFETCHES void prefetch(uint64_t hash) const {
    __builtin_prefetch(lines() + view().home(position_of(hash)), 1, 3);
  }

  Slot find(int64_t id) const;
  // Writes the slot of each of ids (n,) to slots (n,); kNoSlot for an id without an entry. Returns the number of ids
  // without an entry.
  int64_t find(const int64_t* ids, int64_t n, Slot* slots) const;
  // Returns the id of a slot, whose entry has this position; nothing if there is no such entry.
  std::optional<int64_t> id_of(Slot slot, uint32_t position) const;
  RECSTORE_PREFETCHES void prefetch_position(uint32_t position) const {
    __builtin_prefetch(lines() + view().home(position), 0, 3);
  }

  // Makes room for `count` inserts. Entries may move. Throws OutOfMemory.
  void reserve(int64_t count);
  // Grows so that `count` inserts move no entries. Each of them needs reserve() all the same. Throws OutOfMemory.
  void grow_for(int64_t count);
  // Makes the entry of an id that has none.
  void insert(int64_t id, uint64_t hash, Slot slot) noexcept;
  // Like insert(), but changes only lines to which no other part has access. If the entry needs another line, nothing
  // changes, and the function returns false. Call inserted() with the number of these inserts when all have ended.
  bool insert_within_part(int64_t id, uint64_t hash, Slot slot) noexcept;
  void inserted(int64_t count) noexcept { size_ += count; }
  // Returns the slot that `id` had, or kNoSlot.
  Slot erase(int64_t id) noexcept;
  // Removes the entry of an id that has one, but touches only lines to which no other part has access. If that is not
  // possible, nothing changes, and the function returns false. Call inserted() with minus the number of these entries
  // when all calls have ended.
  bool erase_within_part(int64_t id, uint64_t hash) noexcept;
  void clear();

  int64_t size() const { return size_; }
  // Memory in use. A few lines after the last home are not counted, because their number depends on the salt.
  int64_t bytes() const { return int64_t{lines_above_} * static_cast<int64_t>(sizeof(IndexLine)); }

  // Number of lines that a search for this id reads, for tests.
  int64_t lines_searched(int64_t id) const;

  // Number of positions that contain this many entries on average; at least 1.
  uint64_t positions(int64_t entries) const;
  // Visits the entries of the positions [begin, end) in no particular order. An entry keeps its position, so that a
  // walk in several calls visits every entry once, even if the index grows meanwhile.
  template <class Visit>  // visit(int64_t id, Slot slot)
  void for_each(uint64_t begin, uint64_t end, const Visit& visit) const {
    for_each_place(begin, end, [&](const IndexLine& line, int entry) { visit(line.ids[entry], line.words[entry]); });
  }
  template <class Visit>
  void for_each(const Visit& visit) const {
    for_each(0, kPositions, visit);
  }
  template <class Map>  // slot = map(slot), for the entries of the positions [begin, end)
  void map_slots(uint64_t begin, uint64_t end, const Map& map) {
    for_each_place(begin, end, [&](IndexLine& line, int entry) { line.words[entry] = map(line.words[entry]); });
  }

 private:
  struct Place {
    uint32_t line;
    int entry;  // negative: there is none
  };
  struct Lines {
    uint32_t begin, end;
  };
  struct Moving {
    int64_t id;
    uint64_t hash;
    Slot slot;
    Place place;
  };

  IndexLine* lines() const { return reinterpret_cast<IndexLine*>(region_.data()); }
  IndexView view() const { return {lines(), salt_, frontier_, lines_below_, lines_above_}; }
  uint32_t end_line() const { return lines_above_ > last_line_ ? lines_above_ : last_line_ + 1; }

  template <class Visit>
  void for_each_place(uint64_t begin, uint64_t end, const Visit& visit) const {
    if (begin >= end) return;
    const uint32_t last = view().home(end - 1);
    for (uint32_t home = view().home(begin); home <= last; ++home) {
      for (uint32_t l = home, step = kFirstStep;; l += step, step = next_step(step)) {
        IndexLine& line = lines()[l];
        for (uint32_t used = line.used(); used != 0; used &= used - 1) {
          const int entry = __builtin_ctz(used);
          const uint64_t position = position_of(hash(line.ids[entry]));
          if (position >= begin && position < end && view().home(position) == home) visit(line, entry);
        }
        if (!line.passed()) break;
      }
    }
  }
  Place find_place(int64_t id, uint64_t hash, uint32_t end = kNoSlot) const;
  Lines lines_of_part(int part) const;
  template <class Visit>  // visit(last word), for the lines that an entry passes from its home to `line`
  void for_each_passed(uint32_t home, uint32_t line, const Visit& visit) noexcept {
    for (uint32_t l = home, step = kFirstStep; l < line; l += step, step = next_step(step)) {
      visit(lines()[l].words[kLineEntries]);
    }
  }
  void put(Place place, uint32_t home, int64_t id, Slot slot) noexcept;
  void take_out(Place place, uint32_t home) noexcept;
  void fill(Place place, Lines within) noexcept;
  Place passer_of(uint32_t line, Lines within, int32_t& left) const;
  Place free_place(uint32_t home, uint32_t end) const;
  void reserve_lines(uint64_t count);
  void begin_growths(int64_t entries);  // until there are places for so many entries
  void begin_growth(int64_t entries);
  void move_next_line();

  uint64_t salt_;
  Region region_;
  // Lines [0, unmoved_) of the lines before the growth still have their entries, whose positions are below frontier_.
  uint64_t frontier_ = 0;
  uint32_t unmoved_ = 0;
  uint32_t lines_below_ = 0;
  uint32_t lines_above_ = 0;
  uint32_t last_line_ = 0;  // no line after this one was ever used or searched
  int64_t size_ = 0;
  std::vector<Moving> moving_;
};

}  // namespace recstore
