#pragma once

#include <cstdint>
#include <cstring>

#include "row_loops/row_loops.h"
#include "rows/config.h"

namespace recstore {

// Records that a step looks up the row, for the policies for which Bounds::counts_apart() is true. times: the number of
// occurrences of the id in the batch. The frequency stops at its largest value. A score does not change.
inline void note_use(RowMeta& meta, uint32_t step, uint32_t times, const Bounds& bounds) {
  if (bounds.eviction == Eviction::kLeastOccurring) {
    const uint32_t frequency = aged_frequency(meta, step, static_cast<uint32_t>(bounds.half_life));
    meta.frequency = frequency > UINT32_MAX - times ? UINT32_MAX : frequency + times;
  }
  if (meta.last_step < step) meta.last_step = step;
}

// The scores of Eviction::kLeastScored are finite floats. RowMeta::frequency has a score as a number that ascends with
// the score. The numbers of finite floats lie in a range that has neither 0, which new rows have, nor the frequencies
// below 2**23 of rows that were written without a score: such rows have no score.
constexpr uint32_t kLeastScore = 0x00800000u;
constexpr uint32_t kLargestScore = 0xFF7FFFFFu;

inline uint32_t encoded_score(float score) {
  const float positive_zero = score + 0.0f;  // -0 and 0 are the same score
  uint32_t bits;
  std::memcpy(&bits, &positive_zero, sizeof(bits));
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Returns the rank of a row among scores. unscored: see Bounds.
inline uint32_t score_rank(const RowMeta& meta, uint32_t unscored) {
  return meta.frequency >= kLeastScore && meta.frequency <= kLargestScore ? meta.frequency : unscored;
}

}  // namespace recstore
