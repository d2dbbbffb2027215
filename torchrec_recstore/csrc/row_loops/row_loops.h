#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/prefetch.h"
#include "index/index_lines.h"
#include "lookup/batch.h"
#include "rows/config.h"

namespace recstore {

// The bookkeeping of a row. It may be at an odd multiple of two bytes.
struct __attribute__((packed, aligned(2))) RowMeta {
  uint32_t last_step;  // the last step that looked up the row
  // Number of steps that looked up the row; or see Eviction: number of occurrences, or encoded score.
  uint32_t frequency;
};

// The row-wise data of a row, which is stored apart from its weights and element-wise states. State: float, or uint16_t
// for float16.
template <class State>
struct RowAside {
  State state;  // row-wise optimizer state
  RowMeta meta;
};
static_assert(sizeof(RowAside<float>) == 12 && sizeof(RowAside<uint16_t>) == 10);

// Returns the frequency at step `now`. It is halved at every multiple of half_life, unless half_life is 0.
inline uint32_t aged_frequency(const RowMeta& meta, uint32_t now, uint32_t half_life) {
  if (half_life == 0 || meta.last_step >= now) return meta.frequency;
  const uint32_t halvings = now / half_life - meta.last_step / half_life;
  return halvings > 31 ? 0 : meta.frequency >> halvings;
}

// Records that a step looks up the row.
inline void count_step(RowMeta& meta, uint32_t step, uint32_t half_life) {
  meta.frequency = aged_frequency(meta, step, half_life) + 1;
  if (meta.last_step < step) meta.last_step = step;  // backwards may run in another order than their forwards
}

// The rows of one table, as the inner loops access them.
struct RowsView {
  // Each row: weights of the type, weight_floats() floats, then element-wise optimizer states of the state type.
  float* data;
  int64_t stride;  // floats between rows
  int64_t columns;
  char* asides;  // one RowAside of the state type for each slot
  RowType type = RowType::kFloat32;
  StateType state_type = StateType::kFloat32;

  // Number of floats of a row before its optimizer states.
  int64_t weight_floats() const { return recstore::weight_floats(type, columns); }
};

// Rounds narrow weights and float16 states up or down at random, so that the expected value is exact. The random bits
// of a weight or a state depend only on the key, the raw id and the global column.
struct StochasticRounding {
  bool of_weights = false;  // false: weights are rounded to nearest
  uint64_t key = 0;         // made of the table's key and the number of the update
  const Routing* routing = nullptr;
  int64_t column_begin = 0;
};

// A run of consecutive bags of one feature.
struct PoolArgs {
  RowsView rows;
  const Slot* slots;      // (ids of the batch,), by position; kNoSlot reads as zeros
  const int64_t* bounds;  // (bags + 1,) positions at which the bags of the run begin; null if each bag has one id
  int64_t first;          // position of the first id of the run
  const float* weights;   // per-sample weights by position, or null
  int64_t bags;
  float* out;          // output of the first bag
  int64_t out_stride;  // floats between bags
  bool mean;
  bool stream;  // write past the caches, because the output is larger than they are
};

// Links the positions of a batch that have the same slot. The link of a position is the next position plus one, or 0
// for the last position. All positions but the first have the flag kNotFirst.
using Link = uint32_t;
constexpr Link kNotFirst = 0x80000000u;

// The most rows that are updated before they are stored.
constexpr int kStoredTogether = 4;

// Ids with more positions than `most`, each by its first position, which are updated later.
struct LaterIds {
  int64_t most;
  uint32_t* positions = nullptr;
  std::atomic<int64_t> count{0};
};

// A run of consecutive bags of one feature, in the backward. Each row is updated by the run that contains the first
// occurrence of its id, on the sum over all occurrences in the order of the batch.
struct UpdateArgs {
  RowsView rows;
  const Batch* batch;
  const Slot* slots;              // by position
  const Link* links;              // by position
  const uint32_t* bag_of;         // by position: the number of the bag
  const int64_t* column_offsets;  // by feature: its first column in a row of grad
  const float* grad;              // (batch.bags, grad_stride)
  int64_t grad_stride;
  bool mean;
  int64_t bag_begin;  // the run has the bags with the numbers [bag_begin, bag_end)
  int64_t bag_end;
  float* scratch;    // (columns rounded up to 16,): sum of gradients
  float* weights;    // (kStoredTogether, columns rounded up to 16): rows of narrow weights, widened
  uint32_t* random;  // (columns rounded up to 16,): random words for stochastic rounding
  StochasticRounding rounding;
  OptimizerKind optimizer;
  const UserStep* user;  // the user-defined optimizer; null: the kind
  float* states;         // (element states of the user-defined optimizer, columns): float16 states, widened
  StepScalars scalars;
  uint32_t step;       // the step that looked up the rows; 0: do not record a step
  uint32_t half_life;  // half-life of the frequencies
  // The number of rows that were not updated, because their gradient is not finite; nullptr: all rows are updated.
  std::atomic<int64_t>* nonfinite;
  LaterIds* later;    // takes the ids that should be tasks of their own, or null: all are updated
  LaterIds* longest;  // takes those of them whose gradients several threads should sum
  int64_t only;       // the first position of the only id of the run that is updated, or -1: all
  const float* sum;   // the sum of its gradients (columns rounded up to 16,), or null
};

// The search of the index and the row loops, which are compiled once for each instruction set. All versions give
// the same bits: they use sixteen lanes independently of the width of the registers, the same order of additions, and
// no fused multiply-add. A library that defines RECSTORE_READS_ONLY has the functions find, widen and narrow alone; the
// others are null.
struct RowLoops {
  const char* name;
  int64_t (*find)(const IndexView& index, const int64_t* ids, int64_t n, Slot* slots);  // see Index::find()
  void (*fill_uniform)(uint64_t key, int64_t id, int64_t column_begin, int64_t column_end, float low, float high,
                       float* row);
  void (*pool)(const PoolArgs& args);
  void (*update)(const UpdateArgs& args);
  // Sums the columns [begin, end) of the gradients of the id args.only; begin is a multiple of 16. out: by column.
  void (*sum_columns)(const UpdateArgs& args, int64_t begin, int64_t end, float* out);
  float (*dot)(RowType type, const float* row, const float* values, int64_t n);
  void (*widen)(RowType type, const float* row, int64_t columns, float* out);
  void (*narrow)(RowType type, const float* values, int64_t columns, float* row);  // rounds to nearest
  // Reads and writes n numbers of a float16 state, for exports and imports. write_state() rounds to nearest.
  void (*read_state)(const uint16_t* state, int64_t n, bool is_square, float* out);
  void (*write_state)(const float* values, int64_t n, bool is_square, uint16_t* state);
};

// Returns the fastest version for this processor, or the version that the environment variable RECSTORE_ISA (baseline,
// neon, avx2 or avx512) selects. Throws InvalidArgument if RECSTORE_ISA is wrong.
const RowLoops& row_loops();

}  // namespace recstore
