#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace recstore {

// A set of ids, in the order in which they came.
class IdSet {
 public:
  explicit IdSet(size_t most) {
    while ((size_t{1} << bits_) < 2 * most) ++bits_;
    places_.assign(size_t{1} << bits_, 0);
    ids_.reserve(most);
  }

  // hash: of the id, whose top bits are used.
  void add(int64_t id, uint64_t hash) {
    size_t place = hash >> (64 - bits_);
    for (; places_[place] != 0; place = (place + 1) & (places_.size() - 1)) {
      if (ids_[places_[place] - 1] == id) return;
    }
    ids_.push_back(id);
    places_[place] = static_cast<uint32_t>(ids_.size());
  }
  const std::vector<int64_t>& ids() const { return ids_; }

 private:
  int bits_ = 4;
  std::vector<uint32_t> places_;  // by hash: of an id in ids_, plus one; 0 where there is none
  std::vector<int64_t> ids_;
};

}  // namespace recstore
