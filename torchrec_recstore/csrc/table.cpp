#include "table.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <utility>

#include "error.h"

namespace recstore {
namespace {

uint64_t random_salt() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Misses of each part of the index, in the order of the batch.
struct ByPart {
  std::array<int64_t, Index::kParts + 1> begin{};
  std::vector<int32_t> order;

  explicit ByPart(const std::vector<Miss>& misses) : order(misses.size()) {
    for (const Miss& miss : misses) ++begin[Index::part_of(miss.hash) + 1];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    auto next = begin;
    for (size_t i = 0; i < misses.size(); ++i) order[next[Index::part_of(misses[i].hash)]++] = static_cast<int32_t>(i);
  }
};

// Below this many misses the work is not worth waking other threads for.
constexpr size_t kSerialMisses = 256;

}  // namespace

Table::Table(TableConfig config)
    : config_(std::move(config)), index_(random_salt()), rows_(config_), initializer_(config_) {}

void Table::close() {
  if (!open_) return;
  index_.clear();
  rows_.clear();
  open_ = false;
}

void Table::check_open() const {
  if (!open_) throw InvalidArgument("table '" + config_.name + "' is closed");
}

int64_t Table::insert_missing(const std::vector<Miss>& misses, Slot* slots, Executor& executor) {
  if (misses.empty()) return 0;
  const ByPart parts(misses);
  std::array<std::vector<int32_t>, Index::kParts> fresh;  // the first miss of each distinct id
  std::vector<Slot> taken;
  std::array<int64_t, Index::kParts + 1> base{};
  const auto for_each_part = [&](const auto& work) {
    if (misses.size() < kSerialMisses) {
      for (int p = 0; p < Index::kParts; ++p) work(p);
    } else {
      for_each_task(executor, Index::kParts, [&](int64_t p) { work(static_cast<int>(p)); });
    }
  };
  try {
    index_.reserve_inserts(static_cast<int64_t>(misses.size()));
    // First pass: every distinct id gets its place in the index, its rank within the part standing for the slot.
    for_each_part([&](int p) {
      for (int64_t i = parts.begin[p]; i < parts.begin[p + 1]; ++i) {
        const Miss& miss = misses[parts.order[i]];
        const auto rank = static_cast<Slot>(fresh[p].size());
        // Room first, so that the push cannot fail once the index holds the id.
        if (fresh[p].size() == fresh[p].capacity()) fresh[p].reserve(std::max<size_t>(16, 2 * fresh[p].size()));
        slots[miss.position] = index_.find_or_insert(miss.id, miss.hash, rank);
        if (slots[miss.position] == rank) fresh[p].push_back(parts.order[i]);
      }
    });
    for (int p = 0; p < Index::kParts; ++p) base[p + 1] = base[p] + static_cast<int64_t>(fresh[p].size());
    rows_.take(base[Index::kParts], taken);
  } catch (...) {
    for (const auto& ids : fresh) {
      for (const int32_t m : ids) index_.erase(misses[m].id, misses[m].hash);
    }
    throw;
  }
  // Second pass: nothing can fail any more. Ranks become slots, slots become rows.
  for_each_part([&](int p) {
    const Slot* part_slots = taken.data() + base[p];
    for (size_t rank = 0; rank < fresh[p].size(); ++rank) {
      const Miss& miss = misses[fresh[p][rank]];
      const Slot slot = part_slots[rank];
      index_.set_slot(miss.id, miss.hash, slot);
      initializer_.fill(miss.id, rows_.weights(slot));
      rows_.reset_state(slot);
    }
    for (int64_t i = parts.begin[p]; i < parts.begin[p + 1]; ++i) {
      Slot& slot = slots[misses[parts.order[i]].position];
      slot = part_slots[slot];
    }
  });
  counters_.inserts += base[Index::kParts];
  return base[Index::kParts];
}

int64_t Table::remove(const int64_t* ids, int64_t n) {
  int64_t removed = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Slot slot = index_.erase(ids[i], index_.hash(ids[i]));
    if (slot == kNoSlot) continue;
    rows_.give_back(slot, next_pass_ - 1);
    ++removed;
  }
  rows_.reclaim(pending_.empty() ? next_pass_ : pending_.begin()->number);
  return removed;
}

void Table::ids(int64_t* out) const {
  int64_t* end = out;
  index_.for_each([&](int64_t id, Slot) { *end++ = id; });
  std::sort(out, end);
}

uint32_t Table::begin_step() { return static_cast<uint32_t>(++counters_.steps); }

uint64_t Table::begin_pass(PendingPass* pass) {
  const uint64_t number = next_pass_++;
  pending_.insert({number, pass});
  return number;
}

void Table::end_pass(uint64_t number) {
  pending_.erase({number, nullptr});
  rows_.reclaim(pending_.empty() ? next_pass_ : pending_.begin()->number);
}

void Table::settle_passes(Executor& executor) {
  for (const Numbered& numbered : pending_) numbered.pass->settle(executor);
}

}  // namespace recstore
