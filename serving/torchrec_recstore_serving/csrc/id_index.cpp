#include "id_index.h"

#include <algorithm>

#include "base/error.h"
#include "base/mix.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

// A fuller index would search more ids in two lines; an emptier index would take more memory and time to load.
constexpr double kMostFull = 0.86;
constexpr int64_t kLeastLines = 64;
// Lines after the last home line, for the entries of full lines. The last kMostStep of them are never passed, so that a
// search ends before the end of the lines.
constexpr int64_t kLinesAfter = 256;

int64_t capacity_of(int64_t lines) {
  return static_cast<int64_t>(static_cast<double>(lines * kLineEntries) * kMostFull);
}

}  // namespace

int64_t IdIndex::bytes_of(int64_t home_lines) {
  return (home_lines + kLinesAfter) * static_cast<int64_t>(sizeof(IndexLine));
}

IdIndex::IdIndex(int64_t capacity, uint64_t salt) {
  const int64_t homes =
      std::max(kLeastLines, static_cast<int64_t>(static_cast<double>(capacity) / (kLineEntries * kMostFull)) + 1);
  if (homes + kLinesAfter > int64_t{kNoSlot}) throw OutOfMemory("the index holds at most 2**32 lines");
  line_count_ = homes + kLinesAfter;
  region_.reserve(static_cast<size_t>(bytes()));
  view_ = {reinterpret_cast<IndexLine*>(region_.data()), salt, 0, static_cast<uint32_t>(homes),
           static_cast<uint32_t>(homes)};
  capacity_ = capacity_of(homes);
  fill_free_places();
}

IdIndex::IdIndex(char* lines, int64_t bytes, int64_t home_lines, int64_t size, uint64_t salt) {
  line_count_ = bytes / static_cast<int64_t>(sizeof(IndexLine));
  const bool fits = home_lines >= 1 && line_count_ <= int64_t{kNoSlot} && line_count_ == home_lines + kLinesAfter &&
                    bytes == this->bytes() && reinterpret_cast<uintptr_t>(lines) % alignof(IndexLine) == 0;
  if (!fits) throw InvalidArgument("the index of the file does not have the size that it states");
  view_ = {reinterpret_cast<IndexLine*>(lines), salt, 0, static_cast<uint32_t>(home_lines),
           static_cast<uint32_t>(home_lines)};
  for (int64_t l = line_count_ - kMostStep; l < line_count_; ++l) {
    if (view_.lines[l].passed()) throw InvalidArgument("the index of the file is damaged");
  }
  capacity_ = capacity_of(home_lines);
  size_ = size;
}

uint32_t IdIndex::home(int64_t id) const { return view_.home(mix(static_cast<uint64_t>(id) ^ view_.salt) >> 32); }

// Whether a search for the id may look in a line: in its home line, and 1, 3, 6, 10, 14, ... lines after it.
bool IdIndex::may_search(int64_t id, int64_t line) const {
  const int64_t distance = line - home(id);
  return distance == 0 || distance == 1 || distance == 3 || (distance >= 6 && (distance - 6) % kMostStep == 0);
}

// The id of a free place is zero, except in the lines in which a search for zero may look.
void IdIndex::fill_free_places() {
  for (int64_t l = home(0); l < line_count_; ++l) {
    int64_t filler = 0;
    while (may_search(filler, l)) ++filler;
    if (filler != 0) std::fill_n(view_.lines[l].ids, kLineEntries, filler);
  }
}

void IdIndex::find(const int64_t* ids, int64_t n, Slot* slots) const { row_loops().find(view_, ids, n, slots); }

void IdIndex::prefetch(int64_t id) const { __builtin_prefetch(view_.lines + home(id), 1, 3); }

bool IdIndex::insert(int64_t id, Slot slot) noexcept {
  const uint32_t home = this->home(id);
  const int64_t end = line_count_ - kMostStep;
  uint32_t l = home;
  for (uint32_t step = kFirstStep; view_.lines[l].used() == IndexLine::kAll; l += step, step = next_step(step)) {
    if (l >= end) return false;
  }
  IndexLine& line = view_.lines[l];
  const int entry = __builtin_ctz(~line.used());
  line.words[entry] = slot;
  __atomic_store_n(&line.ids[entry], id, __ATOMIC_RELEASE);
  __atomic_store_n(&line.words[kLineEntries], line.words[kLineEntries] | 1u << entry, __ATOMIC_RELEASE);
  for (uint32_t p = home, step = kFirstStep; p < l; p += step, step = next_step(step)) {
    uint32_t& word = view_.lines[p].words[kLineEntries];
    __atomic_store_n(&word, word + IndexLine::kPassing, __ATOMIC_RELEASE);
  }
  ++size_;
  return true;
}

}  // namespace recstore
