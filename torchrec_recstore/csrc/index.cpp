#include "index.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace recstore {

Index::Index(uint64_t salt) : salt_(salt) {
  for (int half = 0; half < 2; ++half) {
    int64_t id = 0;
    while (static_cast<int>(hash(id) >> 63) == half) ++id;
    filler_[half] = id;
  }
  clear();
}

void Index::clear() {
  if (used_segments_ > 0) segments_.discard(0, size_t{used_segments_} * kEntries * sizeof(Entry));
  used_segments_ = 0;
  reserved_segments_ = 0;
  for (Part& part : parts_) part = Part{};
  reserve_inserts(0);
  for (int p = 0; p < kParts; ++p) parts_[p].directory.assign(1, new_segment(0, p));
}

void Index::reserve_inserts(int64_t count) {
  // Each insert can split its segment, and a new segment takes about half a segment of inserts before it splits again.
  // This reserves addresses only; new_segment() touches the pages.
  const uint64_t splits = std::min<uint64_t>(count, used_segments_) + count * 4 / kMaxEntries + kParts;
  const uint64_t wanted = used_segments_ + splits;
  if (wanted <= reserved_segments_) return;
  if (wanted > kNoSlot) throw OutOfMemory("the index holds at most 2**32 segments");
  segments_.reserve(wanted * kEntries * sizeof(Entry));
  infos_.reserve(wanted * sizeof(SegmentInfo));
  entries_ = reinterpret_cast<Entry*>(segments_.data());
  reserved_segments_ = static_cast<uint32_t>(wanted);
}

uint32_t Index::new_segment(int depth, int part) {
  const uint32_t number = __atomic_fetch_add(&used_segments_, 1, __ATOMIC_RELAXED);
  if (number >= reserved_segments_) {
    __atomic_fetch_sub(&used_segments_, 1, __ATOMIC_RELAXED);
    throw OutOfMemory("the index needs more segments than it has reserved");
  }
  std::fill_n(segment(number), kEntries, empty_entry(part));
  info(number) = {static_cast<uint16_t>(depth), 0};
  return number;
}

void Index::place(uint32_t segment_number, const Entry& entry, uint64_t hash) {
  Entry* entries = segment(segment_number);
  for (uint64_t line = hash % kLines;; line = (line + 1) % kLines) {
    Entry* e = entries + line * kLineEntries;
    for (int i = 0; i < kLineEntries; ++i) {
      if (e[i].slot == kNoSlot) {
        e[i] = entry;
        ++info(segment_number).size;
        return;
      }
    }
  }
}

void Index::split(Part& part, uint64_t hash) {
  const uint32_t old_number = part.directory[directory_index(hash, part.depth)];
  const int depth = info(old_number).depth;
  if (depth == kMaxDepth) throw OutOfMemory("the index cannot split a segment further");
  if (depth == part.depth) {
    std::vector<uint32_t> doubled(part.directory.size() * 2);
    for (size_t i = 0; i < doubled.size(); ++i) doubled[i] = part.directory[i / 2];
    part.directory.swap(doubled);
    ++part.depth;
  }
  const uint32_t new_number = new_segment(depth + 1, part_of(hash));
  std::array<Entry, kEntries> moved;
  std::copy_n(segment(old_number), kEntries, moved.begin());
  std::fill_n(segment(old_number), kEntries, empty_entry(part_of(hash)));
  info(old_number) = {static_cast<uint16_t>(depth + 1), 0};

  const size_t run = size_t{1} << (part.depth - depth);  // directory entries that refer to the old segment
  const size_t first = directory_index(hash, part.depth) / run * run;
  std::fill_n(part.directory.begin() + static_cast<int64_t>(first + run / 2), run / 2, new_number);
  for (const Entry& entry : moved) {
    if (entry.slot == kNoSlot) continue;
    const uint64_t h = this->hash(entry.id);
    place(part.directory[directory_index(h, part.depth)], entry, h);
  }
}

Slot Index::find_or_insert(int64_t id, uint64_t hash, Slot fresh) {
  const Entry* found = find_from(home_line(hash), id);
  if (found != nullptr) return found->slot;
  Part& part = parts_[part_of(hash)];
  uint32_t number = segment_of(hash);
  while (info(number).size >= kMaxEntries) {
    split(part, hash);
    number = segment_of(hash);
  }
  place(number, {id, fresh, 0}, hash);
  ++part.size;
  return fresh;
}

void Index::set_slot(int64_t id, uint64_t hash, Slot slot) {
  const_cast<Entry*>(find_from(home_line(hash), id))->slot = slot;
}

Slot Index::erase(int64_t id, uint64_t hash) {
  auto* hole = const_cast<Entry*>(find_from(home_line(hash), id));
  if (hole == nullptr) return kNoSlot;
  const Slot slot = hole->slot;
  const uint32_t number = segment_of(hash);
  Entry* entries = segment(number);
  // There are no tombstones. If a full line loses an entry, an entry that has probed past this line fills the hole, and
  // the line of that entry has a hole in turn.
  for (;;) {
    uint64_t line = static_cast<uint64_t>(hole - entries) / kLineEntries;
    Entry* last = entries + line * kLineEntries + kLineEntries - 1;
    const bool was_full = last->slot != kNoSlot;
    Entry* rightmost = last;
    while (rightmost->slot == kNoSlot) --rightmost;
    *hole = *rightmost;  // the line stays filled from the left
    *rightmost = empty_entry(part_of(hash));
    if (!was_full) break;
    hole = nullptr;
    for (uint64_t next = (line + 1) % kLines; hole == nullptr; next = (next + 1) % kLines) {
      Entry* e = entries + next * kLineEntries;
      for (int i = 0; i < kLineEntries && e[i].slot != kNoSlot; ++i) {
        const uint64_t home = this->hash(e[i].id) % kLines;
        // Whether its probe sequence, from home to next, passes the line with the hole.
        if ((next - home) % kLines >= (next - line) % kLines) {
          *last = e[i];
          hole = &e[i];
          break;
        }
      }
      if (hole == nullptr && e[kLineEntries - 1].slot == kNoSlot) break;
    }
    if (hole == nullptr) break;
  }
  --info(number).size;
  --parts_[part_of(hash)].size;
  return slot;
}

int64_t Index::size() const {
  int64_t total = 0;
  for (const Part& part : parts_) total += part.size;
  return total;
}

int64_t Index::bytes() const {
  int64_t total = int64_t{used_segments_} * (kEntries * sizeof(Entry) + sizeof(SegmentInfo));
  for (const Part& part : parts_) total += static_cast<int64_t>(part.directory.capacity() * sizeof(uint32_t));
  return total;
}

}  // namespace recstore
