#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "batch.h"
#include "executor.h"
#include "mix.h"
#include "table.h"

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

// Tables that are looked up in one call, and the features that do it.
struct Group {
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<Routing> routings;           // one a table
  std::vector<int64_t> feature_tables;     // one a feature: its table's number
  std::vector<int64_t> column_offsets;     // one a feature, and the sum: where its columns begin in an output row
  bool mean = false;                       // pooling: sum or mean

  Group(std::vector<std::shared_ptr<Table>> tables, std::vector<Routing> routings, std::vector<int64_t> feature_tables,
        bool mean);

  int64_t features() const { return static_cast<int64_t>(feature_tables.size()); }
  int64_t columns() const { return column_offsets.back(); }
  // Locks every table, always in the same order. Throws where one is closed.
  std::vector<std::unique_lock<std::mutex>> lock() const;
  std::vector<std::unique_lock<std::mutex>> lock_even_closed() const;
};

}  // namespace recstore
