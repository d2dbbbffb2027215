#include "index/index.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

constexpr uint32_t kFirstLines = 64;
// The index is between 72 and 86 % full. With fewer free places more ids would be searched in two lines; with more of
// them the index would need more memory.
constexpr double kMostFull = 0.86;
constexpr uint32_t kAhead = 32;         // lines that are prefetched ahead while the index grows
constexpr uint32_t kGrowth = 5;         // the index grows by one part in this many,
constexpr uint32_t kLeastGrowth = 256;  // and by this many lines at least
constexpr double kHaste = 2.0;          // it has grown when half of the new places are in use
// Lines for each removal: about 6 are, if nobody has chosen the ids for the salt.
constexpr int32_t kMostSearched = 256;

int64_t capacity(uint64_t lines) { return static_cast<int64_t>(static_cast<double>(lines) * kLineEntries * kMostFull); }
uint64_t grown(uint64_t lines) { return lines + std::max<uint64_t>(lines / kGrowth, kLeastGrowth); }

}  // namespace

Index::Index(uint64_t salt) : salt_(salt) { clear(); }

void Index::clear() {
  region_.discard(0, region_.reserved_bytes());
  lines_below_ = lines_above_ = kFirstLines;
  frontier_ = 0;
  unmoved_ = last_line_ = 0;
  size_ = 0;
  reserve_lines(0);
}

int64_t Index::find(const int64_t* ids, int64_t n, Slot* slots) const {
  return row_loops().find(view(), ids, n, slots);
}

Slot Index::find(int64_t id) const {
  const Place place = find_place(id, hash(id));
  return place.entry < 0 ? kNoSlot : lines()[place.line].words[place.entry];
}

// Searches the lines before `end`.
Index::Place Index::find_place(int64_t id, uint64_t hash, uint32_t end) const {
  for (uint32_t l = view().home(position_of(hash)), step = kFirstStep;; l += step, step = next_step(step)) {
    if (l >= end) return {l, -1};
    const IndexLine& line = lines()[l];
    for (uint32_t used = line.used(); used != 0; used &= used - 1) {
      const int entry = __builtin_ctz(used);
      if (line.ids[entry] == id) return {l, entry};
    }
    if (!line.passed()) return {l, -1};
  }
}

int64_t Index::lines_searched(int64_t id) const {
  const uint32_t end = find_place(id, hash(id)).line;
  int64_t lines = 1;
  for (uint32_t l = view().home(position_of(hash(id))), step = kFirstStep; l < end; step = next_step(step), ++lines) {
    l += step;
  }
  return lines;
}

std::optional<int64_t> Index::id_of(Slot slot, uint32_t position) const {
  for (uint32_t l = view().home(position), step = kFirstStep;; l += step, step = next_step(step)) {
    const IndexLine& line = lines()[l];
    for (uint32_t used = line.used(); used != 0; used &= used - 1) {
      const int entry = __builtin_ctz(used);
      if (line.words[entry] == slot) return line.ids[entry];
    }
    if (!line.passed()) return std::nullopt;
  }
}

// Returns the first free place before the line `end` for an entry with this home line.
Index::Place Index::free_place(uint32_t home, uint32_t end) const {
  for (uint32_t l = home, step = kFirstStep; l < end; l += step, step = next_step(step)) {
    const uint32_t used = lines()[l].used();
    if (used != IndexLine::kAll) return {l, __builtin_ctz(~used)};
  }
  return {end, -1};
}

void Index::put(Place place, uint32_t home, int64_t id, Slot slot) noexcept {
  IndexLine& line = lines()[place.line];
  line.ids[place.entry] = id;
  line.words[place.entry] = slot;
  line.words[kLineEntries] |= 1u << place.entry;
  for_each_passed(home, place.line, [](uint32_t& word) { word += IndexLine::kPassing; });
}

void Index::take_out(Place place, uint32_t home) noexcept {
  lines()[place.line].words[kLineEntries] &= ~(1u << place.entry);
  for_each_passed(home, place.line, [](uint32_t& word) { word -= IndexLine::kPassing; });
}

void Index::insert(int64_t id, uint64_t hash, Slot slot) noexcept {
  const uint32_t home = view().home(position_of(hash));
  const Place place = free_place(home, kNoSlot);
  put(place, home, id, slot);
  last_line_ = std::max(last_line_, place.line);
  ++size_;
}

// Returns the lines to which no other part has access: the first line of a part, and the first line of the next part,
// may be home to ids of two parts.
Index::Lines Index::lines_of_part(int part) const {
  constexpr int kPartPositions = 32 - kPartBits;
  const auto number = static_cast<uint64_t>(part);
  const IndexView v = view();
  return {v.home(number << kPartPositions) + 1,
          part + 1 == kParts ? lines_above_ : v.home((number + 1) << kPartPositions)};
}

bool Index::insert_within_part(int64_t id, uint64_t hash, Slot slot) noexcept {
  const Lines own = lines_of_part(part_of(hash));
  const uint32_t home = view().home(position_of(hash));
  if (home < own.begin) return false;
  const Place place = free_place(home, own.end);
  if (place.entry < 0) return false;
  put(place, home, id, slot);
  return true;
}

Slot Index::erase(int64_t id) noexcept {
  const uint64_t hash = this->hash(id);
  const Place place = find_place(id, hash);
  if (place.entry < 0) return kNoSlot;
  const Slot slot = lines()[place.line].words[place.entry];
  take_out(place, view().home(position_of(hash)));
  --size_;
  fill(place, {0, kNoSlot});
  return slot;
}

bool Index::erase_within_part(int64_t id, uint64_t hash) noexcept {
  const Lines own = lines_of_part(part_of(hash));
  const uint32_t home = view().home(position_of(hash));
  if (home < own.begin) return false;
  const Place place = find_place(id, hash, own.end);
  if (place.entry < 0) return false;
  take_out(place, home);
  fill(place, own);
  return true;
}

// Moves an entry that has passed the line of a free place to this place, then one to the place that the entry leaves,
// and so on. Otherwise entries would stay far from home for ever, and in a table that removes as many rows as it makes,
// searches would become longer and longer. No other lines than `within` are touched.
void Index::fill(Place place, Lines within) noexcept {
  int32_t left = kMostSearched;
  while (lines()[place.line].passed()) {
    const Place from = passer_of(place.line, within, left);
    if (from.entry < 0) return;
    const int64_t id = lines()[from.line].ids[from.entry];
    const Slot slot = lines()[from.line].words[from.entry];
    const uint32_t home = view().home(position_of(hash(id)));
    take_out(from, home);
    put(place, home, id, slot);
    place = from;
  }
}

// Returns an entry that has passed this line, of the nearest home that has one. Each line that is searched is taken
// from `left`, and if none is left, there is no entry.
Index::Place Index::passer_of(uint32_t line, Lines within, int32_t& left) const {
  for (uint32_t home = line, back = kFirstStep;; home -= back, back = next_step(back)) {
    for (uint32_t l = home, step = kFirstStep; lines()[l].passed(); step = next_step(step)) {
      if (--left < 0) return {line, -1};
      l += step;
      if (l >= within.end) break;
      if (l <= line) continue;
      for (uint32_t used = lines()[l].used(); used != 0; used &= used - 1) {
        const int entry = __builtin_ctz(used);
        if (view().home(position_of(hash(lines()[l].ids[entry]))) == home) return {l, entry};
      }
    }
    if (home - within.begin < back) return {line, -1};
  }
}

// Makes room for `count` inserts: an insert goes beyond the last line that was ever used by kMostStep lines at most,
// and only from a full line.
void Index::reserve_lines(uint64_t count) {
  const uint64_t wanted = end_line() + kMostStep * (count / kLineEntries + 1);
  if (wanted > kNoSlot) throw OutOfMemory("the index holds at most 2**32 lines");
  region_.reserve(wanted * sizeof(IndexLine));
}

void Index::grow_for(int64_t count) {
  begin_growths(size() + count);
  while (unmoved_ > 0) move_next_line();
}

void Index::begin_growths(int64_t entries) {
  while (entries > capacity(lines_above_)) {
    while (unmoved_ > 0) move_next_line();
    begin_growth(entries);
  }
}

void Index::reserve(int64_t count) {
  const int64_t wanted = size() + count;
  begin_growths(wanted);
  if (unmoved_ > 0) {
    const auto before = static_cast<double>(capacity(lines_below_)),
               after = static_cast<double>(capacity(lines_above_));
    const double moved = kHaste * (static_cast<double>(wanted) - before) / (after - before);
    const auto left = static_cast<uint32_t>(std::max(0.0, 1.0 - moved) * lines_below_);
    while (unmoved_ > left) move_next_line();
  }
  reserve_lines(static_cast<uint64_t>(count));
}

void Index::begin_growth(int64_t entries) {
  uint64_t lines = grown(lines_above_);
  if (entries > capacity(lines)) {
    lines = std::max(lines, static_cast<uint64_t>(static_cast<double>(entries) / (kLineEntries * kMostFull)) + 1);
  }
  if (lines > kNoSlot) throw OutOfMemory("the index holds at most 2**32 lines");
  region_.reserve(lines * sizeof(IndexLine));
  lines_below_ = lines_above_;
  lines_above_ = static_cast<uint32_t>(lines);
  unmoved_ = lines_below_;
  frontier_ = kPositions;
}

// Moves the entries of the last line before the frontier to their new homes.
void Index::move_next_line() {
  const uint32_t old_home = unmoved_ - 1;
  // The lowest position of the line.
  const uint64_t begin = ((uint64_t{old_home} << 32) + lines_below_ - 1) / lines_below_;
  uint32_t last = old_home, searched = 1;  // the last of the lines that may have entries of this home, and their number
  for (uint32_t step = kFirstStep; lines()[last].passed(); step = next_step(step), ++searched) last += step;
  const auto target = static_cast<uint32_t>(begin * lines_above_ >> 32);  // the first of their new homes
  __builtin_prefetch(lines() + (old_home > kAhead ? old_home - kAhead : 0), 1, 3);
  __builtin_prefetch(lines() + (target > kAhead ? target - kAhead : 0), 1, 3);
  reserve_lines(uint64_t{searched} * kLineEntries);
  moving_.clear();
  if (target <= last) moving_.reserve(size_t{searched} * kLineEntries);
  const uint64_t end = frontier_;
  frontier_ = begin;
  unmoved_ = old_home;
  if (unmoved_ == 0) lines_below_ = lines_above_;
  const auto move = [&](const Moving& entry) {
    take_out(entry.place, old_home);
    --size_;
    insert(entry.id, entry.hash, entry.slot);
  };
  for (uint32_t l = old_home, step = kFirstStep; l <= last; l += step, step = next_step(step)) {
    const IndexLine& line = lines()[l];
    for (uint32_t used = line.used(); used != 0; used &= used - 1) {
      const int entry = __builtin_ctz(used);
      const uint64_t hash = this->hash(line.ids[entry]), position = position_of(hash);
      if (position < begin || position >= end) continue;
      const Moving found{line.ids[entry], hash, line.words[entry], {l, entry}};
      if (target > last) {
        move(found);
      } else {  // one of the lines that are searched may be its new place
        moving_.push_back(found);
      }
    }
  }
  for (const Moving& entry : moving_) move(entry);
}

uint64_t Index::positions(int64_t entries) const {
  return std::max<uint64_t>(
      1, kPositions / lines_above_ * static_cast<uint64_t>(std::max<int64_t>(1, entries / kLineEntries)));
}

}  // namespace recstore
