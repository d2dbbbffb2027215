#pragma once

#include <cstdint>
#include <type_traits>

#include "batch.h"
#include "config.h"
#include "index.h"

namespace recstore {

// What a row carries beside its weights and element-wise state.
struct RowMeta {
  float state;         // row-wise optimizer state
  uint32_t last_step;  // the last step that looked the row up
  uint32_t frequency;  // steps that looked it up
};

// The frequency at step `now`: it is halved at every multiple of half_life; 0 for never.
inline uint32_t aged_frequency(const RowMeta& meta, uint32_t now, uint32_t half_life) {
  if (half_life == 0 || meta.last_step >= now) return meta.frequency;
  const uint32_t halvings = now / half_life - meta.last_step / half_life;
  return halvings > 31 ? 0 : meta.frequency >> halvings;
}

// A step looks the row up.
inline void count_step(RowMeta& meta, uint32_t step, uint32_t half_life) {
  meta.frequency = aged_frequency(meta, step, half_life) + 1;
  if (meta.last_step < step) meta.last_step = step;  // backwards may come in another order than their forwards
}

// Rows of one table, as the inner loops see them.
struct RowsView {
  float* data;      // a row: weights (columns,) of the type, padded to whole floats, then element-wise optimizer state
  int64_t stride;   // floats from row to row
  int64_t columns;
  RowMeta* meta;    // one a slot
  RowType type = RowType::kFloat32;

  // Floats of a row before its optimizer state.
  int64_t weight_floats() const { return recstore::weight_floats(type, columns); }
};

// Rounds 16-bit weights up or down at random so that the mean is right. What a weight is rounded by depends on the
// key, the raw id and the global column alone.
struct StochasticRounding {
  uint64_t key = 0;  // of the table and the update; 0: round to nearest
  const Routing* routing = nullptr;
  int64_t column_begin = 0;
};

// A run of consecutive bags of one feature.
struct PoolArgs {
  RowsView rows;
  const Slot* slots;      // (ids of the batch,), by position; kNoSlot reads as zeros
  const int64_t* bounds;  // (bags + 1,) positions at which the run's bags begin
  const float* weights;   // per-sample weights by position, or null
  int64_t bags;
  float* out;             // of the first bag
  int64_t out_stride;     // floats from bag to bag
  bool mean;
  bool stream;            // the output is larger than the caches: write around them
};

// How the positions of a batch hang together that have the same slot: each one's link holds the next
// position plus one, 0 for none, and a flag on all but the first.
using Link = uint32_t;
constexpr Link kNotFirst = 0x80000000u;

// A run of consecutive bags of one feature, on its way back. Every row is updated by the run that has
// the first occurrence of its id, on the sum over all occurrences in the order of the batch.
struct UpdateArgs {
  RowsView rows;
  const Batch* batch;
  const Slot* slots;              // by position
  const Link* links;              // by position
  const uint32_t* bag_of;         // by position: the bag's number
  const int64_t* column_offsets;  // by feature: where its columns begin in a row of grad
  const float* grad;              // (batch.bags, grad_stride)
  int64_t grad_stride;
  bool mean;
  int64_t bag_begin;              // the run, by number
  int64_t bag_end;
  float* scratch;                 // (columns rounded up to 16,)
  float* weights;                 // likewise: a 16-bit row, widened
  uint32_t* random;               // likewise: what it is rounded by
  StochasticRounding rounding;
  OptimizerKind optimizer;
  StepScalars scalars;
  uint32_t step;                  // that has looked the rows up; 0: leave the bookkeeping alone
  uint32_t half_life;             // of the rows' frequencies
};

// The loops over rows, compiled once for each instruction set. All give the same bits: sixteen
// lanes wide whatever the registers, the same order of additions, no fused multiply-add.
struct RowKernels {
  const char* name;
  void (*fill_uniform)(uint64_t key, int64_t id, int64_t column_begin, int64_t column_end, float low, float high, float* row);
  void (*pool)(const PoolArgs& args);
  void (*update)(const UpdateArgs& args);
  float (*dot)(RowType type, const float* row, const float* values, int64_t n);
  void (*widen)(RowType type, const float* row, int64_t columns, float* out);
  void (*narrow)(RowType type, const float* values, int64_t columns, float* row);  // to nearest, ties to even
};

// The fastest that this processor runs, or the one that the environment variable RECSTORE_ISA
// (baseline, avx2 or avx512) names.
const RowKernels& row_kernels();

}  // namespace recstore
