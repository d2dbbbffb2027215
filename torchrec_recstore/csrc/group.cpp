#include "group.h"

#include <algorithm>
#include <utility>

namespace recstore {

Group::Group(std::vector<std::shared_ptr<Table>> group_tables, std::vector<Routing> table_routings,
             std::vector<int64_t> feature_table_numbers, bool mean_pooling)
    : tables(std::move(group_tables)),
      routings(std::move(table_routings)),
      feature_tables(std::move(feature_table_numbers)),
      column_offsets(1, 0),
      mean(mean_pooling) {
  for (const int64_t t : feature_tables) column_offsets.push_back(column_offsets.back() + tables[t]->config().columns());
  for (const auto& table : tables) lock_order.push_back(table.get());
  std::sort(lock_order.begin(), lock_order.end());
  lock_order.erase(std::unique(lock_order.begin(), lock_order.end()), lock_order.end());
}

TableLocks Group::lock() const {
  TableLocks locks(lock_order);
  for (const auto& table : tables) table->check_open();
  return locks;
}

}  // namespace recstore
