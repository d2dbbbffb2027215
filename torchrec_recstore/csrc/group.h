#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "batch.h"
#include "executor.h"
#include "routing.h"
#include "table.h"

namespace recstore {

// Holds the locks of tables.
class TableLocks {
 public:
  // tables: distinct, by ascending address, so that everybody locks in the same order; it must outlive this.
  explicit TableLocks(const std::vector<Table*>& tables) : tables_(&tables) {
    for (Table* table : tables) table->mutex().lock();
  }
  TableLocks(TableLocks&& other) noexcept : tables_(std::exchange(other.tables_, nullptr)) {}
  ~TableLocks() {
    if (tables_ == nullptr) return;
    for (Table* table : *tables_) table->mutex().unlock();
  }

 private:
  const std::vector<Table*>* tables_;
};

// Tables that are looked up in one call, and the features that do it.
struct Group {
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<Routing> routings;           // one a table
  std::vector<int64_t> feature_tables;     // one a feature: its table's number
  std::vector<int64_t> column_offsets;     // one a feature, and the sum: where its columns begin in an output row
  bool mean = false;                       // pooling: sum or mean
  std::vector<Table*> lock_order;          // the distinct tables, by ascending address

  Group(std::vector<std::shared_ptr<Table>> tables, std::vector<Routing> routings, std::vector<int64_t> feature_tables,
        bool mean);

  int64_t features() const { return static_cast<int64_t>(feature_tables.size()); }
  int64_t columns() const { return column_offsets.back(); }
  // Locks every table. Throws InvalidArgument where one is closed.
  TableLocks lock() const;
  TableLocks lock_even_closed() const { return TableLocks(lock_order); }
};

}  // namespace recstore
