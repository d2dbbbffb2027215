// The functions that the ops call for one table or group: updates and writes by id, evaluation lookups, prefetches,
// queries about bounds, snapshots.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "cold/cold_rows.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "lookup/prefetch.h"
#include "rows/transfer.h"
#include "snapshot/snapshot.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kColumns = 3;

TableConfig make_config(const Bounds& bounds = {}) {
  TableConfig config;
  config.name = "t";
  config.column_end = kColumns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.optimizer.kind = OptimizerKind::kAdagrad;
  config.bounds = bounds;
  return config;
}
std::shared_ptr<Table> make_table(const Bounds& bounds = {}) { return std::make_shared<Table>(make_config(bounds)); }

Batch batch_of(const std::vector<int64_t>& ids) {
  Batch batch;
  batch.ids = ids.data();
  batch.n_ids = batch.bags = static_cast<int64_t>(ids.size());
  return batch;
}

std::vector<float> read_weights(const std::shared_ptr<Table>& table, const std::vector<int64_t>& ids) {
  SerialExecutor executor;
  std::vector<float> out(ids.size() * kColumns);
  read(*one_table_group(table), batch_of(ids), out.data(), executor);
  return out;
}
std::vector<float> initial_weights(const std::vector<int64_t>& ids) {
  std::vector<float> out(ids.size() * kColumns);
  for (size_t i = 0; i < ids.size(); ++i) Initializer(make_config()).fill(ids[i], out.data() + i * kColumns);
  return out;
}
std::vector<char> image_of(const std::shared_ptr<Table>& table, int64_t id) {
  SerialExecutor executor;
  const LockedTable locked(table);
  std::vector<char> image(static_cast<size_t>(table->image_bytes()));
  read_images(*table, &id, 1, image.data(), executor);
  return image;
}
void step(const std::shared_ptr<Table>& table, const std::vector<int64_t>& ids) {
  SerialExecutor executor;
  std::vector<float> out(ids.size() * kColumns);
  begun(one_table_group(table), batch_of(ids), out.data(), executor);
}

// An executor whose threads must not be used.
class NoThreads final : public Executor {
 public:
  int threads() const override { return 4; }
  void run(int, Body, void*) override { CHECK(false); }
};

void an_update_by_id_is_that_of_a_pass() {
  Threads executor(2);
  const auto updated = make_table(), trained = make_table();
  const std::vector<int64_t> ids{5, -9, 5, 7};
  const std::vector<float> grad{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  std::vector<float> out(grad.size());
  for (int round = 0; round < 3; ++round) {
    update_rows(*one_table_group(updated), batch_of(ids), grad.data(), 0.1f, executor);
    begun(one_table_group(trained), batch_of(ids), out.data(), executor)
        ->backward(grad.data(), {0.1f}, nullptr, executor);
  }
  CHECK(read_weights(updated, ids) == read_weights(trained, ids));
  CHECK(read_weights(updated, ids) != initial_weights(ids));
  const Counters& counters = updated->counters();
  CHECK(updated->size() == 3 && counters.inserts == 3 && counters.updates == 9 && counters.steps == 0 &&
        counters.misses == 0);
  CHECK(updated->optimizer_steps() == 3);
}

void an_update_without_room_changes_nothing() {
  SerialExecutor executor;
  Bounds bounds;
  bounds.max_rows = 2;
  const auto table = make_table(bounds);
  const std::vector<int64_t> ids{1, 2, 3};
  const std::vector<float> grad(9, 1.0f);
  CHECK_THROWS(update_rows(*one_table_group(table), batch_of(ids), grad.data(), 0.1f, executor), InvalidArgument);
  CHECK(table->size() == 0 && table->optimizer_steps() == 0);
}

void written_weights_keep_the_optimizer_state() {
  Threads executor(2);
  const auto table = make_table();
  const std::vector<int64_t> ids{1, 2};
  const std::vector<float> grad(6, 2.0f);
  update_rows(*one_table_group(table), batch_of(ids), grad.data(), 0.1f, executor);
  const Slot slot = table->index().find(1);
  const float state = table->rows().row(slot)[kColumns];
  CHECK(state == 4.0f);
  table->rows().mark();
  const std::vector<int64_t> written{1, 9, 1};
  const std::vector<float> weights{1, 1, 1, 2, 2, 2, 3, 3, 3};
  write_weights(*LockedTable(table), written.data(), 3, weights.data(), executor);
  CHECK((read_weights(table, {1, 9}) == std::vector<float>{3, 3, 3, 2, 2, 2}));  // the last one of an id is written
  CHECK(table->rows().row(slot)[kColumns] == state && table->size() == 3);
  std::set<Slot> changed;
  table->rows().changes().for_each_since(1, [&](Slot each) { changed.insert(each); });
  CHECK((changed == std::set<Slot>{slot, table->index().find(9)}));
}

void reading_makes_no_rows() {
  Threads executor(2);
  const auto table = make_table();
  write_weights(*LockedTable(table), std::vector<int64_t>{4}.data(), 1, std::vector<float>{1, 2, 3}.data(), executor);
  CHECK((read_weights(table, {3, 4}) == std::vector<float>{0, 0, 0, 1, 2, 3}));
  const std::vector<int64_t> ids{3, 4, 4, -4};
  bool found[4];
  contains(*LockedTable(table), ids.data(), 4, found, executor);
  CHECK(!found[0] && found[1] && found[2] && !found[3]);
  CHECK(find_rows(*LockedTable(table), ids.data() + 1, 2, executor).size() == 2);
  CHECK_THROWS(find_rows(*LockedTable(table), ids.data(), 4, executor), InvalidArgument);
  CHECK(table->size() == 1 && table->counters().lookups == 0 && table->counters().steps == 0);
  LockedTable(table)->close();
  CHECK_THROWS(read_weights(table, {3}), InvalidArgument);
}

void a_prefetch_makes_the_rows_of_unbounded_tables() {
  SerialExecutor executor;
  Bounds bounds;
  bounds.max_rows = 10;
  bounds.eviction = Eviction::kLeastRecent;
  const auto plain = make_table(), bounded = make_table(bounds);
  const Group group({plain, bounded}, {Routing{10, 2, 1, false}, Routing{}}, {0, 1, 0}, false);
  const std::vector<int64_t> ids{1, 2, 3, 2, 4, 4};
  prefetch(group, ids.data(), 6, {2, 1, 3}, executor);
  CHECK(bounded->size() == 0 && plain->size() == 3);
  CHECK(read_weights(plain, {11, 12, 14}) == initial_weights({11, 12, 14}));  // the raw ids
  CHECK(plain->counters().misses == 3 && plain->counters().inserts == 3 && plain->counters().lookups == 0);
  for (const std::vector<int64_t>& counts : {std::vector<int64_t>{2, 1}, {2, 1, 4}, {7, -1, 0}}) {
    CHECK_THROWS(prefetch(group, ids.data(), 6, counts, executor), InvalidArgument);
  }
}

void passes_that_share_a_table_are_refused() {
  SerialExecutor executor;
  const auto table = make_table(), other = make_table();
  const std::vector<int64_t> ids{1, 2};
  std::vector<float> out(6);
  Pass first(one_table_group(table), batch_of(ids), nullptr, executor),
      second(one_table_group(table), batch_of(ids), nullptr, executor);
  Pass third(one_table_group(other), batch_of(ids), nullptr, executor);
  CHECK_THROWS(Pass::begin({{&first, out.data()}, {&third, out.data()}, {&second, out.data()}}, executor),
               InvalidArgument);
  CHECK(table->size() == 0 && other->size() == 0 && table->clock() == 0);
  Pass::begin({{&first, out.data()}, {&third, out.data()}}, executor);
  CHECK(table->size() == 2 && other->size() == 2);
}

void ids_that_move_to_the_cold_store_are_distinct() {
  SerialExecutor executor;
  Bounds bounds;
  bounds.max_rows = 10;
  bounds.cold_store = true;
  const auto table = make_table(bounds);
  step(table, {1, 2});
  std::vector<char> images = image_of(table, 1);
  images.insert(images.end(), images.begin(), images.begin() + table->image_bytes());
  const std::vector<int64_t> twice{1, 1};
  bool left[2];
  const LockedTable locked(table);
  CHECK_THROWS(evict(*table, twice.data(), 2, images.data(), left), InvalidArgument);
  CHECK(table->size() == 2);
  table->rows().mark();
  table->before_change(table->index().find(1));  // the row may have changed twice, back to the bytes of its image
  evict(*table, twice.data(), 1, images.data(), left);
  CHECK(!left[0] && table->size() == 2);
  const std::vector<int64_t> new_twice{8, 8};
  CHECK_THROWS(bring_back(*table, new_twice.data(), 2, images.data(), true, executor), InvalidArgument);
  CHECK(table->size() == 2 && table->counters().cold_hits == 0);
}

void queries_about_bounds() {
  SerialExecutor executor;
  const auto unbounded = make_table();
  CHECK_THROWS(leaving_ids(*LockedTable(unbounded), nullptr, 0, 0, executor), InvalidArgument);
  for (const int64_t id : {1, 2}) step(unbounded, {id});
  CHECK(expired_ids(*LockedTable(unbounded), executor).empty());

  Bounds bounds;
  bounds.expiry = 2;
  bounds.max_rows = 100;
  bounds.cold_store = true;  // so that steps do not expire the rows themselves
  const auto table = make_table(bounds);
  step(table, {1, 2});
  for (int i = 0; i < 3; ++i) step(table, {2});
  CHECK((expired_ids(*LockedTable(table), executor) == std::vector<int64_t>{1}));
  std::vector<float> out(3);
  const std::vector<int64_t> one{1};
  const auto pass = begun(one_table_group(table), batch_of(one), out.data(), executor);
  CHECK(expired_ids(*LockedTable(table), executor).empty());  // a pending pass refers to the row
}

void ids_that_left_are_listed_since_a_mark() {
  const auto table = make_table();
  const std::vector<int64_t> ids{7, 3};
  step(table, {1});
  note_left(*LockedTable(table), ids.data(), 2);
  CHECK(!table->rows().changes().left_since(1).has_value() || table->rows().changes().left_since(1)->empty());
  const Changes::Mark mark = LockedTable(table)->rows().mark();
  note_left(*LockedTable(table), ids.data(), 2);
  CHECK((*table->rows().changes().left_since(mark) == std::vector<int64_t>{3, 7}));
}

using Numbers = std::map<std::string, int64_t>;

// The bounds of a table that has the bounds `changed`, and no others.
Bounds bounds_of(const Numbers& changed) {
  std::vector<std::string> names;
  std::vector<int64_t> values;
  for (const char* name : {"max_rows", "eviction", "half_life", "unscored", "expiry", "expiry_time", "max_jump",
                           "min_frequency", "counter_bytes", "cold_store", "shared"}) {
    const auto number = changed.find(name);
    names.push_back(name);
    values.push_back(number == changed.end() ? 0 : number->second);
  }
  Fields<int64_t> fields(names, values);
  const Bounds bounds = Bounds::of(fields);
  fields.check_all_taken();
  return bounds;
}

void bounds_are_checked() {
  const Bounds bounds = bounds_of({{"max_rows", 100},
                                   {"eviction", 2},
                                   {"half_life", 30},
                                   {"expiry", 40},
                                   {"min_frequency", 5},
                                   {"counter_bytes", 64},
                                   {"cold_store", 1}});
  CHECK(bounds.max_rows == 100 && bounds.eviction == Eviction::kLeastFrequent && bounds.half_life == 30 &&
        bounds.expiry == 40);
  CHECK(bounds.min_frequency == 5 && bounds.counter_bytes == 64 && bounds.cold_store && !bounds.shared);
  for (const Numbers& wrong : {Numbers{{"max_rows", -1}},
                               {{"eviction", 5}},
                               {{"half_life", int64_t{1} << 32}},
                               {{"unscored", int64_t{1} << 32}},
                               {{"min_frequency", 2}, {"counter_bytes", 8}},
                               {{"min_frequency", 2}, {"counter_bytes", 48}},
                               {{"expiry", 5}, {"expiry_time", 5}, {"max_jump", 5}},
                               {{"expiry_time", 5}}}) {
    CHECK_THROWS(bounds_of(wrong), InvalidArgument);
  }
  CHECK(bounds_of({{"min_frequency", 1}}).min_frequency == 1);  // admits every id, so that nothing is counted
}

void fields_have_names() {
  Fields<int64_t> fields({"one", "two"}, {1, 2});
  CHECK(fields.take("two") == 2);
  CHECK_THROWS(fields.take("two"), InvalidArgument);
  CHECK_THROWS(fields.check_all_taken(), InvalidArgument);
  CHECK(fields.take("one") == 1);
  fields.check_all_taken();
  CHECK_THROWS(Fields<int64_t>({"one", "one"}, {1, 1}), InvalidArgument);
  CHECK_THROWS(Fields<int64_t>({"one"}, {}), InvalidArgument);
}

void a_polite_reader_uses_no_other_thread() {
  const auto table = make_table();
  std::vector<int64_t> all(3000);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  Threads threads(2);
  std::vector<float> out(9000);
  const auto pending = begun(one_table_group(table), batch_of(all), out.data(), threads);
  const auto snapshot = open_snapshot(table, std::nullopt, threads);
  CHECK(snapshot->rows_left() == 3000 && snapshot->steps() == 1);
  CHECK(table->counters().lookups == 3000);  // the pending pass is settled
  CHECK_THROWS(open_snapshot(table, std::nullopt, threads), InvalidArgument);
  CHECK_THROWS(snapshot->check_count(3001), InvalidArgument);
  CHECK_THROWS(snapshot->check_count(-1), InvalidArgument);
  std::vector<int64_t> ids(3000), last_step(3000), frequency(3000);
  std::vector<float> weights(9000), sum(9000), state(3000);
  NoThreads none;
  snapshot->read(3000, ids.data(), {weights.data(), {sum.data()}, state.data(), last_step.data(), frequency.data()},
                 true, none);
  CHECK(ids == all && weights == initial_weights(all) && snapshot->rows_left() == 0);
}

}  // namespace

int main() {
  an_update_by_id_is_that_of_a_pass();
  an_update_without_room_changes_nothing();
  written_weights_keep_the_optimizer_state();
  reading_makes_no_rows();
  a_prefetch_makes_the_rows_of_unbounded_tables();
  passes_that_share_a_table_are_refused();
  ids_that_move_to_the_cold_store_are_distinct();
  queries_about_bounds();
  ids_that_left_are_listed_since_a_mark();
  bounds_are_checked();
  fields_have_names();
  a_polite_reader_uses_no_other_thread();
  std::puts("test_calls passed");
}
