#pragma once

#include <cstdint>

#include "base/buffer_pool.h"
#include "base/executor.h"
#include "base/mix.h"

namespace recstore {

// A batch of bags of ids. The bags are numbered feature by feature. Without offsets, each id is a bag of its own.
struct Batch {
  const int64_t* ids = nullptr;  // (n_ids,)
  int64_t n_ids = 0;
  const int64_t* offsets = nullptr;  // (features * bags + 1,) or null
  const float* weights = nullptr;    // (n_ids,) per-sample weights, or null
  int64_t bags = 0;                  // number of bags of each feature

  // Position of the first id of the bag with this number.
  int64_t offset(int64_t bag) const { return offsets != nullptr ? offsets[bag] : bag; }
};

// Maps the ids that TorchRec's row-wise input distribution sends to a shard back to raw ids. The split of
// fbgemm's block_bucketize_sparse_features (torchrec 1.8.0) is undone first:
//   id = local + rank * block_rows  if 0 <= local < block_rows, else  local * world_size + rank  (mod 2**64)
// Then the mix that hash routing applies before the split is undone. A world_size of 0 leaves ids unchanged.
struct Routing {
  int64_t block_rows = 0;
  int64_t world_size = 0;
  int64_t rank = 0;
  bool mixed = false;

  int64_t raw_id(int64_t local) const {
    if (world_size == 0) return local;
    const auto l = static_cast<uint64_t>(local), r = static_cast<uint64_t>(rank);
    const uint64_t id = l < static_cast<uint64_t>(block_rows) ? l + r * static_cast<uint64_t>(block_rows)
                                                              : l * static_cast<uint64_t>(world_size) + r;
    return static_cast<int64_t>(mixed ? unmix(id) : id);
  }
};

// Number of bags of each feature in a batch with this many offsets.
// Throws InvalidArgument unless the number of offsets is features * bags + 1.
int64_t count_bags(int64_t offsets, int64_t features);

// Whether the offsets (n,), of type int32_t or int64_t, are 0, 1, ..., n - 1: each id is a bag of its own, so that a
// batch needs no offsets.
template <class T>
bool each_its_own(const T* offsets, int64_t n, Executor& executor);

// Copies offsets (n,) of type int32_t or int64_t to int64_t. Throws OutOfMemory.
template <class T>
BufferPool::Buffer copy_offsets(const T* offsets, int64_t n, Executor& executor);

// Throws InvalidArgument unless the offsets ascend from 0 to the number of ids. The tasks of a lookup rely on it: each
// task writes the positions of its own bags only.
void check_offsets(const Batch& batch, int64_t features, Executor& executor);

// Writes each of ids (n,), mapped by mix() or by unmix(), to out (n,).
void mix_ids(const int64_t* ids, int64_t n, bool inverse, int64_t* out, Executor& executor);

}  // namespace recstore
