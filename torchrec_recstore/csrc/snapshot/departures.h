#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/mix.h"

namespace recstore {

// The distinct ids whose rows have left a table for good since the last clear(), up to a number of ids. If there are
// more, the record drops all of them until the next clear(), so that it does not depend on the order in which rows
// leave. An id that has returned to the table stays in the record.
class Departures {
 public:
  // most: the largest number of ids, below 2**31.
  explicit Departures(int64_t most) : most_(static_cast<size_t>(most)) {}

  // Makes room for `count` calls of add(). Throws std::bad_alloc; the record is then as it was.
  void reserve(int64_t count) {
    const size_t wanted = std::min(most_, ids_.size() + static_cast<size_t>(count));
    if (overflowed_ || wanted <= ids_.capacity()) return;
    const size_t capacity = std::min(most_, std::max(wanted, 2 * ids_.capacity()));
    std::vector<uint32_t> places(places_for(capacity), 0);
    ids_.reserve(capacity);
    places_.swap(places);
    for (size_t i = 0; i < ids_.size(); ++i) places_[place_of(ids_[i])] = static_cast<uint32_t>(i) + 1;
  }
  void add(int64_t id) noexcept {
    if (overflowed_) return;
    uint32_t& place = places_[place_of(id)];
    if (place != 0) return;
    if (ids_.size() == most_) return overflow();
    ids_.push_back(id);
    place = static_cast<uint32_t>(ids_.size());
  }
  // Notes that ids have left that are not known.
  void overflow() noexcept {
    clear();
    overflowed_ = true;
  }
  // Begins anew, and frees the memory.
  void clear() noexcept {
    std::vector<int64_t>().swap(ids_);
    std::vector<uint32_t>().swap(places_);
    overflowed_ = false;
  }

  bool overflowed() const { return overflowed_; }
  // In no particular order.
  const std::vector<int64_t>& ids() const { return ids_; }
  int64_t bytes() const {
    return static_cast<int64_t>(ids_.capacity() * sizeof(int64_t) + places_.size() * sizeof(uint32_t));
  }

 private:
  // A power of two, so that at least half of the places are free.
  static size_t places_for(size_t ids) {
    size_t places = 16;
    while (places < 2 * ids) places *= 2;
    return places;
  }
  // Returns the place of an id, or the free place that it would have.
  size_t place_of(int64_t id) const {
    const size_t last = places_.size() - 1;
    size_t place = mix(static_cast<uint64_t>(id)) & last;
    while (places_[place] != 0 && ids_[places_[place] - 1] != id) place = (place + 1) & last;
    return place;
  }

  size_t most_;
  bool overflowed_ = false;
  std::vector<int64_t> ids_;
  std::vector<uint32_t> places_;  // by hash: the position of an id in ids_ plus one, or 0
};

}  // namespace recstore
