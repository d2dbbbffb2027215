#pragma once

#include <cstdint>

#include "mix.h"

namespace recstore {

// Undoes TorchRec's row-wise split (fbgemm's block_bucketize_sparse_features, torchrec 1.8.0):
//   id = local + rank * block_rows  where 0 <= local < block_rows, else  local * world_size + rank  (mod 2**64)
// and after it the mix that hash routing puts ahead of the split. world_size 0: ids come as they are.
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

}  // namespace recstore
