#include "eviction.h"

#include <algorithm>
#include <array>

#include "mix.h"

namespace recstore {
namespace {

constexpr int64_t kPart = 32;            // of a full table leaves at once
constexpr int64_t kTaskSegments = 64;    // of the index
constexpr int64_t kTaskSlots = 1 << 16;

// A monotone map of 32 bits to a few: values below 2**kBits as they are, larger ones by their leading kBits + 1 bits.
template <int kBits>
constexpr uint32_t coarse(uint32_t value) {
  if (value < (1u << kBits)) return value;
  const int shift = 31 - __builtin_clz(value) - kBits;
  return (static_cast<uint32_t>(shift + 1) << kBits) + ((value >> shift) & ((1u << kBits) - 1));
}
template <int kBits>
constexpr uint32_t kCoarseValues = coarse<kBits>(0xFFFFFFFFu) + 1;

// What a row is compared by: rows of lower rank leave first. class_of() is coarser: a lower class is a lower rank.
struct LeastRecent {
  static constexpr uint32_t kClasses = kCoarseValues<6>;
  uint32_t now;

  uint64_t rank(const RowMeta& meta) const { return meta.last_step; }
  uint32_t class_of(const RowMeta& meta) const {
    return kClasses - 1 - coarse<6>(meta.last_step < now ? now - meta.last_step : 0);
  }
};

struct LeastFrequent {
  static constexpr uint32_t kAges = kCoarseValues<3>;
  static constexpr uint32_t kClasses = kCoarseValues<3> * kAges;
  uint32_t now;
  uint32_t half_life;

  uint32_t frequency(const RowMeta& meta) const { return aged_frequency(meta, now, half_life); }
  uint64_t rank(const RowMeta& meta) const { return uint64_t{frequency(meta)} << 32 | meta.last_step; }
  uint32_t class_of(const RowMeta& meta) const {
    return coarse<3>(frequency(meta)) * kAges + kAges - 1 - coarse<3>(meta.last_step < now ? now - meta.last_step : 0);
  }
};

struct Candidate {
  uint64_t rank;
  uint64_t mixed_id;
  Slot slot;
  bool operator<(const Candidate& other) const {
    return rank != other.rank ? rank < other.rank : mixed_id < other.mixed_id;
  }
};

template <class Policy>
std::vector<Leaver> least(const Table& table, const Policy& policy, const SlotSet& kept, int64_t count, Executor& executor) {
  const Rows& rows = table.rows();
  const int64_t slots = rows.slots();
  SlotSet rest = kept;  // and the slots without a row
  rows.for_each_free([&](Slot slot) { rest.add(slot); });

  const int64_t tasks = (slots + kTaskSlots - 1) / kTaskSlots;
  std::vector<std::vector<uint32_t>> counts(static_cast<size_t>(tasks));
  for_each_task(executor, tasks, [&](int64_t task) {
    counts[task].assign(Policy::kClasses, 0);
    for (int64_t s = task * kTaskSlots; s < std::min((task + 1) * kTaskSlots, slots); ++s) {
      const auto slot = static_cast<Slot>(s);
      if (!rest.contains(slot)) ++counts[task][policy.class_of(rows.meta(slot))];
    }
  });
  uint32_t last_class = 0;
  int64_t found = 0;
  for (; last_class < Policy::kClasses; ++last_class) {
    for (const auto& some : counts) found += some[last_class];
    if (found >= count) break;
  }
  if (found == 0) return {};

  SlotSet wanted(tasks * kTaskSlots);
  for_each_task(executor, tasks, [&](int64_t task) {
    for (int64_t s = task * kTaskSlots; s < std::min((task + 1) * kTaskSlots, slots); ++s) {
      const auto slot = static_cast<Slot>(s);
      if (policy.class_of(rows.meta(slot)) <= last_class && !rest.contains(slot)) wanted.add(slot);
    }
  });

  const Index& index = table.index();
  const int64_t walks = (int64_t{index.segments()} + kTaskSegments - 1) / kTaskSegments;
  std::vector<std::vector<Candidate>> parts(static_cast<size_t>(walks));
  for_each_task(executor, walks, [&](int64_t walk) {
    const auto first = static_cast<uint32_t>(walk * kTaskSegments);
    const auto end = static_cast<uint32_t>(std::min<int64_t>((walk + 1) * kTaskSegments, index.segments()));
    index.for_each(first, end, [&](int64_t id, Slot slot) {
      if (wanted.contains(slot)) parts[walk].push_back({policy.rank(rows.meta(slot)), mix(static_cast<uint64_t>(id)), slot});
    });
  });
  std::vector<Candidate> candidates;
  candidates.reserve(static_cast<size_t>(found));
  for (const auto& part : parts) candidates.insert(candidates.end(), part.begin(), part.end());
  if (static_cast<int64_t>(candidates.size()) > count) {
    std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end());
    candidates.resize(static_cast<size_t>(count));
  }
  std::vector<Leaver> leavers;
  leavers.reserve(candidates.size());
  for (const Candidate& candidate : candidates) {
    leavers.push_back({static_cast<int64_t>(unmix(candidate.mixed_id)), candidate.slot});
  }
  return leavers;
}

}  // namespace

std::vector<Leaver> least_rows(const Table& table, const SlotSet& kept, int64_t count, Executor& executor) {
  const auto now = static_cast<uint32_t>(table.clock());
  const Bounds& bounds = table.config().bounds;
  if (bounds.eviction == Eviction::kLeastFrequent) {
    return least(table, LeastFrequent{now, static_cast<uint32_t>(bounds.half_life)}, kept, count, executor);
  }
  return least(table, LeastRecent{now}, kept, count, executor);
}

int64_t leaving_at_once(const Table& table, int64_t needed) {
  return std::max(needed, table.config().bounds.max_rows / kPart);
}

std::vector<Leaver> expired_rows(Table& table) {
  const int64_t expiry = table.config().bounds.expiry;
  const Index& index = table.index();
  const int64_t segments = index.segments();
  const int64_t part = std::min(segments, (4 * segments + expiry - 1) / expiry);
  const int64_t now = table.clock();
  std::vector<Leaver> old;
  int64_t first = table.expiry_cursor() < segments ? table.expiry_cursor() : 0;
  for (int64_t left = part; left > 0;) {
    const int64_t end = std::min(first + left, segments);
    index.for_each(static_cast<uint32_t>(first), static_cast<uint32_t>(end), [&](int64_t id, Slot slot) {
      if (now - int64_t{table.rows().meta(slot).last_step} > expiry) old.push_back({id, slot});
    });
    left -= end - first;
    first = end == segments ? 0 : end;
  }
  table.set_expiry_cursor(first);
  if (old.empty()) return old;
  const SlotSet pinned = pinned_slots(table);
  old.erase(std::remove_if(old.begin(), old.end(), [&](const Leaver& row) { return pinned.contains(row.slot); }), old.end());
  return old;
}

SlotSet pinned_slots(const Table& table) {
  SlotSet pinned(table.rows().slots());
  table.for_each_pass([&](const PendingPass& pass) { pass.pin(table, pinned); });
  return pinned;
}

}  // namespace recstore
