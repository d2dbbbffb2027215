#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "batch.h"
#include "insertion.h"
#include "table.h"

namespace recstore {
namespace {  // internal linkage, so that the compiler inlines the stages into the loops that call them

constexpr int64_t kTaskIds = 1024;  // approximate number of ids in a task

// Finds the slots of a run of ids. The run goes through a pipeline of three stages in blocks of ids: hash the ids and
// prefetch their home lines in the index; compare the home lines and prefetch the rows; the rows are then in the cache.
// The few ids that are not in their home line finish one block later, because their next line has to arrive.
// kLines: number of cache lines of a row's weights, or 0 if it is not known at compile time.
template <int64_t kLines>
class Resolver {
 public:
  Resolver(const Table& table, const Routing& routing, const int64_t* ids, int64_t begin, int64_t end, Slot* slots)
      : index_(table.index()), rows_(table.rows().view()), routing_(routing), ids_(ids), end_(end), slots_(slots),
        hashed_(begin), probed_(begin), resolved_(begin) {
    hash_block();
    hash_block();
    probe_block();
  }

  // Positions before this one have their slots, or a miss.
  int64_t resolved() const { return resolved_; }

  // Moves every stage forward by one block.
  void advance() {
    finish_late();
    hash_block();
    probe_block();
  }

  std::vector<Miss> misses;  // the ids without a row, in the order of the positions

 private:
  struct Hashed {
    int64_t id;
    uint64_t hash;
    const Index::Entry* line;
  };
  struct Late {
    int64_t position;
    const Index::Entry* line;  // the line to search next, or null if the probe sequence has ended
  };

  void hash_block() {
    const int64_t stop = std::min(hashed_ + kBlock, end_);
    for (; hashed_ < stop; ++hashed_) {
      const int64_t id = routing_.raw_id(ids_[hashed_]);
      const uint64_t hash = index_.hash(id);
      const Index::Entry* line = index_.home_line(hash);
      ring_[hashed_ % kRing] = {id, hash, line};
      __builtin_prefetch(line, 0, 3);
    }
  }
  void probe_block() {
    const int64_t stop = std::min(probed_ + kBlock, end_);
    for (; probed_ < stop; ++probed_) {
      const Hashed& hashed = ring_[probed_ % kRing];
      const Index::Entry* entry = Index::find_in_line(hashed.line, hashed.id);
      if (entry != nullptr) {
        found(probed_, entry->slot);
      } else {
        const Index::Entry* next = index_.next_line(hashed.line);
        __builtin_prefetch(next, 0, 3);
        late_[late_count_++] = {probed_, next};
      }
    }
  }
  void finish_late() {
    for (int i = 0; i < late_count_; ++i) {
      const Hashed& hashed = ring_[late_[i].position % kRing];
      const Index::Entry* entry = index_.find_from(late_[i].line, hashed.id);
      if (entry != nullptr) {
        found(late_[i].position, entry->slot);
      } else {
        slots_[late_[i].position] = kNoSlot;
        misses.push_back({hashed.id, hashed.hash, late_[i].position});
      }
    }
    late_count_ = 0;
    resolved_ = probed_;
  }
  void found(int64_t position, Slot slot) {
    slots_[position] = slot;
    const float* row = rows_.data + slot * rows_.stride;
    const int64_t floats = kLines == 0 ? rows_.weight_floats() : kLines * 16;
    for (int64_t d = 0; d < floats; d += 16) __builtin_prefetch(row + d, 0, 3);
  }

  static constexpr int64_t kBlock = 16;  // ids that go through a stage together
  static constexpr int64_t kRing = 4 * kBlock;

  const Index& index_;
  RowsView rows_;
  const Routing& routing_;
  const int64_t* ids_;
  int64_t end_;
  Slot* slots_;
  int64_t hashed_;  // the three stages have reached these positions
  int64_t probed_;
  int64_t resolved_;
  int late_count_ = 0;
  std::array<Late, kBlock> late_;
  std::array<Hashed, kRing> ring_;
};

// Calls work(lines) with the number of cache lines of a row's weights: a compile-time constant for the dims that most
// tables have, else 0.
template <class Work>
void with_lines(const Table& table, const Work& work) {
  switch (table.rows().view().weight_floats()) {
    case 16: return work(std::integral_constant<int64_t, 1>{});
    case 32: return work(std::integral_constant<int64_t, 2>{});
    case 64: return work(std::integral_constant<int64_t, 4>{});
    case 128: return work(std::integral_constant<int64_t, 8>{});
    default: return work(std::integral_constant<int64_t, 0>{});
  }
}

}  // namespace
}  // namespace recstore
