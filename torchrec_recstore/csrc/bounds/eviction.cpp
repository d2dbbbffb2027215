#include "bounds/eviction.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "base/mix.h"
#include "base/parts.h"
#include "bounds/row_uses.h"

namespace recstore {
namespace {

// One row in this many of a full table moves to its cold store at once, or at most kMostAtOnce, so that no step waits
// for many more rows than it needs.
constexpr int64_t kPart = 32;
constexpr int64_t kMostAtOnce = 4096;
constexpr int64_t kExpiryParts = 4;     // number of searches for expired rows within Expiry.steps
constexpr int64_t kTaskEntries = 4096;  // entries of the index in a task
constexpr int64_t kRoundWalks = 128;    // tasks whose results are joined at once: at most 11 MB
constexpr int64_t kTaskSlots = 1 << 13;
constexpr uint32_t kNoClass = 0xFFFF;
constexpr int64_t kQueuePart = 32;  // one row in this many of a full table is in its queue
constexpr int64_t kLeastQueue = 1024;
constexpr int64_t kSettled = 4;    // rows of the next era's queue that are checked for each row that is evicted
constexpr size_t kMetaAhead = 32;  // rows whose bookkeeping is prefetched
constexpr size_t kSample = 3072;

// A monotone map of 32-bit values to few classes. Values below 2**kBits map to themselves; larger values are told apart
// by their leading kBits + 1 bits.
template <int kBits>
constexpr uint32_t coarse(uint32_t value) {
  if (value < (1u << kBits)) return value;
  const int shift = 31 - __builtin_clz(value) - kBits;
  return (static_cast<uint32_t>(shift + 1) << kBits) + ((value >> shift) & ((1u << kBits) - 1));
}
template <int kBits>
constexpr uint32_t kCoarseValues = coarse<kBits>(0xFFFFFFFFu) + 1;

// The eviction policies. Rows of lower rank are evicted first. class_of() is coarser than rank(): a row of a lower
// class has a lower rank.
struct LeastRecent {
  static constexpr uint32_t kClasses = kCoarseValues<6>;
  static constexpr bool kArrivalsRankLow = false;
  uint32_t now;

  uint32_t era() const { return 0; }
  std::optional<LeastRecent> in_next_era() const { return {}; }

  uint64_t rank(const RowMeta& meta) const { return meta.last_step; }
  uint32_t class_of(const RowMeta& meta) const {
    return kClasses - 1 - coarse<6>(meta.last_step < now ? now - meta.last_step : 0);
  }
};

struct LeastFrequent {
  static constexpr uint32_t kAges = kCoarseValues<3>;
  static constexpr uint32_t kClasses = kCoarseValues<3> * kAges;
  static constexpr bool kArrivalsRankLow = true;
  uint32_t now;
  uint32_t half_life;

  uint32_t era() const { return half_life == 0 ? 0 : now / half_life; }
  // The policy at the next halving.
  std::optional<LeastFrequent> in_next_era() const {
    const uint64_t begin = (uint64_t{era()} + 1) * half_life;
    if (half_life == 0 || begin > UINT32_MAX) return {};
    return LeastFrequent{static_cast<uint32_t>(begin), half_life};
  }

  uint32_t frequency(const RowMeta& meta) const { return aged_frequency(meta, now, half_life); }
  uint64_t rank(const RowMeta& meta) const { return uint64_t{frequency(meta)} << 32 | meta.last_step; }
  uint32_t class_of(const RowMeta& meta) const {
    const uint32_t times = frequency(meta);
    const uint32_t age = meta.last_step < now ? now - meta.last_step : 0;
    // From 16 on, a class contains several frequencies. The frequency ranks before the age, so the age is left out.
    return coarse<3>(times) * kAges + (times < 16 ? kAges - 1 - coarse<3>(age) : 0);
  }
};

struct LeastScored {
  static constexpr int kClassBits = 15;
  static constexpr uint32_t kClasses = 1u << kClassBits;
  static constexpr bool kArrivalsRankLow = true;  // set_scores() notes the rows whose ranks it lowers as arrivals
  uint32_t now;
  uint32_t unscored;

  uint32_t era() const { return 0; }
  std::optional<LeastScored> in_next_era() const { return {}; }

  uint64_t rank(const RowMeta& meta) const { return uint64_t{score_rank(meta, unscored)} << 32 | meta.last_step; }
  uint32_t class_of(const RowMeta& meta) const { return score_rank(meta, unscored) >> (32 - kClassBits); }
};

struct Candidate {
  uint64_t rank;
  uint64_t mixed_id;
  Slot slot;
  bool operator<(const Candidate& other) const {
    if (rank != other.rank) return rank < other.rank;
    return mixed_id < other.mixed_id;
  }
};

// Returns the slots for which test(slot) is true, among all slots that were ever handed out.
template <class Test>
SlotSet slots_where(const Rows& rows, Executor& executor, const Test& test) {
  const int64_t slots = rows.slots();
  SlotSet matching(slots);
  // Each task writes words of its own.
  for_each_task(executor, (slots + kTaskSlots - 1) / kTaskSlots, [&](int64_t task) {
    for (int64_t s = task * kTaskSlots; s < std::min((task + 1) * kTaskSlots, slots); ++s) {
      if (test(static_cast<Slot>(s))) matching.add(static_cast<Slot>(s));
    }
  });
  return matching;
}

// Appends make(id, slot) for every row whose slot is in `slots`, in no particular order. cut(out) is called from time
// to time and may drop elements.
template <class T, class Make, class Cut>
void append_each_of(const Table& table, const SlotSet& slots, Executor& executor, const Make& make, std::vector<T>& out,
                    const Cut& cut) {
  const Index& index = table.index();
  const uint64_t positions = index.positions(kTaskEntries);
  const auto walks = static_cast<int64_t>((Index::kPositions + positions - 1) / positions);
  for (int64_t round = 0; round < walks; round += kRoundWalks) {
    std::vector<std::vector<T>> parts(static_cast<size_t>(std::min(kRoundWalks, walks - round)));
    for_each_task(executor, static_cast<int64_t>(parts.size()), [&](int64_t part) {
      const int64_t walk = round + part;
      const uint64_t first = static_cast<uint64_t>(walk) * positions;
      index.for_each(first, std::min(first + positions, Index::kPositions), [&](int64_t id, Slot slot) {
        if (slots.contains(slot)) parts[part].push_back(make(id, slot));
      });
    });
    for (const auto& part : parts) out.insert(out.end(), part.begin(), part.end());
    cut(out);
  }
}

template <class Policy>
std::vector<Leaver> least(const Table& table, const Policy& policy, const SlotSet& kept, int64_t count,
                          Executor& executor) {
  const Rows& rows = table.rows();
  const int64_t slots = rows.slots();
  SlotSet left_out = kept;  // kept slots, and slots without a row
  rows.for_each_free([&](Slot slot) { left_out.add(slot); });

  static_assert(Policy::kClasses <= kNoClass);
  std::vector<uint16_t> classes(static_cast<size_t>(slots));
  const int64_t tasks = (slots + kTaskSlots - 1) / kTaskSlots;
  std::vector<std::vector<uint32_t>> counts(static_cast<size_t>(executor.threads()));
  for_each_task(executor, tasks, [&](int64_t task, int worker) {
    counts[worker].resize(Policy::kClasses);
    for (int64_t s = task * kTaskSlots; s < std::min((task + 1) * kTaskSlots, slots); ++s) {
      const auto slot = static_cast<Slot>(s);
      classes[s] = kNoClass;
      if (left_out.contains(slot)) continue;
      const uint32_t of_slot = policy.class_of(rows.meta(slot));
      classes[s] = static_cast<uint16_t>(of_slot);
      ++counts[worker][of_slot];
    }
  });
  uint32_t last_class = 0;
  int64_t rows_up_to_class = 0;
  for (; last_class < Policy::kClasses; ++last_class) {
    for (const auto& worker_counts : counts) {
      if (!worker_counts.empty()) rows_up_to_class += worker_counts[last_class];
    }
    if (rows_up_to_class >= count) break;
  }
  if (rows_up_to_class == 0) return {};
  last_class = std::min(last_class, Policy::kClasses - 1);

  const SlotSet wanted = slots_where(rows, executor, [&](Slot slot) { return classes[slot] <= last_class; });
  // A class may contain all rows of the table, for example after a load. Only as many candidates as needed are kept.
  std::vector<Candidate> candidates;
  const auto cut_above = [&](int64_t most) {
    if (static_cast<int64_t>(candidates.size()) <= most) return;
    std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end());
    candidates.resize(static_cast<size_t>(count));
  };
  const auto candidate_of = [&](int64_t id, Slot slot) {
    return Candidate{policy.rank(rows.meta(slot)), mix(static_cast<uint64_t>(id)), slot};
  };
  append_each_of(table, wanted, executor, candidate_of, candidates, [&](auto&) { cut_above(2 * count); });
  cut_above(count);
  std::vector<Leaver> leavers;
  leavers.reserve(candidates.size());
  for (const Candidate& candidate : candidates) {
    leavers.push_back({static_cast<int64_t>(unmix(candidate.mixed_id)), candidate.slot});
  }
  return leavers;
}

template <class Ranked>
bool ranks_above(const Ranked& row, const Ranked& other) {
  return other < row;
}

// Returns the row with this place in a sample of kSample rows.
template <class Ranked>
Ranked part_of_sample(const std::vector<Ranked>& rows, size_t place) {
  std::vector<Ranked> sample(kSample);
  for (size_t i = 0; i < kSample; ++i) sample[i] = rows[i * rows.size() / kSample];
  std::nth_element(sample.begin(), sample.begin() + place, sample.end());
  return sample[place];
}

// Returns how many rows a queue has.
int64_t queue_rows(const Table& table) { return std::max(table.config().bounds.max_rows / kQueuePart, kLeastQueue); }

template <class Call>  // call(policy)
auto by_policy(const Table& table, const Call& call) {
  const auto now = static_cast<uint32_t>(table.clock());
  const Bounds& bounds = table.config().bounds;
  switch (bounds.eviction) {
    case Eviction::kLeastFrequent:
    case Eviction::kLeastOccurring: return call(LeastFrequent{now, static_cast<uint32_t>(bounds.half_life)});
    case Eviction::kLeastScored: return call(LeastScored{now, bounds.unscored});
    case Eviction::kNone:
    case Eviction::kLeastRecent: break;
  }
  return call(LeastRecent{now});
}

}  // namespace

std::vector<Leaver> least_rows(const Table& table, const SlotSet& kept, int64_t count, Executor& executor) {
  return by_policy(table, [&](const auto& policy) { return least(table, policy, kept, count, executor); });
}

std::vector<Leaver> EvictionQueue::next(const Table& table, const SlotSet& kept, int64_t count,
                                        Executor& executor) try {
  put_offered_back();  // they were not evicted
  if (count > queue_rows(table)) return least_rows(table, kept, count, executor);
  return by_policy(table, [&](const auto& policy) { return next_by(policy, table, kept, count, executor); });
} catch (...) {
  reset();
  throw;
}

void EvictionQueue::reserve(int64_t rows) {
  // A table to which rows return without evictions does not need the queue.
  if (static_cast<int64_t>(arrivals_.size()) > 4 * most_) reset();
  if (notes_arrivals_) reserve_more(arrivals_, static_cast<size_t>(rows));
  if (!next_era_) return;
  next_era_->reserve(rows);
  if (!next_era_->notes_arrivals_) next_era_.reset();  // it has forgotten everything, and has no room for arrivals
}

void EvictionQueue::prepare(const Table& table, int64_t new_rows, Executor& executor) try {
  const int64_t most = table.config().bounds.max_rows;
  const int64_t room = most - table.size();
  if (ready_ || new_rows == 0 || room > most / kQueuePart) return;
  const double part = static_cast<double>(new_rows) / static_cast<double>(std::max<int64_t>(1, room));
  by_policy(table, [&](const auto& policy) {
    enter_era(policy);
    walk(policy, table, part, executor);
  });
} catch (...) {
  reset();
  throw;
}

template <class Policy>
void EvictionQueue::enter_era(const Policy& policy) {
  if (policy.era() == era_ || (!ready_ && !walking_)) return;
  const std::unique_ptr<EvictionQueue> next = std::move(next_era_);
  if (next && next->era_ == policy.era()) {
    next->last_next_ = last_next_;
    *this = std::move(*next);
  } else {
    reset();
  }
}

// Continues to fill the queue of the next era, so that it is full when the era begins, if evictions go on as since the
// last one. This begins when they will take fewer than half of the rows that the queue can have. The walk takes half of
// the time that is left. In the other half, the rows that leave in the meantime are taken out.
template <class Policy>
void EvictionQueue::prepare_next_era(const Policy& policy, const Table& table, int64_t count, Executor& executor) {
  const std::optional<Policy> next = policy.in_next_era();
  if (!next) return;
  const uint32_t last = std::exchange(last_next_, policy.now);
  if (last == 0) return;  // how far apart evictions are is not known yet
  const uint32_t apart = std::max<uint32_t>(1, policy.now - last);
  if (!next_era_) {
    if ((next->now - policy.now) / apart > queue_rows(table) / 2 / count) return;
    next_era_ = std::make_unique<EvictionQueue>();
    next_era_->last_next_ = policy.now;
  }
  next_era_->rank_arrivals(*next, table);
  if (!next_era_->ready_) {
    const uint32_t middle = next_era_->last_next_ + (next->now - next_era_->last_next_) / 2;
    const double part = policy.now < middle ? static_cast<double>(apart) / (middle - policy.now) : 1;
    return next_era_->walk(*next, table, part, executor);
  }
  for (int64_t i = 0; i < kSettled * count && !next_era_->queue_.empty(); ++i) {
    if (next_era_->first_row(*next, table) != kNoSlot) return;
  }
}

// Visits this part of the rest of the walk.
template <class Policy>
void EvictionQueue::walk(const Policy& policy, const Table& table, double part, Executor& executor) {
  const Index& index = table.index();
  const Rows& rows = table.rows();
  if (!walking_) {
    walking_ = true;
    // A row that returns from a cold store may rank where it was.
    notes_arrivals_ = Policy::kArrivalsRankLow || table.config().bounds.cold_store;
    position_ = 0;
    since_ = policy.now;
    era_ = policy.era();
    most_ = queue_rows(table);
    bound_ = first_bound(policy, table);
    lowest_.clear();
    passed_.clear();
  }
  const uint64_t positions = index.positions(kTaskEntries);
  uint64_t end = Index::kPositions;
  if (part < 1) {
    const uint64_t positions_left = Index::kPositions - position_;
    const auto positions_of_part = static_cast<uint64_t>(part * static_cast<double>(positions_left)) + 1;
    end = position_ + std::min(positions_left, positions_of_part);
  }
  while (position_ < end) {
    const auto tasks =
        static_cast<int64_t>(std::min<uint64_t>(kRoundWalks, (end - position_ + positions - 1) / positions));
    std::vector<std::vector<Ranked>> parts(static_cast<size_t>(tasks));
    for_each_task(executor, tasks, [&](int64_t task) {
      const uint64_t first = position_ + static_cast<uint64_t>(task) * positions;
      std::array<std::pair<int64_t, Slot>, kMetaAhead> ahead;
      size_t visited = 0;
      const auto look = [&](size_t entry) {
        const auto [id, slot] = ahead[entry % kMetaAhead];
        const Ranked ranked{policy.rank(rows.meta(slot)), mix(static_cast<uint64_t>(id))};
        if (ranked < bound_ && !(ranked < limit_)) parts[task].push_back(ranked);  // below limit_ it is in the queue
      };
      index.for_each(first, std::min(first + positions, end), [&](int64_t id, Slot slot) {
        __builtin_prefetch(&rows.meta(slot));
        if (visited >= kMetaAhead) look(visited);
        ahead[visited++ % kMetaAhead] = {id, slot};
      });
      for (size_t entry = visited - std::min(visited, kMetaAhead); entry < visited; ++entry) look(entry);
    });
    position_ = std::min(end, position_ + static_cast<uint64_t>(tasks) * positions);
    for (const auto& some : parts) lowest_.insert(lowest_.end(), some.begin(), some.end());
    if (static_cast<int64_t>(lowest_.size()) > most_ + most_ / 2) cut();
  }
  if (position_ == Index::kPositions) end_walk();
}

// Returns the rank below which a sample has five quarters of the rows that a walk keeps. Nothing depends on which rows
// are in the sample: the first ones of the index are as good as any, because their hashes have a salt.
template <class Policy>
EvictionQueue::Ranked EvictionQueue::first_bound(const Policy& policy, const Table& table) const {
  const Index& index = table.index();
  std::vector<Ranked> sample;
  double visited = 0;
  index.for_each(0, std::min(index.positions(kSample), Index::kPositions), [&](int64_t id, Slot slot) {
    const Ranked ranked{policy.rank(table.rows().meta(slot)), mix(static_cast<uint64_t>(id))};
    if (!(ranked < limit_)) sample.push_back(ranked);
    ++visited;
  });
  if (sample.empty()) return {UINT64_MAX, UINT64_MAX};
  const auto below =
      static_cast<size_t>(1.25 * visited * static_cast<double>(most_) / static_cast<double>(table.size()));
  if (below >= sample.size()) return {UINT64_MAX, UINT64_MAX};
  std::nth_element(sample.begin(), sample.begin() + below, sample.end());
  return sample[below];
}

// Drops about a third of the rows. A sample tells which, because an exact rank would take several times as long.
void EvictionQueue::cut() {
  bound_ = part_of_sample(lowest_, kSample * 2 / 3);
  lowest_.erase(std::remove_if(lowest_.begin(), lowest_.end(), [&](const Ranked& row) { return !(row < bound_); }),
                lowest_.end());
}

void EvictionQueue::Queue::push(const Ranked& row) {
  if (heap_.empty() || highest_ < row) return rest_.push_back(row);
  heap_.push_back(row);
  std::push_heap(heap_.begin(), heap_.end(), ranks_above<Ranked>);
}

void EvictionQueue::Queue::push(std::vector<Ranked>& rows) {
  if (empty()) {
    rest_.swap(rows);
  } else {
    for (const Ranked& row : rows) push(row);
  }
  rows.clear();
}

const EvictionQueue::Ranked& EvictionQueue::Queue::first() {
  if (heap_.empty()) {
    highest_ = rest_.size() < 4 * kSample ? Ranked{UINT64_MAX, UINT64_MAX} : part_of_sample(rest_, kSample / 8);
    const auto begin = std::partition(rest_.begin(), rest_.end(), [&](const Ranked& row) { return highest_ < row; });
    heap_.assign(begin, rest_.end());
    rest_.erase(begin, rest_.end());
    std::make_heap(heap_.begin(), heap_.end(), ranks_above<Ranked>);
  }
  return heap_.front();
}

EvictionQueue::Ranked EvictionQueue::Queue::pop() {
  const Ranked row = first();
  std::pop_heap(heap_.begin(), heap_.end(), ranks_above<Ranked>);
  heap_.pop_back();
  return row;
}

// Makes the queue of what the walk has found.
void EvictionQueue::end_walk() {
  queue_.push(lowest_);
  // Under LRU, rows that were made since the walk began are not noted, and rank no lower than this.
  limit_ = notes_arrivals_ ? bound_ : std::min(bound_, Ranked{since_, 0});
  arrivals_.insert(arrivals_.end(), passed_.begin(), passed_.end());
  passed_.clear();
  ready_ = true;
  walking_ = false;
}

void EvictionQueue::put_offered_back() {
  for (const Ranked& ranked : offered_) queue_.push(ranked);
  offered_.clear();
}

// Puts a row into the queue if it ranks below limit_. The next walk finds any other row, unless the walk has passed it.
void EvictionQueue::place(const Ranked& ranked) {
  if (ranked < limit_) {
    queue_.push(ranked);
  } else if (walking_ && ranked < bound_) {
    passed_.push_back(static_cast<int64_t>(unmix(ranked.mixed_id)));
  }
}

template <class Policy>
void EvictionQueue::rank_arrivals(const Policy& policy, const Table& table) {
  for (const int64_t id : arrivals_) {
    const Slot slot = table.index().find(id);
    if (slot != kNoSlot) place({policy.rank(table.rows().meta(slot)), mix(static_cast<uint64_t>(id))});
  }
  arrivals_.clear();
}

// Returns the slot of the first row of the queue. If the row has left the table or has another rank, returns kNoSlot
// and gives it the place that it has now.
template <class Policy>
Slot EvictionQueue::first_row(const Policy& policy, const Table& table) {
  const Ranked ranked = queue_.first();
  const Slot slot = table.index().find(static_cast<int64_t>(unmix(ranked.mixed_id)));
  const uint64_t rank = slot == kNoSlot ? 0 : policy.rank(table.rows().meta(slot));
  if (slot != kNoSlot && rank == ranked.rank && ranked < limit_) return slot;
  queue_.pop();
  // A row that ranks lower has left and arrived again, or has a lower score, and is in the queue as an arrival.
  if (slot != kNoSlot && rank >= ranked.rank) place({rank, ranked.mixed_id});
  return kNoSlot;
}

template <class Policy>
std::vector<Leaver> EvictionQueue::next_by(const Policy& policy, const Table& table, const SlotSet& kept, int64_t count,
                                           Executor& executor) {
  enter_era(policy);
  prepare_next_era(policy, table, count, executor);
  std::vector<Leaver> leavers;
  leavers.reserve(static_cast<size_t>(count));
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (!ready_) walk(policy, table, 1, executor);
    put_offered_back();
    rank_arrivals(policy, table);
    std::vector<Ranked> stay;
    leavers.clear();
    while (static_cast<int64_t>(leavers.size()) < count && !queue_.empty()) {
      const Slot slot = first_row(policy, table);
      if (slot == kNoSlot) continue;
      const Ranked ranked = queue_.pop();
      if (!offered_.empty() && offered_.back().mixed_id == ranked.mixed_id) continue;  // it was in the queue twice
      if (kept.contains(slot)) {
        stay.push_back(ranked);
      } else {
        leavers.push_back({static_cast<int64_t>(unmix(ranked.mixed_id)), slot});
        offered_.push_back(ranked);
      }
    }
    for (const Ranked& ranked : stay) queue_.push(ranked);
    const bool enough = static_cast<int64_t>(leavers.size()) == count;
    // The next walk ends when this queue does.
    walk(policy, table, enough ? static_cast<double>(count) / static_cast<double>(queue_.size() + leavers.size()) : 1,
         executor);
    if (enough) return leavers;
  }
  return least(table, policy, kept, count, executor);
}

int64_t leaving_at_once(const Table& table, int64_t needed) {
  const Bounds& bounds = table.config().bounds;
  return bounds.cold_store ? std::max(needed, std::min(bounds.max_rows / kPart, kMostAtOnce)) : needed;
}

int64_t expired_before(const Table& table, int64_t step) {
  const int64_t expiry = table.config().bounds.expiry;
  const bool expires = expiry > 0 && step % std::max<int64_t>(1, expiry / kExpiryParts) == 0;
  return expires ? std::max<int64_t>(0, step - expiry) : 0;
}

std::vector<Leaver> expired_rows(const Table& table, int64_t before, const SlotSet& kept, Executor& executor) {
  const Rows& rows = table.rows();
  SlotSet old = slots_where(rows, executor, [&](Slot slot) { return int64_t{rows.meta(slot).last_step} < before; });
  rows.for_each_free([&](Slot slot) { old.remove(slot); });
  old.remove(kept);
  if (old.empty()) return {};
  std::vector<Leaver> leavers;
  append_each_of(
      table, old, executor, [](int64_t id, Slot slot) { return Leaver{id, slot}; }, leavers,
      [](std::vector<Leaver>&) {});
  return by_part(table.index(), leavers);  // a line may be home to ids of two parts
}

std::vector<Leaver> by_part(const Index& index, const std::vector<Leaver>& leavers) {
  return by_part<Index::kParts>(leavers, [&](const Leaver& leaver) { return index.part_of_id(leaver.id); });
}

SlotSet pinned_slots(const Table& table) {
  SlotSet pinned(table.rows().slots());
  table.for_each_pass([&](const PendingPass& pass) { pass.pin(table, pinned); });
  table.rows().for_each_free([&](Slot slot) { pinned.remove(slot); });  // rows that were removed after their lookup
  return pinned;
}

}  // namespace recstore
