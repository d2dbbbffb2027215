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
}

std::vector<std::unique_lock<std::mutex>> Group::lock() const {
  auto locks = lock_even_closed();
  for (const auto& table : tables) table->check_open();
  return locks;
}

std::vector<std::unique_lock<std::mutex>> Group::lock_even_closed() const {
  std::vector<Table*> order;
  for (const auto& table : tables) order.push_back(table.get());
  std::sort(order.begin(), order.end());
  order.erase(std::unique(order.begin(), order.end()), order.end());
  std::vector<std::unique_lock<std::mutex>> locks;
  for (Table* table : order) locks.emplace_back(table->mutex());
  return locks;
}

}  // namespace recstore
