// Lookups, passes and updates of the core: the bits are equal for every number of threads, slots of pending passes are
// kept, and a call that fails changes nothing.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "rows/table.h"
#include "testing.h"

using namespace recstore;

namespace {

std::shared_ptr<Table> make_table(int64_t columns, OptimizerKind kind, const char* name = "t",
                                  double max_gradient = 0.0) {
  TableConfig config;
  config.name = name;
  config.column_end = columns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  set_optimizer(config, kind);
  config.optimizer.max_gradient = max_gradient;
  config.optimizer.max_gradient_norm = max_gradient;
  return std::make_shared<Table>(config);
}

std::shared_ptr<const Group> make_group(std::vector<std::shared_ptr<Table>> tables, std::vector<int64_t> features,
                                        bool mean = false) {
  const size_t n = tables.size();
  return std::make_shared<const Group>(std::move(tables), std::vector<Routing>(n), std::move(features), mean);
}

constexpr int64_t kManyBags = 3000;

struct Data {
  std::vector<int64_t> ids, offsets;
  std::vector<float> weights, grad;
};

// Makes bags of 0 to 6 ids. A quarter of the ids are one id, which has thousands of positions in a large batch.
Data make_data(uint64_t seed, int64_t features, int64_t bags, int64_t columns) {
  std::mt19937_64 random(seed);
  Data data;
  data.offsets.push_back(0);
  for (int64_t bag = 0; bag < features * bags; ++bag) {
    for (uint64_t n = random() % 7; n > 0; --n) {
      const uint64_t kind = random() % 4, spread = kind == 0 ? 1000000 : kind == 1 ? 1 : 40;
      data.ids.push_back(static_cast<int64_t>(random() % spread) - 20);
      data.weights.push_back(static_cast<float>(random() % 100) / 50.0f);
    }
    data.offsets.push_back(static_cast<int64_t>(data.ids.size()));
  }
  for (int64_t i = 0; i < bags * columns; ++i) {
    data.grad.push_back(static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
  }
  return data;
}

Batch batch_of(const Data& data, int64_t bags, bool weighted) {
  Batch batch;
  batch.ids = data.ids.data();
  batch.n_ids = static_cast<int64_t>(data.ids.size());
  batch.offsets = data.offsets.data();
  batch.weights = weighted ? data.weights.data() : nullptr;
  batch.bags = bags;
  return batch;
}

// Two steps, and a lookup that reads. `data` has a batch for each.
std::vector<float> train_steps(const std::vector<Data>& data, OptimizerKind kind, int threads, bool weighted,
                               bool mean) {
  Threads executor(threads, 5);
  auto first = make_table(17, kind, "first", mean ? 0.5 : 0.0);
  auto second = make_table(64, kind, "second");
  const auto group = make_group({first, second}, {0, 1, 1}, mean);
  std::vector<float> out(static_cast<size_t>(kManyBags * group->columns()));
  for (size_t step = 0; step < 2; ++step) {
    const auto pass = begun(group, batch_of(data[step], kManyBags, weighted), out.data(), executor);
    std::vector<float> grad_weights(data[step].ids.size());
    pass->backward(data[step].grad.data(), {0.1f, 0.2f}, grad_weights.data(), executor);
  }
  read(*group, batch_of(data[2], kManyBags, weighted), out.data(), executor);
  return out;
}

void bits_do_not_depend_on_threads() {
  std::vector<Data> data;
  for (uint64_t seed = 0; seed < 3; ++seed) data.push_back(make_data(seed, 3, kManyBags, 17 + 2 * 64));
  for (int64_t number = 0; number < kOptimizers; ++number) {
    const auto kind = static_cast<OptimizerKind>(number);
    for (const bool weighted : {false, true}) {
      const auto expected = train_steps(data, kind, 1, weighted, !weighted);
      for (const int threads : {2, 5}) {
        const auto out = train_steps(data, kind, threads, weighted, !weighted);
        CHECK(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0);
      }
    }
  }
}

// Tables of every kind of bounds, in batches with so many new ids that threads share the tables.
std::vector<float> bounded_steps(int threads) {
  constexpr int64_t kTables = 9, kBags = 4000, kDim = 3;
  std::mt19937_64 random(1);
  Threads executor(threads);
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<int64_t> features;
  for (int64_t t = 0; t < kTables; ++t) {
    TableConfig config = make_table(kDim, OptimizerKind::kAdam)->config();
    config.name = "t" + std::to_string(t);
    if (t % 3 == 0) {
      config.bounds.max_rows = 6000;
      config.bounds.eviction = t == 3 ? Eviction::kLeastFrequent : Eviction::kLeastRecent;
    }
    if (t % 3 == 1) {
      config.bounds.min_frequency = 2;
      config.bounds.counter_bytes = 1 << 16;
    }
    if (t % 2 == 0) config.bounds.expiry = 4;
    tables.push_back(std::make_shared<Table>(config));
    features.push_back(t);
  }
  const auto group = make_group(tables, features);
  std::vector<float> out(static_cast<size_t>(kBags * group->columns())), all;
  const std::vector<float> grad(out.size(), 0.1f), rates(static_cast<size_t>(kTables), 0.1f);
  for (int64_t step = 0; step < 7; ++step) {
    std::vector<int64_t> ids(static_cast<size_t>(kTables * kBags));
    for (int64_t& id : ids) id = static_cast<int64_t>(random() % 6000) + step * 4000;
    Batch batch;
    batch.ids = ids.data();
    batch.n_ids = kTables * kBags;
    batch.bags = kBags;
    const auto pass = begun(group, batch, out.data(), executor);
    pass->backward(grad.data(), rates, nullptr, executor);
    all.insert(all.end(), out.begin(), out.end());
  }
  for (const auto& table : tables) {
    const Counters& counters = table->counters();
    for (const int64_t number :
         {table->size(), counters.misses, counters.inserts, counters.refused, counters.evicted, counters.expired}) {
      all.push_back(static_cast<float>(number));
    }
    CHECK(counters.evicted > 0 || table->config().bounds.max_rows == 0);
    CHECK(counters.refused > 0 || table->config().bounds.min_frequency == 0);
    CHECK(counters.expired > 0 || table->config().bounds.expiry == 0 || counters.evicted > 0);
  }
  return all;
}

void bounds_do_not_depend_on_threads() {
  const auto expected = bounded_steps(1);
  for (const int threads : {2, 8}) CHECK(bounded_steps(threads) == expected);
}

std::vector<double> row_of(const Table& table, int64_t id) {
  const float* row = table.rows().row(table.index().find(id));
  return {row, row + table.config().columns()};
}

// Compares pooling, the gradients of the weights and an update of weighted bags with plain loops in double.
void pooling_and_its_gradients_are_those_of_doubles(bool mean) {
  constexpr int64_t kBags = 600;  // several tasks
  constexpr double kRate = 0.5;
  const auto near = [](double value, double expected) {
    return std::abs(value - expected) <= 1e-5 * (1.0 + std::abs(expected));
  };
  Threads executor(2);
  const auto make_plain = [](const char* name, int64_t columns) {
    TableConfig config;
    config.name = name;
    config.column_end = columns;
    config.init = {InitKind::kUniform, -1.0, 1.0};
    config.optimizer.kind = OptimizerKind::kSgd;
    return std::make_shared<Table>(config);
  };
  const auto group = make_group({make_plain("first", 17), make_plain("second", 64)}, {0, 1, 1}, mean);
  const Data data = make_data(3, group->features(), kBags, group->columns());
  const auto n = data.ids.size();
  std::vector<float> out(static_cast<size_t>(kBags * group->columns())), grad_weights(n), only(n);
  const auto pass = begun(group, batch_of(data, kBags, true), out.data(), executor);

  std::map<std::pair<int64_t, int64_t>, std::vector<double>> updated;  // by table and id
  std::vector<double> expected_weights(n);
  for (int64_t f = 0; f < group->features(); ++f) {
    const int64_t t = group->feature_tables[f];
    const Table& table = *group->tables[t];
    for (int64_t bag = 0; bag < kBags; ++bag) {
      const int64_t first = data.offsets[f * kBags + bag], last = data.offsets[f * kBags + bag + 1];
      const double divisor = mean && last > first ? static_cast<double>(last - first) : 1.0;
      const int64_t begin = bag * group->columns() + group->column_offsets[f];
      std::vector<double> pooled(static_cast<size_t>(table.config().columns()));
      for (int64_t p = first; p < last; ++p) {
        const std::vector<double> row = row_of(table, data.ids[p]);
        auto& after = updated.emplace(std::make_pair(t, data.ids[p]), row).first->second;
        for (size_t c = 0; c < row.size(); ++c) {
          const double grad = data.grad[begin + c] / divisor;
          pooled[c] += data.weights[p] * row[c] / divisor;
          expected_weights[p] += grad * row[c];
          after[c] -= kRate * data.weights[p] * grad;
        }
      }
      for (size_t c = 0; c < pooled.size(); ++c) CHECK(near(out[begin + c], pooled[c]));
    }
  }
  pass->weight_gradients_only(data.grad.data(), only.data(), executor);
  pass->backward(data.grad.data(), {kRate, kRate}, grad_weights.data(), executor);
  CHECK(only == grad_weights);
  for (size_t p = 0; p < n; ++p) CHECK(near(grad_weights[p], expected_weights[p]));
  for (const auto& [where, after] : updated) {
    const std::vector<double> row = row_of(*group->tables[where.first], where.second);
    for (size_t c = 0; c < row.size(); ++c) CHECK(near(row[c], after[c]));
  }
}

void pending_slots_are_not_reused() {
  Threads executor(1);
  auto table = make_table(8, OptimizerKind::kSgd);
  const auto group = make_group({table}, {0});
  const std::vector<int64_t> ids{10, 20, 30};
  Batch batch;
  batch.ids = ids.data();
  batch.n_ids = batch.bags = 3;
  std::vector<float> out(24), fresh(24), grad(24, 1.0f);
  auto pass = begun(group, batch, out.data(), executor);
  {
    const auto locks = group->lock();
    CHECK(table->remove(ids.data(), 3) == 3);
  }
  // New rows must not use the slots that the pass will update.
  const std::vector<int64_t> others{1, 2, 3};
  Batch other = batch;
  other.ids = others.data();
  begun(group, other, fresh.data(), executor);
  pass->backward(grad.data(), {1.0f}, nullptr, executor);
  std::vector<Slot> slots(3);
  std::vector<float> after(24);
  read(*group, other, after.data(), executor);
  CHECK(after == fresh);
  pass.reset();
  const int64_t before = table->rows().bytes();
  begun(group, batch, out.data(), executor);  // three new rows, in the three freed slots
  CHECK(table->rows().bytes() <= before);
  CHECK(table->size() == 6);
}

void counters_count_distinct_ids_once() {
  Threads executor(2);
  auto table = make_table(4, OptimizerKind::kSgd);
  const auto group = make_group({table}, {0});
  const std::vector<int64_t> ids{5, 5, 7, 5};
  Batch batch;
  batch.ids = ids.data();
  batch.n_ids = batch.bags = 4;
  std::vector<float> out(16), grad(16);
  {
    const auto pass = begun(group, batch, out.data(), executor);
    table->settle_passes(executor);
    CHECK(table->counters().lookups == 2);
    pass->backward(grad.data(), {0.1f}, nullptr, executor);
    pass->backward(grad.data(), {0.1f}, nullptr, executor);
  }
  begun(group, batch, out.data(), executor);
  const Counters& c = table->counters();
  CHECK(c.lookups == 4 && c.misses == 2 && c.inserts == 2 && c.updates == 4 && c.steps == 2);
  CHECK(table->optimizer_steps() == 2);
  table->set_optimizer_steps(9);
  CHECK(table->optimizer_steps() == 9);
  Slot slots[4];
  find(*table, ids.data(), 4, slots, executor);
  CHECK(slots[0] == slots[1] && slots[0] != slots[2]);
  CHECK(table->rows().meta(slots[0]).last_step == 2 && table->rows().meta(slots[0]).frequency == 2);
}

// settle_passes() settles only the table's own part of a pending pass, because the locks of the other tables are not
// held.
void tables_settle_by_themselves() {
  Threads executor(2);
  auto first = make_table(4, OptimizerKind::kSgd, "first"), second = make_table(4, OptimizerKind::kSgd, "second");
  const auto group = make_group({first, second}, {0, 1});
  const std::vector<int64_t> ids{1, 2, 3, 3}, offsets{0, 1, 2, 3, 4};
  Batch batch;
  batch.ids = ids.data();
  batch.n_ids = 4;
  batch.offsets = offsets.data();
  batch.bags = 2;
  std::vector<float> out(16);
  {
    const auto pass = begun(group, batch, out.data(), executor);
    first->settle_passes(executor);
    CHECK(first->counters().lookups == 2 && second->counters().lookups == 0);
    first->settle_passes(executor);
  }
  CHECK(first->counters().lookups == 2 && second->counters().lookups == 1);
}

void bad_offsets_change_nothing() {
  Threads executor(1);
  auto table = make_table(4, OptimizerKind::kSgd);
  const auto group = make_group({table}, {0});
  const std::vector<int64_t> ids{1, 2, 3};
  std::vector<float> out(4 * 4);
  for (const std::vector<int64_t>& offsets :
       {std::vector<int64_t>{0, 2, 1, 3}, {1, 1, 2, 3}, {0, 1, 2, 4}, {0, 9, 9, 3}, {0, -5, 1, 3}}) {
    Batch batch;
    batch.ids = ids.data();
    batch.n_ids = 3;
    batch.offsets = offsets.data();
    batch.bags = 3;
    CHECK_THROWS(begun(group, batch, out.data(), executor), InvalidArgument);
    CHECK(table->size() == 0 && table->counters().steps == 0);
  }
}

void accumulated_passes_update_once() {
  Threads executor(2);
  constexpr int64_t kBags = 500;
  auto first = make_table(5, OptimizerKind::kAdam, "first", 0.5);
  auto second = make_table(16, OptimizerKind::kSgd, "second");
  const auto group = make_group({first, second}, {0, 1, 1}, true);
  std::vector<float> out(static_cast<size_t>(kBags * group->columns()));
  std::vector<Data> data;
  for (uint64_t step = 0; step < 3; ++step) data.push_back(make_data(step, group->features(), kBags, group->columns()));
  std::vector<std::shared_ptr<Pass>> passes;
  std::vector<const float*> grads;
  for (const Data& each : data) {
    passes.push_back(begun(group, batch_of(each, kBags, true), out.data(), executor));
    grads.push_back(each.grad.data());
  }
  accumulated_backward(passes, grads, {0.1f, 0.2f}, executor);
  CHECK(first->optimizer_steps() == 1 && second->optimizer_steps() == 1);
  CHECK(first->counters().updates == first->size() && second->counters().updates == second->size());
  CHECK(first->counters().steps == 3 && first->counters().lookups > first->size());
}

void states_are_as_the_layout_has_them() {
  for (int64_t kind = 0; kind < kOptimizers; ++kind) {
    OptimizerConfig config;
    config.kind = static_cast<OptimizerKind>(kind);
    const auto states = config.states();
    int64_t rows = 0;
    for (size_t i = 0; i < states.size(); ++i) {
      rows += states[i].row_wise;
      CHECK(i == 0 || states[i].row_wise || !states[i - 1].row_wise);  // element-wise ones come first
    }
    CHECK(rows <= 1);
    CHECK(config.element_states() == static_cast<int64_t>(states.size()) - rows);
  }
  OptimizerConfig sgd;
  sgd.kind = OptimizerKind::kSgd;
  CHECK(sgd.states().empty());
  sgd.momentum = 0.9;
  CHECK(sgd.element_states() == 1);
}

void shards_hold_columns_of_the_same_row() {
  for (const auto kind : {InitKind::kUniform, InitKind::kNormal}) {
    TableConfig config;
    config.name = "whole";
    config.column_end = 150;
    config.init.kind = kind;
    config.init.low = -0.5;
    config.init.high = 0.5;
    config.init.mean = -0.5;
    config.init.standard_deviation = 0.5;
    config.init.truncate_std = 2.0;
    std::vector<float> whole(150);
    const int64_t id = std::numeric_limits<int64_t>::min();
    Initializer(config).fill(id, whole.data());
    for (int64_t begin = 0; begin < 150; begin += 13) {
      config.column_begin = begin;
      config.column_end = std::min<int64_t>(begin + 40, 150);
      std::vector<float> part(static_cast<size_t>(config.columns()));
      Initializer(config).fill(id, part.data());
      CHECK(std::equal(part.begin(), part.end(), whole.begin() + begin));
    }
  }
}

}  // namespace

int main() {
  bits_do_not_depend_on_threads();
  bounds_do_not_depend_on_threads();
  for (const bool mean : {false, true}) pooling_and_its_gradients_are_those_of_doubles(mean);
  pending_slots_are_not_reused();
  counters_count_distinct_ids_once();
  tables_settle_by_themselves();
  accumulated_passes_update_once();
  states_are_as_the_layout_has_them();
  bad_offsets_change_nothing();
  shards_hold_columns_of_the_same_row();
  std::puts("test_table passed");
}
