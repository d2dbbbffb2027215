#include "lookup/prefetch.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "bounds/eviction.h"
#include "lookup/find.h"
#include "lookup/slots_ahead.h"

namespace recstore {
namespace {

constexpr int64_t kLeastRecorded = 16384;  // slots; see Vacated

// Begins the table's record of vacated slots. It has room for two evictions, which may happen before the lookup.
void record_vacated(Table& table) {
  const int64_t wanted = std::max(kLeastRecorded, 2 * leaving_at_once(table, 0));
  int64_t capacity = kLeastRecorded;
  while (capacity < wanted) capacity *= 2;
  table.vacated().start(capacity);
}

}  // namespace

void prefetch(const Group& group, const int64_t* ids, int64_t n_ids, const std::vector<int64_t>& counts,
              Executor& executor) {
  check_counts(counts, group.features(), "feature", n_ids);
  auto ahead = std::make_unique<SlotsAhead>(ids, n_ids, counts, group.tables.size());
  std::vector<bool> stamped(group.tables.size(), false);
  std::vector<int64_t> raw;
  const int64_t* next = ids;
  Slot* slots = ahead->slot_data();
  for (size_t f = 0; f < counts.size(); next += counts[f], slots += counts[f], ++f) {
    const int64_t t = group.feature_tables[f];
    const int64_t* raw_ids = next;
    if (group.routings[t].world_size != 0) {
      raw.resize(static_cast<size_t>(counts[f]));
      std::transform(next, next + counts[f], raw.begin(), [&](int64_t id) { return group.routings[t].raw_id(id); });
      raw_ids = raw.data();
    }
    const LockedTable table(group.tables[t]);
    if (!stamped[t]) {
      record_vacated(*table);
      ahead->stamps[t] = table->vacated().now();
      stamped[t] = true;
    }
    if (table->config().bounds.limit_new_rows()) {
      find(*table, raw_ids, counts[f], slots, executor);
    } else {
      const int64_t before = table->size();
      find_or_insert(*table, raw_ids, counts[f], slots, executor, Arrival::kUpdate);
      table->counters().misses += table->size() - before;
    }
  }
  if (n_ids > 0) group.coming->add(std::move(ahead));
}

}  // namespace recstore
