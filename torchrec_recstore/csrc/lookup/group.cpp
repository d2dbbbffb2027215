#include "lookup/group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace recstore {

Group::Group(std::vector<std::shared_ptr<Table>> group_tables, std::vector<Routing> table_routings,
             std::vector<int64_t> feature_table_numbers, bool mean_pooling)
    : tables(std::move(group_tables)),
      routings(std::move(table_routings)),
      feature_tables(std::move(feature_table_numbers)),
      column_offsets(1, 0),
      mean(mean_pooling) {
  for (const int64_t t : feature_tables) {
    column_offsets.push_back(column_offsets.back() + tables[t]->config().columns());
  }
  for (const auto& table : tables) lock_order.push_back(table.get());
  std::sort(lock_order.begin(), lock_order.end());
  lock_order.erase(std::unique(lock_order.begin(), lock_order.end()), lock_order.end());
}

TableLocks Group::lock() const {
  TableLocks locks(lock_order);
  for (const auto& table : tables) table->check_open();
  return locks;
}

SharedTableLocks Group::lock_shared() const {
  SharedTableLocks locks(lock_order);
  for (const auto& table : tables) table->check_open();
  return locks;
}

std::shared_ptr<const Group> one_table_group(std::shared_ptr<Table> table) {
  std::vector<std::shared_ptr<Table>> tables{std::move(table)};
  return std::make_shared<const Group>(std::move(tables), std::vector<Routing>(1), std::vector<int64_t>{0}, false);
}

std::vector<int64_t> count_table_ids(const Group& group, const Batch& batch) {
  std::vector<int64_t> counts(group.tables.size(), 0);
  for (int64_t f = 0; f < group.features(); ++f) {
    counts[group.feature_tables[f]] += batch.offset((f + 1) * batch.bags) - batch.offset(f * batch.bags);
  }
  return counts;
}

void copy_table_ids(const Group& group, const Batch& batch, const std::vector<int64_t*>& out) {
  std::vector<int64_t*> next = out;
  for (int64_t f = 0; f < group.features(); ++f) {
    const int64_t t = group.feature_tables[f];
    const int64_t *begin = batch.ids + batch.offset(f * batch.bags),
                  *end = batch.ids + batch.offset((f + 1) * batch.bags);
    next[t] = std::transform(begin, end, next[t], [&](int64_t id) { return group.routings[t].raw_id(id); });
  }
}

void check_counts(const std::vector<int64_t>& counts, int64_t owners, const char* owner, int64_t n_ids) {
  int64_t left = n_ids;
  bool fits = static_cast<int64_t>(counts.size()) == owners;
  for (const int64_t count : counts) {
    fits = fits && count >= 0 && count <= left;
    left -= fits ? count : 0;
  }
  if (fits && left == 0) return;
  throw InvalidArgument("counts must have one entry for each " + std::string(owner) +
                        " and sum to the number of ids, " + std::to_string(n_ids));
}

int64_t divide_ids(std::vector<GroupRows>& parts, const int64_t* ids, int64_t n_ids,
                   const std::vector<int64_t>& counts) {
  check_counts(counts, static_cast<int64_t>(parts.size()), "group", n_ids);
  int64_t floats = 0;
  for (size_t g = 0; g < parts.size(); ++g) {
    auto& [group, batch] = parts[g];
    if (group->features() != 1) throw InvalidArgument("each group must have one feature");
    batch.ids = ids;
    batch.n_ids = batch.bags = counts[g];
    ids += counts[g];
    floats += counts[g] * group->columns();
  }
  return floats;
}

}  // namespace recstore
