#pragma once

#include <cstdint>

#include "config.h"

namespace recstore {

// Writes the initial weights of rows. A weight depends on the table's seed and name, the id and the
// global column alone, so it is the same on every rank, for every order, sharding and thread count.
class Initializer {
 public:
  explicit Initializer(const TableConfig& config);

  // row: (columns,) of the table's row type; 16-bit weights are fp32's, rounded to nearest.
  void fill(int64_t id, float* row) const;
  // What random bits of the table's are drawn by.
  uint64_t key() const { return key_; }

 private:
  // The weights of the global columns [begin, end), in fp32.
  void fill_columns(int64_t id, int64_t begin, int64_t end, float* weights) const;

  InitConfig init_;
  RowType row_type_;
  int64_t column_begin_;
  int64_t column_end_;
  uint64_t key_;
  double cdf_low_ = 0.0;  // of a truncated normal
  double cdf_high_ = 1.0;
};

}  // namespace recstore
