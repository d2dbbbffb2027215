#pragma once

#include <cstdint>

#include "memory.h"

namespace recstore {

// Counts how often ids without a row have been seen, in a fixed amount of memory: a count-min sketch with conservative
// update (Cormode and Muthukrishnan 2005; Estan and Varghese 2002), kept for two generations.
//
// An id has one cell in each of four rows. Its count is the minimum of its cells in the present generation plus the
// minimum in the previous generation. No sighting of these generations is missed; a count is too high only if other ids
// share all cells of the id in one generation. A generation ends after half as many sightings as a row has cells. At
// its end, an id that was never seen has a count above zero with a probability of at most (1 - e^-0.5)^4 = 2.4 %.
class Sightings {
 public:
  static constexpr int64_t kGenerations = 2;
  static constexpr int64_t kRows = 4;

  // bytes: memory of all cells, a power of two. Throws OutOfMemory.
  explicit Sightings(int64_t bytes);

  // Returns the count of an id, at most 255.
  int64_t count(int64_t id) const;
  void add(int64_t id);

  // The state for a checkpoint: the cells (generations, rows, cells of a row), with the present generation first, and
  // the number of sightings in the present generation.
  int64_t cells() const { return cells_; }
  int64_t taken() const { return taken_; }
  void read(uint8_t* cells) const;
  void write(const uint8_t* cells, int64_t taken);

  int64_t bytes() const { return kGenerations * kRows * cells_; }

 private:
  struct Place {
    uint64_t first;
    uint64_t step;
  };
  static Place place_of(int64_t id);
  uint8_t* cell(int64_t generation, int64_t row, const Place& place) const {
    const uint64_t column = (place.first + static_cast<uint64_t>(row) * place.step) & static_cast<uint64_t>(cells_ - 1);
    return reinterpret_cast<uint8_t*>(memory_.data()) + (generation * kRows + row) * cells_ + static_cast<int64_t>(column);
  }
  uint8_t least(int64_t generation, const Place& place) const;

  int64_t cells_;  // number of cells in a row
  int64_t taken_ = 0;
  int64_t present_ = 0;  // the present generation, 0 or 1
  Region memory_;
};

}  // namespace recstore
