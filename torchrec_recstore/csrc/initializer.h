#pragma once

#include <cstdint>

#include "config.h"

namespace recstore {

// Writes the initial weights of rows. A weight depends on the table's seed and name, the id and the
// global column alone, so it is the same on every rank, for every order, sharding and thread count.
class Initializer {
 public:
  explicit Initializer(const TableConfig& config);

  void fill(int64_t id, float* row) const;  // row: (columns,)

 private:
  InitConfig init_;
  int64_t column_begin_;
  int64_t column_end_;
  uint64_t key_;
  double cdf_low_ = 0.0;  // of a truncated normal
  double cdf_high_ = 1.0;
};

}  // namespace recstore
