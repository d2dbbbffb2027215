#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "rows/config.h"

namespace recstore {

// Writes the initial weights of rows. A weight depends only on the table's seed and name, the id, and the global
// column. It is therefore the same on every rank, and for every order of ids, sharding and number of threads.
class Initializer {
 public:
  explicit Initializer(const TableConfig& config);

  // row: (columns,) of the table's row type. Narrow weights are the float32 weights, rounded to nearest.
  void fill(int64_t id, float* row) const;
  // The key of the random generator for this table.
  uint64_t key() const { return key_; }

 private:
  // Writes the weights of the global columns [begin, end) in float32.
  void fill_columns(int64_t id, int64_t begin, int64_t end, float* weights) const;

  // The weights of a wide 8-bit row, before they are rounded. It is allocated here because fill() must not fail.
  struct Wide {
    explicit Wide(int64_t columns) : weights(static_cast<size_t>(columns)) {}
    std::mutex mutex;
    std::vector<float> weights;
  };

  InitConfig init_;
  RowType row_type_;
  int64_t column_begin_;
  int64_t column_end_;
  uint64_t key_;
  std::shared_ptr<Wide> wide_;
  double cdf_low_ = 0.0;  // bounds of a truncated normal distribution
  double cdf_high_ = 1.0;
};

}  // namespace recstore
