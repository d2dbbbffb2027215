#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"

namespace recstore {

using Slot = uint32_t;
constexpr Slot kNoSlot = 0xFFFFFFFFu;

// Maps ids to slots: an extendible hash table.
//
// The top bits of an id's hash choose one of kParts independent parts, the next ones, through the
// part's directory, a segment of 4 KiB, and the low ones a line of four entries in it, from where
// probing goes on line by line. A full segment splits in two, so growth never moves more than 256
// entries at once, and every segment lies in one region of huge pages.
//
// Every int64 is a legal id: an empty entry holds an id that hashes to another part, so a probe
// compares ids alone. Thread safety: any number of concurrent find()s, or inserts and erases that
// run in parallel on different parts after reserve_inserts().
class Index {
 public:
  static constexpr int kPartBits = 6;
  static constexpr int kParts = 1 << kPartBits;

  struct Entry {
    int64_t id;
    Slot slot;
    uint32_t unused;
  };

  explicit Index(uint64_t salt);

  uint64_t hash(int64_t id) const {
    // Murmur3's 64-bit finaliser (A. Appleby, public domain): a bijection. The salt, random for each
    // table, keeps crafted ids from crowding one segment.
    uint64_t h = static_cast<uint64_t>(id) ^ salt_;
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdULL;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53ULL;
    h ^= h >> 33;
    return h;
  }
  static int part_of(uint64_t hash) { return static_cast<int>(hash >> (64 - kPartBits)); }

  // The line that an id is looked for in first. It lies in one cache line, as every line does.
  const Entry* home_line(uint64_t hash) const { return segment(segment_of(hash)) + (hash % kLines) * kLineEntries; }
  // The entry of `id` in one line, null where it has none there.
  static const Entry* find_in_line(const Entry* line, int64_t id) {
    // Four compares without a branch between them: which of them hits cannot be predicted.
    const unsigned hit = (line[0].id == id) | (line[1].id == id) << 1 | (line[2].id == id) << 2 | (line[3].id == id) << 3;
    return hit == 0 ? nullptr : line + __builtin_ctz(hit);
  }
  // Where the probing of an id goes on that is not in `line`; null where it ends, since lines fill from the left.
  const Entry* next_line(const Entry* line) const {
    if (line[kLineEntries - 1].slot == kNoSlot) return nullptr;
    const auto place = static_cast<size_t>(line - entries_);
    return entries_ + place / kEntries * kEntries + (place + kLineEntries) % kEntries;
  }
  // The entry of `id` in `line`, which may be null, or in those behind it.
  const Entry* find_from(const Entry* line, int64_t id) const {
    for (; line != nullptr; line = next_line(line)) {
      const Entry* entry = find_in_line(line, id);
      if (entry != nullptr) return entry;
    }
    return nullptr;
  }
  Slot find(int64_t id, uint64_t hash) const {
    const Entry* entry = find_from(home_line(hash), id);
    return entry == nullptr ? kNoSlot : entry->slot;
  }

  // Makes room for `count` inserts, anywhere. Only then may inserts run in parallel.
  void reserve_inserts(int64_t count);
  // The slot of `id`; where it has no entry, one with `fresh` is made. Throws OutOfMemory.
  Slot find_or_insert(int64_t id, uint64_t hash, Slot fresh);
  void set_slot(int64_t id, uint64_t hash, Slot slot);
  // The slot that `id` had, kNoSlot where it had none.
  Slot erase(int64_t id, uint64_t hash);
  void clear();

  int64_t size() const;
  int64_t bytes() const;

  // An entry lies in the segment where it was made until that splits, which moves it to a new, last one.
  uint32_t segments() const { return used_segments_; }
  template <class Visit>  // visit(int64_t id, Slot slot), in no order, for the entries of some segments
  void for_each(uint32_t first_segment, uint32_t end_segment, const Visit& visit) const {
    for (uint32_t s = first_segment; s < end_segment; ++s) {
      const Entry* entries = segment(s);
      for (int e = 0; e < kEntries; ++e) {
        if (entries[e].slot != kNoSlot) visit(entries[e].id, entries[e].slot);
      }
    }
  }

  template <class Map>  // slot = map(slot), for the entries of a segment
  void map_slots(uint32_t number, const Map& map) {
    Entry* entries = segment(number);
    for (int e = 0; e < kEntries; ++e) {
      if (entries[e].slot != kNoSlot) entries[e].slot = map(entries[e].slot);
    }
  }

 private:
  static constexpr int kLineEntries = 4;
  static constexpr int kLines = 64;
  static constexpr int kEntries = kLines * kLineEntries;
  static constexpr int kMaxEntries = kEntries * 7 / 8;
  static constexpr int kMaxDepth = 26;  // a part's directory: at most 2**26 segments

  struct Part {
    std::vector<uint32_t> directory;  // (1 << depth) segment numbers
    int depth = 0;
    int64_t size = 0;
  };
  struct SegmentInfo {
    uint16_t depth;  // of the bits that all its ids share within the part
    uint16_t size;
  };

  uint32_t segment_of(uint64_t hash) const {
    const Part& part = parts_[part_of(hash)];
    return part.directory[directory_index(hash, part.depth)];
  }
  // Two shifts, so that depth 0 is defined.
  static uint64_t directory_index(uint64_t hash, int depth) { return ((hash << kPartBits) >> 1) >> (63 - depth); }
  Entry* segment(uint32_t number) const { return entries_ + size_t{number} * kEntries; }
  SegmentInfo& info(uint32_t number) const { return reinterpret_cast<SegmentInfo*>(infos_.data())[number]; }

  void place(uint32_t segment_number, const Entry& entry, uint64_t hash);
  void split(Part& part, uint64_t hash);
  uint32_t new_segment(int depth, int part);
  Entry empty_entry(int part) const { return {filler_[part >> (kPartBits - 1)], kNoSlot, 0}; }

  uint64_t salt_;
  std::array<int64_t, 2> filler_{};  // by a part's top bit: an id that hashes to the other half
  std::array<Part, kParts> parts_;
  Region segments_;
  Region infos_;
  Entry* entries_ = nullptr;
  uint32_t used_segments_ = 0;
  uint32_t reserved_segments_ = 0;
};

}  // namespace recstore
