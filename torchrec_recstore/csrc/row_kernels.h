#pragma once

#include <cstdint>
#include <type_traits>

#include "batch.h"
#include "index.h"
#include "optimizer.h"

namespace recstore {

// What a row carries beside its weights and element-wise state.
struct RowMeta {
  float state;         // row-wise optimizer state
  uint32_t last_step;  // the last step that looked the row up
  uint32_t frequency;  // steps that looked it up
};

// Rows of one table, as the inner loops see them.
struct RowsView {
  float* data;      // a row: weights (columns,), then element-wise optimizer state
  int64_t stride;   // floats from row to row
  int64_t columns;
  RowMeta* meta;    // one a slot
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
  OptimizerKind optimizer;
  StepScalars scalars;
  uint32_t step;                  // written to last_step, with one more of frequency; 0: leave the bookkeeping alone
};

// The loops over rows, compiled once for each instruction set. All give the same bits: sixteen
// lanes wide whatever the registers, the same order of additions, no fused multiply-add.
struct RowKernels {
  const char* name;
  void (*fill_uniform)(uint64_t key, int64_t id, int64_t column_begin, int64_t column_end, float low, float high, float* row);
  void (*pool)(const PoolArgs& args);
  void (*update)(const UpdateArgs& args);
  float (*dot)(const float* a, const float* b, int64_t n);
};

// The fastest that this processor runs, or the one that the environment variable RECSTORE_ISA
// (baseline, avx2 or avx512) names.
const RowKernels& row_kernels();

}  // namespace recstore
