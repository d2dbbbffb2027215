#pragma once

#include <cstdint>
#include <string>

#include "optimizer.h"
#include "row_type.h"

namespace recstore {

enum class InitKind : int64_t { kUniform = 0, kNormal = 1, kConstant = 2 };

struct InitConfig {
  InitKind kind = InitKind::kConstant;
  double a = 0.0;        // uniform: low; normal: mean; constant: value
  double b = 0.0;        // uniform: high; normal: standard deviation
  double truncate = 0.0; // normal: bound in standard deviations, 0 for none
};

enum class Eviction : int64_t { kNone = 0, kLeastRecent = 1, kLeastFrequent = 2 };

// What keeps a shard small; 0 for what it has not. torchrec_recstore/options.py tells what each means.
struct Bounds {
  int64_t max_rows = 0;
  Eviction eviction = Eviction::kNone;
  int64_t half_life = 0;      // steps
  int64_t expiry = 0;         // steps
  int64_t min_frequency = 0;  // steps
  int64_t counter_bytes = 0;  // of what counts them
  bool cold_store = false;    // evicted rows go there, by whoever calls: no row leaves on its own

  bool operator==(const Bounds& other) const {
    return max_rows == other.max_rows && eviction == other.eviction && half_life == other.half_life && expiry == other.expiry &&
           min_frequency == other.min_frequency && counter_bytes == other.counter_bytes && cold_store == other.cold_store;
  }
  // Whether an id without a row may be refused one, or cost another's.
  bool limit_new_rows() const { return max_rows > 0 || min_frequency > 0; }
};

struct TableConfig {
  std::string name;
  int64_t column_begin = 0;  // this shard holds the columns [column_begin, column_end) of each row
  int64_t column_end = 0;
  uint64_t seed = 0;
  bool missing_reads_init = false;  // what an evaluation lookup reads for an id without a row; else zeros
  RowType row_type = RowType::kFloat32;
  bool stochastic_rounding = false;  // of 16-bit weights in updates; else to nearest, ties to even
  InitConfig init;
  OptimizerConfig optimizer;
  Bounds bounds;

  int64_t columns() const { return column_end - column_begin; }
};

}  // namespace recstore
