#pragma once

#include <cstdint>

namespace recstore {

// A batch of bags of ids, feature by feature. Without offsets each id is a bag of its own.
struct Batch {
  const int64_t* ids = nullptr;        // (n_ids,)
  int64_t n_ids = 0;
  const int64_t* offsets = nullptr;    // (features * bags + 1,) or null
  const float* weights = nullptr;      // (n_ids,) or null
  int64_t bags = 0;                    // a feature's

  // Where bag number `bag` begins; bags are numbered feature by feature.
  int64_t offset(int64_t bag) const {
    return offsets != nullptr ? offsets[bag] : bag;
  }
};

}  // namespace recstore
