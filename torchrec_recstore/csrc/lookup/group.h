#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/executor.h"
#include "lookup/batch.h"
#include "lookup/slots_ahead.h"
#include "rows/table.h"

namespace recstore {

// Holds the locks of several tables: alone, or shared with other readers.
template <bool kShared>
class TableLocksOf {
 public:
  // tables: distinct, in ascending order of address, so that all threads lock in the same order. The vector must
  // outlive this object.
  explicit TableLocksOf(const std::vector<Table*>& tables) : tables_(&tables) {
    for (Table* table : tables) kShared ? table->mutex().lock_shared() : table->mutex().lock();
  }
  TableLocksOf(TableLocksOf&& other) noexcept : tables_(std::exchange(other.tables_, nullptr)) {}
  ~TableLocksOf() {
    if (tables_ == nullptr) return;
    for (Table* table : *tables_) kShared ? table->mutex().unlock_shared() : table->mutex().unlock();
  }

 private:
  const std::vector<Table*>* tables_;
};
using TableLocks = TableLocksOf<false>;
using SharedTableLocks = TableLocksOf<true>;

// Tables that one call looks up, and the features that look them up.
struct Group {
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<Routing> routings;        // one for each table
  std::vector<int64_t> feature_tables;  // for each feature, the number of its table
  std::vector<int64_t> column_offsets;  // (features + 1,): first column of each feature in an output row, and the total
  bool mean = false;                    // pooling: mean or sum
  std::vector<Table*> lock_order;       // the distinct tables, in ascending order of address
  std::unique_ptr<ComingBatches> coming = std::make_unique<ComingBatches>();  // has a lock of its own

  Group(std::vector<std::shared_ptr<Table>> tables, std::vector<Routing> routings, std::vector<int64_t> feature_tables,
        bool mean);

  int64_t features() const { return static_cast<int64_t>(feature_tables.size()); }
  int64_t columns() const { return column_offsets.back(); }
  // Locks every table, for a call that changes them. Throws InvalidArgument if a table is closed.
  TableLocks lock() const;
  // Shares every table with other readers, for a call that changes nothing. Throws InvalidArgument if a table is
  // closed.
  SharedTableLocks lock_shared() const;
  TableLocks lock_even_closed() const { return TableLocks(lock_order); }
};

// A group of one table and one feature, without routing.
std::shared_ptr<const Group> one_table_group(std::shared_ptr<Table> table);

// Number of ids that a batch looks up in each table. The offsets have been checked.
std::vector<int64_t> count_table_ids(const Group& group, const Batch& batch);
// Writes the raw ids that a batch looks up in each table, feature by feature. out: one array for each table, of the
// size that count_table_ids() returns.
void copy_table_ids(const Group& group, const Batch& batch, const std::vector<int64_t*>& out);

// Throws InvalidArgument unless `counts` has one entry for each of `owners` and sums to n_ids.
// owner: the name of an owner in the error, "feature" or "group".
void check_counts(const std::vector<int64_t>& counts, int64_t owners, const char* owner, int64_t n_ids);

// The part of one group of one feature in a lookup of several groups without pooling.
struct GroupRows {
  std::shared_ptr<const Group> group;
  Batch batch;
};
// Gives the first counts[0] of ids (n_ids,) to the first group, the next ones to the second, and so on. Returns the
// number of floats of all rows. Throws InvalidArgument if a group has more than one feature or the counts do not match.
int64_t divide_ids(std::vector<GroupRows>& parts, const int64_t* ids, int64_t n_ids,
                   const std::vector<int64_t>& counts);

}  // namespace recstore
