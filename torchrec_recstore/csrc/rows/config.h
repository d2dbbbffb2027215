#pragma once

#include <cstdint>
#include <string>

#include "base/fields.h"
#include "rows/optimizer.h"

namespace recstore {

// The type in which a row's weights are stored. The values are those of ROW_TYPES in row_types.py.
enum class RowType : int64_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kInt8 = 3 };

// An 8-bit row stores one code (uint8) for each weight, and after the codes two floats: its scale and its bias. A
// weight is code * scale + bias. row_int8.inl computes them.
constexpr int64_t kGridFloats = 2;

// Number of floats that this many weights occupy. Narrow weights are padded to whole floats, so that what is behind
// them is aligned.
inline int64_t weight_floats(RowType type, int64_t columns) {
  switch (type) {
    case RowType::kFloat32: return columns;
    case RowType::kFloat16:
    case RowType::kBfloat16: return (columns + 1) / 2;
    case RowType::kInt8: return (columns + 3) / 4 + kGridFloats;
  }
  return columns;
}

// Number of bytes of a row's weights outside the table. An 8-bit row has its codes, and then its scale and bias.
inline int64_t weight_bytes(RowType type, int64_t columns) {
  switch (type) {
    case RowType::kFloat32: return columns * 4;
    case RowType::kFloat16:
    case RowType::kBfloat16: return columns * 2;
    case RowType::kInt8: return columns + kGridFloats * 4;
  }
  return columns * 4;
}

// The type in which optimizer states are stored. The values are those of STATE_TYPES in row_types.py.
//
// A float16 state is rounded stochastically: rounding to nearest would lose each addend that is smaller than half of
// the last bit of a sum. A state of squares (OptimizerState::is_square) is stored as its square root, because the
// squares of common gradients are too small for float16. Finite numbers that are too large become the largest finite
// one.
enum class StateType : int64_t { kFloat32 = 0, kFloat16 = 1 };

// Number of bytes of one number of a state.
inline int64_t state_bytes(StateType type) { return type == StateType::kFloat16 ? 2 : 4; }
// Number of floats that this many numbers occupy. They are padded to whole floats.
inline int64_t state_floats(StateType type, int64_t numbers) {
  return type == StateType::kFloat16 ? (numbers + 1) / 2 : numbers;
}

// What an update does with gradients that are not finite: nothing; it leaves the rows as they are whose summed gradient
// is not finite; or it fails before any row changes. The values are those of NONFINITE in options.py.
enum class Nonfinite : int64_t { kPass = 0, kSkip = 1, kRaise = 2 };

enum class InitKind : int64_t { kUniform = 0, kNormal = 1, kConstant = 2 };

// The initial weights of rows: UniformInit, NormalInit and ConstantInit in torchrec_recstore/options.py. A kind reads
// its own numbers alone.
struct InitConfig {
  InitKind kind = InitKind::kConstant;
  double low = 0.0;
  double high = 0.0;
  double mean = 0.0;
  double standard_deviation = 0.0;
  double truncate_std = 0.0;  // 0 for no bound
  double value = 0.0;

  // Takes the fields init_low, init_high, init_mean, init_std, init_truncate_std and init_value. Throws InvalidArgument
  // if one of them is missing or the kind is unknown.
  static InitConfig of(int64_t kind, Fields<double>& numbers);
};

// kLeastFrequent counts the steps that look up a row, kLeastOccurring the occurrences of its id in their batches. The
// scores of kLeastScored are the user's.
enum class Eviction : int64_t {
  kNone = 0,
  kLeastRecent = 1,
  kLeastFrequent = 2,
  kLeastOccurring = 3,
  kLeastScored = 4
};

// The bounds on a shard's rows; 0 if a shard lacks a bound. torchrec_recstore/options.py explains them.
struct Bounds {
  int64_t max_rows = 0;
  Eviction eviction = Eviction::kNone;
  int64_t half_life = 0;      // steps
  uint32_t unscored = 0;      // the rank among scores of a row without a score; see score_rank()
  int64_t expiry = 0;         // steps
  int64_t expiry_time = 0;    // microseconds
  int64_t max_jump = 0;       // microseconds
  int64_t min_frequency = 0;  // sightings of an id that give it a row
  int64_t counter_bytes = 0;  // memory of the counter of sightings
  bool cold_store = false;    // evicted rows move to a cold store: the caller moves them, and no row leaves on its own
  bool shared = false;        // other tables write to the cold store

  // Takes the fields that have the names above. Throws InvalidArgument if a field is missing or out of range.
  static Bounds of(Fields<int64_t>& fields);

  bool operator==(const Bounds& other) const {
    return max_rows == other.max_rows && eviction == other.eviction && half_life == other.half_life &&
           unscored == other.unscored && expiry == other.expiry && expiry_time == other.expiry_time &&
           max_jump == other.max_jump && min_frequency == other.min_frequency && counter_bytes == other.counter_bytes &&
           cold_store == other.cold_store && shared == other.shared;
  }
  // Whether RowMeta::frequency is not the number of steps that looked up the row. The loops over rows count steps only;
  // note_use() records other uses.
  bool counts_apart() const { return eviction == Eviction::kLeastOccurring || eviction == Eviction::kLeastScored; }
  // Whether a new row may be refused, or may evict another row.
  bool limit_new_rows() const { return max_rows > 0 || min_frequency > 0; }
};

struct TableConfig {
  std::string name;
  int64_t column_begin = 0;  // this shard holds the columns [column_begin, column_end) of each row
  int64_t column_end = 0;
  uint64_t seed = 0;
  bool missing_reads_init = false;  // an evaluation lookup reads an id without a row as its initial row; else as zeros
  RowType row_type = RowType::kFloat32;
  bool stochastic_rounding = false;  // updates round narrow weights stochastically; else to nearest
  StateType state_type = StateType::kFloat32;
  Nonfinite nonfinite = Nonfinite::kPass;
  InitConfig init;
  OptimizerConfig optimizer;
  Bounds bounds;

  int64_t columns() const { return column_end - column_begin; }
};

}  // namespace recstore
