// Ops on one table: its life, lookups and updates, counters and clocks.

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fields.h"
#include "bounds/scores.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "ops/registry.h"
#include "ops/tensors.h"
#include "row_loops/row_compiler.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

constexpr int64_t kMostColumns = int64_t{1} << 24;
constexpr int64_t kMostDepartures = int64_t{1} << 30;

int64_t optimizer_load(std::string name, std::vector<std::string> states, int64_t element_states,
                       std::vector<std::string> hyperparameters, std::vector<std::string> once_names,
                       std::vector<std::string> once_expressions, std::string row, std::string step) {
  if (once_names.size() != once_expressions.size()) {
    throw InvalidArgument("once_expressions must have an expression for each name");
  }
  RowCode code;
  code.name = std::move(name);
  code.states = std::move(states);
  code.element_states = element_states;
  code.hyperparameters = std::move(hyperparameters);
  code.once_names = std::move(once_names);
  code.once_expressions = std::move(once_expressions);
  code.row = std::move(row);
  code.step = std::move(step);
  return load_optimizer(compile_row_code(code));
}

// Takes an integer from 0 to `most`.
int64_t take_up_to(Fields<int64_t>& integers, const char* name, int64_t most) {
  const int64_t value = integers.take(name);
  if (value < 0 || value > most) {
    throw InvalidArgument(std::string(name) + " must be from 0 to " + std::to_string(most));
  }
  return value;
}

// The fields have the names of the members of TableConfig, and of what is in it. table_fields.py has the other side.
int64_t table_create(std::string name, std::vector<std::string> integer_names, std::vector<int64_t> integers,
                     std::vector<std::string> number_names, std::vector<double> numbers,
                     std::vector<double> hyperparameters) {
  Fields<int64_t> integer_fields(integer_names, integers);
  Fields<double> number_fields(number_names, numbers);
  TableConfig config;
  config.name = std::move(name);
  config.column_begin = integer_fields.take("column_begin");
  config.column_end = integer_fields.take("column_end");
  if (config.column_begin < 0 || config.column_end <= config.column_begin) {
    throw InvalidArgument("columns must be a non-empty range");
  }
  if (config.column_end > kMostColumns) {
    throw InvalidArgument("a row has at most 2**24 columns, got " + std::to_string(config.column_end));
  }
  config.seed = static_cast<uint64_t>(integer_fields.take("seed"));
  config.missing_reads_init = integer_fields.take("missing_reads_init") != 0;
  config.init = InitConfig::of(integer_fields.take("init"), number_fields);
  config.row_type = static_cast<RowType>(take_up_to(integer_fields, "row_type", 3));
  config.stochastic_rounding = integer_fields.take("stochastic_rounding") != 0;
  config.state_type = static_cast<StateType>(take_up_to(integer_fields, "state_type", 1));
  config.nonfinite = static_cast<Nonfinite>(take_up_to(integer_fields, "nonfinite", 2));
  config.bounds = Bounds::of(integer_fields);
  config.optimizer = OptimizerConfig::of(integer_fields.take("optimizer"), number_fields, std::move(hyperparameters));
  integer_fields.check_all_taken();
  number_fields.check_all_taken();
  row_loops();  // throws if RECSTORE_ISA is wrong
  return tables().add(std::make_shared<Table>(std::move(config)));
}

void table_destroy(int64_t table) {
  const auto removed = tables().remove(table);
  if (removed == nullptr) return;
  const std::lock_guard<TableMutex> lock(removed->mutex());
  removed->close();
}

Tensor table_lookup(int64_t table, Tensor ids, bool train) {
  ids = checked_ids(ids);
  const auto group = one_table_group(tables().get(table));
  const Batch batch = plain_batch(ids);
  const Tensor out = recycled({batch.bags, group->columns()}, ScalarType::Float);  // may fail, so before rows are made
  if (train) {
    Pass pass(group, batch, nullptr, executor());
    Pass::begin({{&pass, mutable_data<float>(out)}}, executor());
  } else {
    read(*group, batch, mutable_data<float>(out), executor());
  }
  return out;
}

// Reads rows into memory of the caller: out (N, columns) float32, contiguous. No row changes. A small read runs on the
// calling thread: it is one of the parts that a server sends while it reads the next part.
void table_read(int64_t table, Tensor ids, Tensor out) {
  ids = checked_ids(ids);
  const auto group = one_table_group(tables().get(table));
  if (!out.is_contiguous()) throw InvalidArgument("out must be contiguous");
  out = checked_rows(out, "out", ids.size(0), group->columns());
  SerialExecutor serial;
  const bool small = ids.size(0) * group->columns() <= kSmallRead;
  read(*group, plain_batch(ids), mutable_data<float>(out), small ? serial : executor());
}

void table_update(int64_t table, Tensor ids, Tensor grads, double learning_rate) {
  ids = checked_ids(ids);
  const auto group = one_table_group(tables().get(table));
  grads = checked_rows(grads, "grads", ids.size(0), group->columns());
  update_rows(*group, plain_batch(ids), float_data(grads), static_cast<float>(learning_rate), executor());
}

void table_insert(int64_t table, Tensor ids, Tensor weights) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  weights = checked_rows(weights, "weights", ids.size(0), owner->config().columns());
  write_weights(*LockedTable(owner), id_data(ids), ids.size(0), float_data(weights), executor());
}

Tensor table_remove(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  Tensor removed = empty({}, ScalarType::Long);
  *mutable_data<int64_t>(removed) = LockedTable(tables().get(table))->remove(id_data(ids), ids.size(0));
  return removed;
}

Tensor table_contains(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  Tensor out = empty({ids.size(0)}, ScalarType::Bool);
  contains(*SharedTable(tables().get(table)), id_data(ids), ids.size(0), mutable_data<bool>(out), executor());
  return out;
}

Tensor table_ids(int64_t table) {
  Tensor out = [&] {
    const SharedTable owner(tables().get(table));
    Tensor ids = empty({owner->size()}, ScalarType::Long);
    owner->ids(mutable_data<int64_t>(ids));
    return ids;
  }();
  // The table is not locked any more: sorting takes most of the time.
  std::sort(mutable_data<int64_t>(out), mutable_data<int64_t>(out) + out.numel());
  return out;
}

void check_count(const Tensor& scores, const Tensor& ids) {
  if (scores.size(0) != ids.size(0)) {
    throw InvalidArgument("scores must have the shape of ids, (" + std::to_string(ids.size(0)) + ",)");
  }
}

// Sets the scores by which rows are evicted. Returns the number of rows whose score was set.
Tensor table_set_scores(int64_t table, Tensor ids, Tensor scores) {
  ids = checked_ids(ids);
  scores = checked(scores, "scores", ScalarType::Float, 1);
  check_count(scores, ids);
  Tensor rows = empty({}, ScalarType::Long);
  *mutable_data<int64_t>(rows) =
      set_scores(*LockedTable(tables().get(table)), id_data(ids), ids.size(0), float_data(scores), executor());
  return rows;
}

// Returns a copy of the images of distinct ids with other scores. The caller writes it to the cold store.
Tensor table_score_images(int64_t table, Tensor ids, Tensor scores, Tensor images) {
  ids = checked_ids(ids);
  scores = checked(scores, "scores", ScalarType::Float, 1);
  check_count(scores, ids);
  const auto owner = tables().get(table);
  images = checked_images(images, *owner, ids.size(0));
  const Tensor out = recycled({ids.size(0), owner->image_bytes()}, ScalarType::Byte);
  std::memcpy(mutable_data<char>(out), images.const_data_ptr(),
              static_cast<size_t>(ids.size(0) * owner->image_bytes()));
  set_image_scores(*LockedTable(owner), id_data(ids), ids.size(0), float_data(scores), mutable_data<char>(out));
  return out;
}

// Begins to record which rows leave the table for good, up to a number of ids.
void table_record_left(int64_t table, int64_t most) {
  if (most < 1 || most > kMostDepartures) {
    throw InvalidArgument("left_ids must be within 1 and 2**30, got " + std::to_string(most));
  }
  LockedTable(tables().get(table))->record_departures(most);
}

// Returns the recorded ids that have no row in memory, (N,) int64, ascending, and whether the record is complete. The
// record begins anew.
std::tuple<Tensor, bool> table_take_left(int64_t table) {
  const LockedTable owner(tables().get(table));
  Departures* departures = owner->departures();
  if (departures == nullptr) throw InvalidArgument("the table does not record which ids leave");
  std::vector<int64_t> ids;
  for (const int64_t id : departures->ids()) {
    if (owner->index().find(id) == kNoSlot) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  std::tuple<Tensor, bool> left{id_tensor(ids), !departures->overflowed()};
  departures->clear();
  return left;
}

// Adds ids to the record; without `complete`, also ids that are not known.
void table_add_left(int64_t table, Tensor ids, bool complete) {
  ids = checked_ids(ids);
  const LockedTable owner(tables().get(table));
  Departures* departures = owner->departures();
  if (departures == nullptr) throw InvalidArgument("the table does not record which ids leave");
  if (!complete) return departures->overflow();
  departures->reserve(ids.size(0));
  std::for_each(id_data(ids), id_data(ids) + ids.size(0), [&](int64_t id) { departures->add(id); });
}

// Returns rows, bytes, lookups, misses, inserts, updates, nonfinite, steps, refused, evicted, expired, cold hits,
// refused times, rows on the device, hits and arrivals there, and rows that were written back.
std::vector<int64_t> table_stats(int64_t table) {
  const SharedTable owner(tables().get(table), executor());
  const Counters& c = owner->counters();
  const int64_t refused_times = owner->wall_clock() == nullptr ? 0 : owner->wall_clock()->refused();
  const DeviceSlots* device = owner->device();
  const int64_t device_rows = device == nullptr ? 0 : device->rows();
  const DeviceSlots::Counts d = device == nullptr ? DeviceSlots::Counts() : device->counts();
  return {owner->size(), owner->bytes(), c.lookups, c.misses,   c.inserts,     c.updates,
          c.nonfinite,   c.steps,        c.refused, c.evicted,  c.expired,     c.cold_hits,
          refused_times, device_rows,    d.hits,    d.arrivals, d.written_back};
}

// Returns what admission has counted: ids (N,) int64, their counts (N,) uint8, and their generations (N,) uint8.
std::tuple<Tensor, Tensor, Tensor> table_sightings(int64_t table) {
  const SharedTable owner(tables().get(table));
  const Sightings* sightings = owner->sightings();
  const int64_t n = sightings == nullptr ? 0 : sightings->size();
  std::tuple<Tensor, Tensor, Tensor> found{empty({n}, ScalarType::Long), empty({n}, ScalarType::Byte),
                                           empty({n}, ScalarType::Byte)};
  auto& [ids, counts, generations] = found;
  if (n > 0) {
    sightings->read(mutable_data<int64_t>(ids), mutable_data<uint8_t>(counts), mutable_data<uint8_t>(generations));
  }
  return found;
}

void table_set_sightings(int64_t table, Tensor ids, Tensor counts, Tensor generations) {
  ids = checked(ids, "ids", ScalarType::Long, 1);
  counts = checked(counts, "counts", ScalarType::Byte, 1);
  generations = checked(generations, "generations", ScalarType::Byte, 1);
  const int64_t n = ids.size(0);
  if (counts.size(0) != n || generations.size(0) != n) {
    throw InvalidArgument("counts and generations must have the shape of ids, (" + std::to_string(n) + ",)");
  }
  const LockedTable owner(tables().get(table));
  if (owner->sightings() == nullptr) throw InvalidArgument("the table has no admission");
  owner->sightings()->write(static_cast<const int64_t*>(ids.const_data_ptr()),
                            static_cast<const uint8_t*>(counts.const_data_ptr()),
                            static_cast<const uint8_t*>(generations.const_data_ptr()), n);
}

// The number of updates, which the bias correction of Adam and LAMB uses.
int64_t table_optimizer_steps(int64_t table) { return SharedTable(tables().get(table))->optimizer_steps(); }

void table_set_optimizer_steps(int64_t table, int64_t steps) {
  if (steps < 0 || steps > int64_t{1} << 62) {
    throw InvalidArgument("optimizer steps must be within 0 and 2**62, got " + std::to_string(steps));
  }
  LockedTable(tables().get(table))->set_optimizer_steps(steps);
}

// The number of training lookups, which is the clock of the rows' last steps.
int64_t table_steps(int64_t table) { return SharedTable(tables().get(table))->clock(); }

void table_set_steps(int64_t table, int64_t steps) {
  if (steps < 0 || steps >= int64_t{0xFFFFFFFF}) {
    throw InvalidArgument("steps must be within 0 and 2**32 - 2, got " + std::to_string(steps));
  }
  LockedTable(tables().get(table))->set_clock(steps);
}

// The times of the steps, by which rows expire; empty if rows do not expire after a time. WallClock::state() explains
// the numbers.
std::vector<int64_t> table_times(int64_t table) {
  const SharedTable owner(tables().get(table));
  return owner->wall_clock() == nullptr ? std::vector<int64_t>{} : owner->wall_clock()->state();
}

void table_set_times(int64_t table, std::vector<int64_t> times) {
  const LockedTable owner(tables().get(table));
  if (owner->wall_clock() == nullptr) throw InvalidArgument("the rows of the table do not expire after a time");
  owner->wall_clock()->restore(times, owner->clock());
}

void check_time(int64_t time) {
  if (time < 0) throw InvalidArgument("time must not be negative, got " + std::to_string(time));
}

// Sets the time of the events to one of those that the ranks know, in microseconds since 1970. Returns nothing, or a
// time that was refused, the time of the clock, and the number of refusals.
std::vector<int64_t> table_set_time(int64_t table, std::vector<int64_t> times) {
  if (times.empty()) throw InvalidArgument("times must not be empty");
  std::for_each(times.begin(), times.end(), check_time);
  const LockedTable owner(tables().get(table));
  WallClock* clock = owner->wall_clock();
  if (clock == nullptr) return {};
  const std::optional<int64_t> refused = clock->set(times);
  return refused.has_value() ? std::vector<int64_t>{*refused, clock->event_time(), clock->refused()}
                             : std::vector<int64_t>{};
}

// Sets the time that all shards of the table read, in microseconds since 1970.
void table_follow_time(int64_t table, int64_t time) {
  check_time(time);
  const LockedTable owner(tables().get(table));
  if (owner->wall_clock() != nullptr) owner->wall_clock()->follow(time);
}

void table_exchange_rows(int64_t table, int64_t other) {
  const auto one = tables().get(table), two = tables().get(other);
  if (one == two) throw InvalidArgument("a table cannot exchange rows with itself");
  const std::scoped_lock locks(one->mutex(), two->mutex());
  one->check_open();
  two->check_open();
  one->exchange_rows(*two);
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def(
      "table_create(str name, str[] integer_names, int[] integers, str[] number_names, float[] numbers, "
      "float[] hyperparameters) -> int");
  m.def(
      "optimizer_load(str name, str[] states, int element_states, str[] hyperparameters, str[] once_names, "
      "str[] once_expressions, str row, str step) -> int");
  m.def("table_destroy(int table) -> ()");
  m.def("table_lookup(int table, Tensor ids, bool train) -> Tensor");
  m.def("table_read(int table, Tensor ids, Tensor(a!) out) -> ()");
  m.def("table_update(int table, Tensor ids, Tensor grads, float learning_rate) -> ()");
  m.def("table_insert(int table, Tensor ids, Tensor weights) -> ()");
  m.def("table_remove(int table, Tensor ids) -> Tensor");
  m.def("table_contains(int table, Tensor ids) -> Tensor");
  m.def("table_set_scores(int table, Tensor ids, Tensor scores) -> Tensor");
  m.def("table_score_images(int table, Tensor ids, Tensor scores, Tensor images) -> Tensor");
  m.def("table_record_left(int table, int most) -> ()");
  m.def("table_take_left(int table) -> (Tensor, bool)");
  m.def("table_add_left(int table, Tensor ids, bool complete) -> ()");
  m.def("table_ids(int table) -> Tensor");
  m.def("table_stats(int table) -> int[]");
  m.def("table_sightings(int table) -> (Tensor, Tensor, Tensor)");
  m.def("table_set_sightings(int table, Tensor ids, Tensor counts, Tensor generations) -> ()");
  m.def("table_optimizer_steps(int table) -> int");
  m.def("table_set_optimizer_steps(int table, int steps) -> ()");
  m.def("table_steps(int table) -> int");
  m.def("table_set_steps(int table, int steps) -> ()");
  m.def("table_times(int table) -> int[]");
  m.def("table_set_times(int table, int[] times) -> ()");
  m.def("table_set_time(int table, int[] times) -> int[]");
  m.def("table_follow_time(int table, int time) -> ()");
  m.def("table_exchange_rows(int table, int other) -> ()");
}

// The dispatcher chooses a kernel by the device of a tensor argument; these ops have none.
STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("table_create", RECSTORE_OP(table_create));
  m.impl("optimizer_load", RECSTORE_OP(optimizer_load));
  m.impl("table_destroy", RECSTORE_OP(table_destroy));
  m.impl("table_record_left", RECSTORE_OP(table_record_left));
  m.impl("table_take_left", RECSTORE_ALLOCATING_OP(table_take_left));
  m.impl("table_ids", RECSTORE_ALLOCATING_OP(table_ids));
  m.impl("table_stats", RECSTORE_OP(table_stats));
  m.impl("table_sightings", RECSTORE_OP(table_sightings));
  m.impl("table_optimizer_steps", RECSTORE_OP(table_optimizer_steps));
  m.impl("table_set_optimizer_steps", RECSTORE_OP(table_set_optimizer_steps));
  m.impl("table_steps", RECSTORE_OP(table_steps));
  m.impl("table_set_steps", RECSTORE_OP(table_set_steps));
  m.impl("table_times", RECSTORE_OP(table_times));
  m.impl("table_set_times", RECSTORE_OP(table_set_times));
  m.impl("table_set_time", RECSTORE_OP(table_set_time));
  m.impl("table_follow_time", RECSTORE_OP(table_follow_time));
  m.impl("table_exchange_rows", RECSTORE_OP(table_exchange_rows));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("table_lookup", RECSTORE_ALLOCATING_OP(table_lookup));
  m.impl("table_read", RECSTORE_ALLOCATING_OP(table_read));
  m.impl("table_update", RECSTORE_ALLOCATING_OP(table_update));
  m.impl("table_insert", RECSTORE_ALLOCATING_OP(table_insert));
  m.impl("table_remove", RECSTORE_ALLOCATING_OP(table_remove));
  m.impl("table_contains", RECSTORE_ALLOCATING_OP(table_contains));
  m.impl("table_set_sightings", RECSTORE_OP(table_set_sightings));
  m.impl("table_set_scores", RECSTORE_ALLOCATING_OP(table_set_scores));
  m.impl("table_score_images", RECSTORE_ALLOCATING_OP(table_score_images));
  m.impl("table_add_left", RECSTORE_ALLOCATING_OP(table_add_left));
}
