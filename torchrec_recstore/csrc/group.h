#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "batch.h"
#include "executor.h"
#include "routing.h"
#include "table.h"

namespace recstore {

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
