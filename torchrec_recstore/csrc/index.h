#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory.h"
#include "mix.h"

namespace recstore {

using Slot = uint32_t;
constexpr Slot kNoSlot = 0xFFFFFFFFu;

// Maps ids to slots: an extendible hash table.
//
// The top bits of an id's hash select one of kParts independent parts. The next bits select a segment of 4 KiB through
// the directory of the part. The low bits select a line of four entries in the segment; probing continues line by line.
// A full segment splits in two, so that growth never moves more than 256 entries at once. All segments are in one
// region of huge pages.
//
// Every int64 is a legal id: an empty entry holds an id that hashes to another part, so that a probe compares ids
// alone. Thread safety: any number of concurrent find() calls; or, after reserve_inserts(), parallel inserts and erases
// on different parts.
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

  // The salt is random for each table, so that nobody can choose ids that all fall into one segment.
  uint64_t hash(int64_t id) const { return mix(static_cast<uint64_t>(id) ^ salt_); }
  static int part_of(uint64_t hash) { return static_cast<int>(hash >> (64 - kPartBits)); }

  // The line in which the search for an id begins. Every line is one cache line.
  const Entry* home_line(uint64_t hash) const { return segment(segment_of(hash)) + (hash % kLines) * kLineEntries; }
  // Returns the entry of `id` in one line; null if the line has none.
  static const Entry* find_in_line(const Entry* line, int64_t id) {
    // Four comparisons without a branch, because it cannot be predicted which of them succeeds.
    const unsigned hit = (line[0].id == id) | (line[1].id == id) << 1 | (line[2].id == id) << 2 | (line[3].id == id) << 3;
    return hit == 0 ? nullptr : line + __builtin_ctz(hit);
  }
  // Returns the line to search after `line`; null if the probe sequence ends there, because lines fill from the left.
  const Entry* next_line(const Entry* line) const {
    if (line[kLineEntries - 1].slot == kNoSlot) return nullptr;
    const auto place = static_cast<size_t>(line - entries_);
    return entries_ + place / kEntries * kEntries + (place + kLineEntries) % kEntries;
  }
  // Returns the entry of `id` in `line` or in the lines after it; null if there is none. `line` may be null.
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

  // Makes room for `count` inserts of any ids. Only after this call may inserts run in parallel.
  void reserve_inserts(int64_t count);
  // Returns the slot of `id`. If the id has no entry, makes an entry with the slot `fresh`. Throws OutOfMemory.
  Slot find_or_insert(int64_t id, uint64_t hash, Slot fresh);
  void set_slot(int64_t id, uint64_t hash, Slot slot);
  // Returns the slot that `id` had, or kNoSlot.
  Slot erase(int64_t id, uint64_t hash);
  void clear();

  int64_t size() const;
  int64_t bytes() const;

  // An entry stays in its segment until the segment splits; the split may move it to a new, last segment.
  uint32_t segments() const { return used_segments_; }
  template <class Visit>  // visit(int64_t id, Slot slot), in no particular order, for the entries of some segments
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
  static constexpr int kMaxDepth = 26;  // a directory has at most 2**26 entries

  struct Part {
    std::vector<uint32_t> directory;  // (1 << depth) segment numbers
    int depth = 0;
    int64_t size = 0;
  };
  struct SegmentInfo {
    uint16_t depth;  // number of bits that all ids of the segment share within the part
    uint16_t size;
  };

  uint32_t segment_of(uint64_t hash) const {
    const Part& part = parts_[part_of(hash)];
    return part.directory[directory_index(hash, part.depth)];
  }
  // Two shifts, because one shift by 64 bits, for depth 0, would be undefined.
  static uint64_t directory_index(uint64_t hash, int depth) { return ((hash << kPartBits) >> 1) >> (63 - depth); }
  Entry* segment(uint32_t number) const { return entries_ + size_t{number} * kEntries; }
  SegmentInfo& info(uint32_t number) const { return reinterpret_cast<SegmentInfo*>(infos_.data())[number]; }

  void place(uint32_t segment_number, const Entry& entry, uint64_t hash);
  void split(Part& part, uint64_t hash);
  uint32_t new_segment(int depth, int part);
  Entry empty_entry(int part) const { return {filler_[part >> (kPartBits - 1)], kNoSlot, 0}; }

  uint64_t salt_;
  std::array<int64_t, 2> filler_{};  // by the top bit of a part: an id that hashes to a part of the other half
  std::array<Part, kParts> parts_;
  Region segments_;
  Region infos_;
  Entry* entries_ = nullptr;
  uint32_t used_segments_ = 0;
  uint32_t reserved_segments_ = 0;
};

}  // namespace recstore
