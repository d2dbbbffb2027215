// The ops of torchrec_recstore, on torch's stable ABI. The only file that includes torch.

#include <Python.h>
#include <pthread.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "buffer_pool.h"
#include "clipping.h"
#include "cold_rows.h"
#include "error.h"
#include "eviction.h"
#include "mix.h"
#include "pass.h"
#include "registry.h"
#include "row_kernels.h"
#include "snapshot.h"
#include "transfer.h"

// Of the OpenMP runtime that torch has loaded; null where that is older than OpenMP 5.
extern "C" int omp_pause_resource_all(int kind) __attribute__((weak));

namespace recstore {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kOmpPauseSoft = 1;

class TorchExecutor final : public Executor {
 public:
  int threads() const override { return alone_ ? 1 : static_cast<int>(torch::stable::get_num_threads()); }
  void run(int workers, Body body, void* context) override {
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(context);
    });
  }

  // A child does not have the threads of libgomp's pool, and would wait for them for ever: they end before the fork and
  // start again when they are needed. Where that cannot be done the child works on one thread.
  void before_fork() { ended_ = omp_pause_resource_all != nullptr && omp_pause_resource_all(kOmpPauseSoft) == 0; }
  void after_fork_in_child() { alone_ = alone_ || !ended_; }

 private:
  bool ended_ = false;
  bool alone_ = false;
};

constexpr int64_t kMostColumns = int64_t{1} << 24;

TorchExecutor& executor() {
  static auto* shared = new TorchExecutor;
  return *shared;
}
Registry<Table>& tables() {
  static auto* registry = new Registry<Table>("table");
  return *registry;
}
Registry<const Group>& groups() {
  static auto* registry = new Registry<const Group>("group");
  return *registry;
}
Registry<Pass>& passes() {
  static auto* registry = new Registry<Pass>(
      "pass", ": the lookup's graph is gone, or a saved-tensor hook has put a copy in the place of what a compiled lookup saved");
  return *registry;
}

Registry<Snapshot>& snapshots() {
  static auto* registry = new Registry<Snapshot>("snapshot");
  return *registry;
}

// Tables belong to the process that made them. Without these a process that is forked while another thread uses a table
// would wait for ever for the locks that this thread held, at the latest when it drops a tensor.
void before_fork() {
  tables().before_fork();
  groups().before_fork();
  passes().before_fork();
  snapshots().before_fork();
  BufferPool::instance().before_fork();
  executor().before_fork();
}
void after_fork_in_parent() {
  tables().after_fork_in_parent();
  groups().after_fork_in_parent();
  passes().after_fork_in_parent();
  snapshots().after_fork_in_parent();
  BufferPool::instance().after_fork();
}
void after_fork_in_child() {
  tables().after_fork_in_child();
  groups().after_fork_in_child();
  passes().after_fork_in_child();
  snapshots().after_fork_in_child();
  BufferPool::instance().after_fork();
  executor().after_fork_in_child();
}
[[maybe_unused]] const int fork_handlers = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

Tensor checked(const Tensor& tensor, const char* name, ScalarType dtype, int64_t dim) {
  if (!tensor.is_cpu()) throw InvalidArgument(std::string(name) + " must be on the CPU");
  if (tensor.scalar_type() != dtype) {
    const char* wanted = dtype == ScalarType::Long ? "int64" : dtype == ScalarType::Byte ? "uint8" : "float32";
    throw InvalidArgument(std::string(name) + " must be of dtype " + wanted);
  }
  if (tensor.dim() != dim) throw InvalidArgument(std::string(name) + " must have " + std::to_string(dim) + " dimensions");
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}
Tensor checked_ids(const Tensor& ids) { return checked(ids, "ids", ScalarType::Long, 1); }
Tensor checked_rows(const Tensor& rows, const char* name, int64_t n, int64_t columns) {
  Tensor out = checked(rows, name, ScalarType::Float, 2);
  if (out.size(0) != n || out.size(1) != columns) {
    throw InvalidArgument(std::string(name) + " must have the shape (" + std::to_string(n) + ", " + std::to_string(columns) + ")");
  }
  return out;
}
const int64_t* id_data(const Tensor& ids) { return static_cast<const int64_t*>(ids.const_data_ptr()); }
const float* float_data(const Tensor& values) { return static_cast<const float*>(values.const_data_ptr()); }

Tensor empty(const std::vector<int64_t>& shape, ScalarType dtype) {
  return torch::stable::empty(shape, dtype, std::nullopt, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

// A float32 tensor over a buffer that goes back to the pool with its last reference.
Tensor recycled_tensor(BufferPool::Buffer buffer, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  void* data = buffer.data();
  return torch::stable::from_blob(data, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Float, [owned = std::move(buffer)](void*) {});
}
Tensor pooled_tensor(BufferPool::Buffer buffer, int64_t rows, int64_t columns) {
  return recycled_tensor(std::move(buffer), {rows, columns}, {std::max<int64_t>(columns, 1), 1});
}
BufferPool::Buffer output_buffer(int64_t rows, int64_t columns, int64_t element_bytes = sizeof(float)) {
  size_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<size_t>(rows), static_cast<size_t>(columns * element_bytes), &bytes) || bytes > kMostBytes) {
    throw OutOfMemory("an output of " + std::to_string(rows) + " rows of " + std::to_string(columns) + " columns");
  }
  return BufferPool::instance().take(bytes);
}

std::shared_ptr<const Group> one_table_group(int64_t table) {
  return std::make_shared<const Group>(std::vector<std::shared_ptr<Table>>{tables().get(table)}, std::vector<Routing>(1),
                                       std::vector<int64_t>{0}, false);
}
Batch plain_batch(const Tensor& ids) {
  Batch batch;
  batch.ids = id_data(ids);
  batch.n_ids = batch.bags = ids.size(0);
  return batch;
}

// An evaluation lookup into out.
void read(const Group& group, const Batch& batch, float* out, const std::vector<RowsElsewhere>& elsewhere = {}) {
  const auto slots = BufferPool::instance().take(static_cast<size_t>(batch.n_ids) * sizeof(Slot));
  const auto locks = group.lock();
  recstore::read(group, batch, static_cast<Slot*>(slots.data()), out, executor(), elsewhere);
}

int64_t table_create(std::string name, int64_t column_begin, int64_t column_end, int64_t seed, bool missing_reads_init,
                     int64_t init, double init_a, double init_b, double init_truncate, int64_t optimizer,
                     std::vector<double> optimizer_numbers, int64_t row_type, bool stochastic_rounding,
                     std::vector<int64_t> bounds) {
  if (column_begin < 0 || column_end <= column_begin) throw InvalidArgument("columns must be a range that is not empty");
  if (column_end > kMostColumns) throw InvalidArgument("a row has at most 2**24 columns, got " + std::to_string(column_end));
  if (init < 0 || init > 2) throw InvalidArgument("init must be 0, 1 or 2");
  if (row_type < 0 || row_type > 2) throw InvalidArgument("row_type must be 0, 1 or 2");
  if (bounds.size() != 7) throw InvalidArgument("bounds must have seven numbers");
  for (const int64_t number : bounds) {
    if (number < 0) throw InvalidArgument("bounds must not be negative");
  }
  if (bounds[1] > 2) throw InvalidArgument("eviction must be 0, 1 or 2");
  if (bounds[2] > int64_t{0xFFFFFFFF}) throw InvalidArgument("half_life must be at most 2**32 - 1");
  if (bounds[4] > 1 && (bounds[5] < 16 || (bounds[5] & (bounds[5] - 1)) != 0)) throw InvalidArgument("counter_bytes must be a power of two");
  row_kernels();  // a wrong RECSTORE_ISA is told here
  TableConfig config;
  config.name = std::move(name);
  config.column_begin = column_begin;
  config.column_end = column_end;
  config.seed = static_cast<uint64_t>(seed);
  config.missing_reads_init = missing_reads_init;
  config.init = {static_cast<InitKind>(init), init_a, init_b, init_truncate};
  config.row_type = static_cast<RowType>(row_type);
  config.stochastic_rounding = stochastic_rounding;
  config.bounds = {bounds[0], static_cast<Eviction>(bounds[1]), bounds[2], bounds[3], bounds[4], bounds[5], bounds[6] != 0};
  config.optimizer = OptimizerConfig::of(optimizer, optimizer_numbers);
  return tables().add(std::make_shared<Table>(std::move(config)));
}

void table_destroy(int64_t table) {
  const auto removed = tables().remove(table);
  if (removed == nullptr) return;
  const std::lock_guard<std::mutex> lock(removed->mutex());
  removed->close();
}

Tensor table_lookup(int64_t table, Tensor ids, bool train) {
  ids = checked_ids(ids);
  const auto group = one_table_group(table);
  const Batch batch = plain_batch(ids);
  auto buffer = output_buffer(batch.bags, group->columns());
  auto* out = static_cast<float*>(buffer.data());
  const Tensor result = pooled_tensor(std::move(buffer), batch.bags, group->columns());  // what fails does so before rows are made
  if (train) {
    Pass pass(group, batch, nullptr, executor());
    Pass::begin({{&pass, out}}, executor());
  } else {
    read(*group, batch, out);
  }
  return result;
}

void table_update(int64_t table, Tensor ids, Tensor grads, double learning_rate) {
  ids = checked_ids(ids);
  const auto group = one_table_group(table);
  grads = checked_rows(grads, "grads", ids.size(0), group->columns());
  const Batch batch = plain_batch(ids);
  const auto slots = BufferPool::instance().take(static_cast<size_t>(batch.n_ids) * sizeof(Slot));
  auto* slot_data = static_cast<Slot*>(slots.data());
  const auto locks = group->lock();
  const ClippedGradient clipped(*group, float_data(grads), batch.bags, executor());
  Upsert rows(*group->tables[0], batch.ids, batch.n_ids, slot_data, executor(), Arrival::kUpdate);
  Update update({*group, batch, slot_data}, clipped.data(), {static_cast<float>(learning_rate)}, Steps{0}, executor());
  rows.commit();
  update.run();
}

void table_insert(int64_t table, Tensor ids, Tensor weights) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const int64_t n = ids.size(0), columns = owner->config().columns();
  weights = checked_rows(weights, "weights", n, columns);
  std::vector<Slot> slots(static_cast<size_t>(n));
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  find_or_insert(*owner, id_data(ids), n, slots.data(), executor(), Arrival::kWrite);
  for (int64_t i = 0; i < n; ++i) {
    owner->before_change(slots[i]);
    owner->rows().set_weights(slots[i], float_data(weights) + i * columns);
  }
}

Tensor table_remove(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  Tensor removed = empty({}, ScalarType::Long);
  *static_cast<int64_t*>(removed.mutable_data_ptr()) = owner->remove(id_data(ids), ids.size(0));
  return removed;
}

Tensor table_contains(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const int64_t n = ids.size(0);
  Tensor out = empty({n}, ScalarType::Bool);
  auto* found = static_cast<bool*>(out.mutable_data_ptr());
  std::vector<Slot> slots(static_cast<size_t>(n));
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  find(*owner, id_data(ids), n, slots.data(), executor());
  for (int64_t i = 0; i < n; ++i) found[i] = slots[i] != kNoSlot;
  return out;
}

Tensor table_ids(int64_t table) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  Tensor out = empty({owner->size()}, ScalarType::Long);
  owner->ids(static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}

// rows, bytes, lookups, misses, inserts, updates, steps, refused, evicted, expired, cold hits
std::vector<int64_t> table_stats(int64_t table) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  owner->settle_passes(executor());
  const Counters& c = owner->counters();
  return {owner->size(), owner->bytes(), c.lookups, c.misses, c.inserts, c.updates, c.steps, c.refused, c.evicted, c.expired, c.cold_hits};
}

ScalarType weight_type(const Table& table) {
  switch (table.config().row_type) {
    case RowType::kFloat16: return ScalarType::Half;
    case RowType::kBfloat16: return ScalarType::BFloat16;
    case RowType::kFloat32: break;
  }
  return ScalarType::Float;
}

// Rows as tensors: weights (N, columns) of the table's dtype, element-wise states (states, N, columns) float32, the
// row-wise state (N,) float32, last step (N,) int64, frequency (N,) int64.
using RowTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// A contiguous tensor over a buffer of the pool: rows are read part by part.
Tensor recycled(const std::vector<int64_t>& shape, ScalarType dtype) {
  int64_t count = 1;
  std::vector<int64_t> strides(shape.size());
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = count;
    if (__builtin_mul_overflow(count, shape[d], &count)) throw OutOfMemory("a tensor of more elements than any machine holds");
  }
  const int64_t size = dtype == ScalarType::Long ? 8 : dtype == ScalarType::Float ? 4 : dtype == ScalarType::Byte ? 1 : 2;
  auto buffer = output_buffer(count, 1, size);
  void* data = buffer.data();
  return torch::stable::from_blob(data, shape, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU), dtype,
                                  [owned = std::move(buffer)](void*) {});
}

RowTensors empty_rows(const Table& table, int64_t n) {
  const int64_t columns = table.config().columns(), states = table.config().optimizer.element_states();
  return {recycled({n, columns}, weight_type(table)), recycled({states, n, columns}, ScalarType::Float),
          recycled({n}, ScalarType::Float), recycled({n}, ScalarType::Long), recycled({n}, ScalarType::Long)};
}
RowImages images_of(const RowTensors& rows) {
  const auto& [weights, elements, state, last_step, frequency] = rows;
  RowImages images{weights.mutable_data_ptr(), {}, static_cast<float*>(state.mutable_data_ptr()),
                   static_cast<int64_t*>(last_step.mutable_data_ptr()), static_cast<int64_t*>(frequency.mutable_data_ptr())};
  for (int64_t e = 0; e < elements.size(0); ++e) {
    images.elements.push_back(static_cast<float*>(elements.mutable_data_ptr()) + e * elements.size(1) * elements.size(2));
  }
  return images;
}

RowTensors table_export(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const RowTensors rows = empty_rows(*owner, ids.size(0));
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  owner->settle_passes(executor());
  read_rows(*owner, id_data(ids), ids.size(0), images_of(rows), executor());
  return rows;
}

void table_import(int64_t table, Tensor ids, Tensor weights, Tensor elements, Tensor state, Tensor last_step, Tensor frequency) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const int64_t n = ids.size(0), columns = owner->config().columns(), states = owner->config().optimizer.element_states();
  weights = checked(weights, "weights", weight_type(*owner), 2);
  elements = checked(elements, "elements", ScalarType::Float, 3);
  state = checked(state, "state", ScalarType::Float, 1);
  last_step = checked(last_step, "last_step", ScalarType::Long, 1);
  frequency = checked(frequency, "frequency", ScalarType::Long, 1);
  if (weights.size(0) != n || weights.size(1) != columns || elements.size(0) != states || elements.size(1) != n ||
      elements.size(2) != columns || state.size(0) != n || last_step.size(0) != n || frequency.size(0) != n) {
    throw InvalidArgument("rows must have one entry an id, and the table's columns and states");
  }
  ConstRowImages images{weights.const_data_ptr(), {}, float_data(state), id_data(last_step), id_data(frequency)};
  for (int64_t e = 0; e < states; ++e) images.elements.push_back(float_data(elements) + e * n * columns);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  owner->settle_passes(executor());
  write_rows(*owner, id_data(ids), n, images, executor());
}

// What admission has counted: cells (generations, rows, cells of a row) uint8, and the sightings of the present one.
std::tuple<Tensor, int64_t> table_sightings(int64_t table) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  const Sightings* sightings = owner->sightings();
  Tensor cells = empty({Sightings::kGenerations, Sightings::kRows, sightings == nullptr ? 0 : sightings->cells()}, ScalarType::Byte);
  if (sightings == nullptr) return {cells, 0};
  sightings->read(static_cast<uint8_t*>(cells.mutable_data_ptr()));
  return {cells, sightings->taken()};
}

void table_set_sightings(int64_t table, Tensor cells, int64_t taken) {
  const auto owner = tables().get(table);
  cells = checked(cells, "cells", ScalarType::Byte, 3);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  Sightings* sightings = owner->sightings();
  if (sightings == nullptr) throw InvalidArgument("the table has no admission");
  if (cells.size(0) != Sightings::kGenerations || cells.size(1) != Sightings::kRows || cells.size(2) != sightings->cells()) {
    throw InvalidArgument("cells must have the shape (2, 4, " + std::to_string(sightings->cells()) + ")");
  }
  if (taken < 0) throw InvalidArgument("taken must not be negative");
  sightings->write(static_cast<const uint8_t*>(cells.const_data_ptr()), taken);
}

int64_t table_image_bytes(int64_t table) { return tables().get(table)->image_bytes(); }

Tensor id_tensor(const std::vector<int64_t>& ids) {
  Tensor out = empty({static_cast<int64_t>(ids.size())}, ScalarType::Long);
  std::copy(ids.begin(), ids.end(), static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}
const char* checked_images(Tensor& images, const Table& table, int64_t n) {
  images = checked(images, "images", ScalarType::Byte, 2);
  if (images.size(0) != n || images.size(1) != table.image_bytes()) {
    throw InvalidArgument("images must have the shape (" + std::to_string(n) + ", " + std::to_string(table.image_bytes()) + ")");
  }
  return static_cast<const char*>(images.const_data_ptr());
}
void check_distinct(const int64_t* ids, int64_t n) {
  std::vector<int64_t> sorted(ids, ids + n);
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) throw InvalidArgument("ids must be distinct");
}

// -> the distinct ids that have no row in memory, in the order of their first occurrence.
Tensor table_absent(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  return id_tensor(absent_ids(*owner, id_data(ids), ids.size(0), executor()));
}

template <class Test>  // test(table, id)
Tensor tested(int64_t table, Tensor ids, const Test& test) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const int64_t n = ids.size(0);
  Tensor out = empty({n}, ScalarType::Bool);
  auto* result = static_cast<bool*>(out.mutable_data_ptr());
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  for (int64_t i = 0; i < n; ++i) result[i] = test(*owner, id_data(ids)[i]);
  return out;
}

// -> which ids may have left for the cold store.
Tensor table_may_be_cold(int64_t table, Tensor ids) {
  return tested(table, ids, [](const Table& owner, int64_t id) { return owner.cold_filter().may_contain(id); });
}

// -> which ids, all without a row, a training lookup would give one, or an update.
Tensor table_admits(int64_t table, Tensor ids, bool lookup) {
  const Arrival arrival = lookup ? Arrival::kLookup : Arrival::kUpdate;
  return tested(table, ids, [&](const Table& owner, int64_t id) { return is_admitted(owner, id, arrival); });
}

// -> the ids whose rows must leave before new_rows more come; none of ids.
Tensor table_leaving(int64_t table, Tensor ids, int64_t new_rows) {
  ids = checked_ids(ids);
  if (new_rows < 0 || new_rows > int64_t{kNoSlot}) throw InvalidArgument("new_rows must be within 0 and 2**32 - 1");
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  if (owner->config().bounds.max_rows == 0) throw InvalidArgument("the table has no max_rows");
  return id_tensor(leaving_ids(*owner, id_data(ids), ids.size(0), new_rows, executor()));
}

// -> (N, image bytes) uint8.
Tensor table_images(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const Tensor images = recycled({ids.size(0), owner->image_bytes()}, ScalarType::Byte);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  owner->settle_passes(executor());
  read_images(*owner, id_data(ids), ids.size(0), static_cast<char*>(images.mutable_data_ptr()), executor());
  return images;
}

// -> (N,) bool: which of them have left.
Tensor table_evict(int64_t table, Tensor ids, Tensor images) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const char* data = checked_images(images, *owner, ids.size(0));
  check_distinct(id_data(ids), ids.size(0));
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  Tensor left = empty({ids.size(0)}, ScalarType::Bool);
  evict(*owner, id_data(ids), ids.size(0), data, static_cast<bool*>(left.mutable_data_ptr()));
  return left;
}

void table_bring_back(int64_t table, Tensor ids, Tensor images, bool looked_up) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const char* data = checked_images(images, *owner, ids.size(0));
  check_distinct(id_data(ids), ids.size(0));
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  bring_back(*owner, id_data(ids), ids.size(0), data, looked_up, executor());
}

// -> ids whose rows no step has looked up for too long.
Tensor table_expired(int64_t table) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  std::vector<int64_t> ids;
  if (owner->config().bounds.expiry > 0) {
    for (const Leaver& row : expired_rows(*owner, owner->clock(), pinned_slots(*owner), executor())) ids.push_back(row.id);
  }
  return id_tensor(ids);
}

// Ids whose rows are about to be written to the cold store.
void table_note_cold(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  owner->cold_filter().add(id_data(ids), ids.size(0));
}

// Ids whose rows have left the cold store for good.
void table_note_left(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  Changes& changes = owner->rows().changes();
  if (!changes.tracks()) return;
  changes.reserve_left(ids.size(0));
  for (int64_t i = 0; i < ids.size(0); ++i) changes.left(id_data(ids)[i], owner->size());
}

void table_count_expired(int64_t table, int64_t rows) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  owner->counters().expired += rows;
}

void table_exchange_rows(int64_t table, int64_t other) {
  const auto one = tables().get(table), two = tables().get(other);
  if (one == two) throw InvalidArgument("a table cannot exchange rows with itself");
  const std::scoped_lock locks(one->mutex(), two->mutex());
  one->check_open();
  two->check_open();
  one->exchange_rows(*two);
}

bool table_is_being_saved(int64_t table) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  return owner->snapshot() != nullptr;
}

int64_t table_mark(int64_t table) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  return owner->rows().mark();
}

int64_t snapshot_open(int64_t table, std::optional<int64_t> since) {
  const auto owner = tables().get(table);
  std::shared_ptr<Snapshot> made;  // ends, where nobody takes it, without the lock
  {
    const std::lock_guard<std::mutex> lock(owner->mutex());
    owner->check_open();
    owner->settle_passes(executor());
    made = std::make_shared<Snapshot>(owner, since);
  }
  return snapshots().add(std::move(made));
}

// mark, rows of the table, steps, optimizer steps
std::vector<int64_t> snapshot_moment(int64_t snapshot) {
  const auto reader = snapshots().get(snapshot);
  return {reader->mark(), reader->table_rows(), reader->steps(), reader->optimizer_steps()};
}

// -> the ids that had left since the snapshot's mark, (N,) int64, ascending; none where they are not known.
std::optional<Tensor> snapshot_left(int64_t snapshot) {
  const auto reader = snapshots().get(snapshot);
  if (!reader->left()) return std::nullopt;
  Tensor ids = empty({static_cast<int64_t>(reader->left()->size())}, ScalarType::Long);
  std::copy(reader->left()->begin(), reader->left()->end(), static_cast<int64_t*>(ids.mutable_data_ptr()));
  return ids;
}

int64_t snapshot_rows_left(int64_t snapshot) { return snapshots().get(snapshot)->rows_left(); }

// -> ids (n,) int64, ascending, and their rows. polite: beside training, on the calling thread alone.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> snapshot_read(int64_t snapshot, int64_t n, bool polite) {
  const auto reader = snapshots().get(snapshot);
  if (n < 0 || n > reader->rows_left()) {
    throw InvalidArgument("the snapshot has " + std::to_string(reader->rows_left()) + " rows left, not " + std::to_string(n));
  }
  const Tensor ids = recycled({n}, ScalarType::Long);
  const RowTensors rows = empty_rows(reader->table(), n);
  SerialExecutor serial;
  reader->read(n, static_cast<int64_t*>(ids.mutable_data_ptr()), images_of(rows), polite,
               polite ? static_cast<Executor&>(serial) : executor());
  return std::tuple_cat(std::make_tuple(ids), rows);
}

void snapshot_close(int64_t snapshot) { snapshots().remove(snapshot); }

// The updates that Adam's and LAMB's bias correction counts.
int64_t table_optimizer_steps(int64_t table) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  return owner->optimizer_steps();
}

void table_set_optimizer_steps(int64_t table, int64_t steps) {
  if (steps < 0 || steps > int64_t{1} << 62) throw InvalidArgument("optimizer steps must be within 0 and 2**62, got " + std::to_string(steps));
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  owner->set_optimizer_steps(steps);
}

// The clock that last steps are told by.
int64_t table_steps(int64_t table) {
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  return owner->clock();
}
void table_set_steps(int64_t table, int64_t steps) {
  if (steps < 0 || steps >= int64_t{0xFFFFFFFF}) throw InvalidArgument("steps must be within 0 and 2**32 - 2, got " + std::to_string(steps));
  const auto owner = tables().get(table);
  const std::lock_guard<std::mutex> lock(owner->mutex());
  owner->check_open();
  owner->counters().steps = steps;
}

int64_t group_create(std::vector<int64_t> handles, std::vector<int64_t> feature_tables, std::vector<int64_t> routings, bool mean) {
  const auto n = static_cast<int64_t>(handles.size());
  if (routings.size() != handles.size() * 4) throw InvalidArgument("routings must hold four numbers a table");
  std::vector<std::shared_ptr<Table>> members;
  std::vector<Routing> member_routings;
  for (int64_t t = 0; t < n; ++t) {
    members.push_back(tables().get(handles[t]));
    if (std::count(handles.begin(), handles.end(), handles[t]) > 1) throw InvalidArgument("tables must be distinct");
    member_routings.push_back({routings[4 * t], routings[4 * t + 1], routings[4 * t + 2], routings[4 * t + 3] != 0});
  }
  for (const int64_t t : feature_tables) {
    if (t < 0 || t >= n) throw InvalidArgument("feature_tables must name tables by number, got " + std::to_string(t));
  }
  return groups().add(std::make_shared<const Group>(std::move(members), std::move(member_routings), std::move(feature_tables), mean));
}

void group_destroy(int64_t group) { groups().remove(group); }

// What a pass keeps until its backward. The offsets are a copy, since rows are found by them again: what
// a caller does to the tensor in between must not matter.
struct Inputs {
  Tensor ids;  // of what stochastic rounding draws by; rows are found again by their slots
  BufferPool::Buffer offsets;
  std::optional<Tensor> weights;
};

BufferPool::Buffer copy_offsets(const Tensor& offsets, bool narrow) {
  const int64_t n = offsets.size(0);
  auto buffer = BufferPool::instance().take(static_cast<size_t>(n) * sizeof(int64_t));
  const auto copy = [&](const auto* from) {
    constexpr int64_t kRun = 65536;
    for_each_task(executor(), (n + kRun - 1) / kRun, [&](int64_t run) {
      std::copy(from + run * kRun, from + std::min((run + 1) * kRun, n), static_cast<int64_t*>(buffer.data()) + run * kRun);
    });
  };
  narrow ? copy(static_cast<const int32_t*>(offsets.const_data_ptr())) : copy(static_cast<const int64_t*>(offsets.const_data_ptr()));
  return buffer;
}

// A batch as a group's op is given it, and what keeps its arrays alive.
struct GivenBatch {
  Batch batch;
  std::shared_ptr<Inputs> inputs;
};

// offsets: int32 or int64; none: each id is a bag of its own.
GivenBatch checked_batch(const Group& group, const Tensor& given_ids, std::optional<Tensor> offsets, const std::optional<Tensor>& weights) {
  const Tensor ids = checked_ids(given_ids);
  GivenBatch given{plain_batch(ids), std::make_shared<Inputs>(Inputs{ids, {}, std::nullopt})};
  Batch& batch = given.batch;
  if (offsets.has_value()) {
    const bool narrow = offsets->scalar_type() == ScalarType::Int;
    offsets = checked(*offsets, "offsets", narrow ? ScalarType::Int : ScalarType::Long, 1);
    const int64_t n = offsets->size(0);
    batch.bags = group.features() == 0 ? 0 : (n - 1) / group.features();
    if (n < 1 || n != batch.bags * group.features() + 1) {
      throw InvalidArgument("offsets must have features * batch + 1 entries, got " + std::to_string(n) + " for " +
                            std::to_string(group.features()) + " features");
    }
    given.inputs->offsets = copy_offsets(*offsets, narrow);
    batch.offsets = static_cast<const int64_t*>(given.inputs->offsets.data());
  } else if (group.features() != 1) {
    throw InvalidArgument("a batch without offsets is for groups of one feature");
  }
  if (weights.has_value()) {
    given.inputs->weights = checked(*weights, "weights", ScalarType::Float, 1);
    if (given.inputs->weights->size(0) != batch.n_ids) throw InvalidArgument("weights must have one entry an id");
    batch.weights = float_data(*given.inputs->weights);
  }
  return given;
}

// Keeps passes until a context tensor's last reference is gone. A compiled graph may write to the tensor's memory after it
// has read it for the last time, so that the handles stand here once more.
struct PassOwner {
  std::vector<int64_t> handles;
  std::vector<int64_t> tensor_data;
  ~PassOwner() {
    for (const int64_t handle : handles) passes().remove(handle);
  }
};

// The handles of the passes, (passes,) int64, which live as long as the tensor.
Tensor context_of(std::vector<std::shared_ptr<Pass>> all) {
  const auto owner = std::make_shared<PassOwner>();
  owner->handles.reserve(all.size());
  for (auto& pass : all) owner->handles.push_back(passes().add(std::move(pass)));
  owner->tensor_data = owner->handles;
  return torch::stable::from_blob(owner->tensor_data.data(), {static_cast<int64_t>(all.size())}, {1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Long, [owner](void*) {});
}

// -> out (bags, columns), and where train is set the context that group_backward takes, else an empty tensor.
std::tuple<Tensor, Tensor> group_forward(int64_t group_handle, Tensor ids, Tensor offsets, std::optional<Tensor> weights, bool train) {
  const auto group = groups().get(group_handle);
  const auto [batch, inputs] = checked_batch(*group, ids, offsets, weights);
  const int64_t bags = batch.bags;
  auto buffer = output_buffer(bags, group->columns());
  auto* out = static_cast<float*>(buffer.data());
  Tensor result = pooled_tensor(std::move(buffer), bags, group->columns());
  if (!train) {
    read(*group, batch, out);
    return {std::move(result), empty({0}, ScalarType::Long)};
  }
  auto pass = std::make_shared<Pass>(group, batch, inputs, executor());
  const Pass::Start start{pass.get(), out};
  Tensor context = context_of({std::move(pass)});  // as all that can fail, before the tables change
  Pass::begin({start}, executor());
  return {std::move(result), std::move(context)};
}

// -> the raw ids that a batch looks up in each table, those of its features one after the other.
std::vector<Tensor> group_table_ids(int64_t group_handle, Tensor ids, std::optional<Tensor> offsets) {
  const auto group = groups().get(group_handle);
  const auto given = checked_batch(*group, ids, offsets, std::nullopt);
  const Batch& batch = given.batch;
  check_offsets(batch, group->features(), executor());
  std::vector<int64_t> counts(group->tables.size(), 0);
  const auto count_of = [&](int64_t f) { return batch.offset((f + 1) * batch.bags) - batch.offset(f * batch.bags); };
  for (int64_t f = 0; f < group->features(); ++f) counts[group->feature_tables[f]] += count_of(f);
  std::vector<Tensor> out;
  std::vector<int64_t*> next;
  for (const int64_t count : counts) {
    out.push_back(recycled({count}, ScalarType::Long));
    next.push_back(static_cast<int64_t*>(out.back().mutable_data_ptr()));
  }
  for (int64_t f = 0; f < group->features(); ++f) {
    const int64_t t = group->feature_tables[f];
    const int64_t* first = batch.ids + batch.offset(f * batch.bags);
    next[t] = std::transform(first, first + count_of(f), next[t], [&](int64_t id) { return group->routings[t].raw_id(id); });
  }
  return out;
}

// An evaluation lookup in which some rows of each table lie elsewhere: ids (N,) int64, ascending, and their images.
// -> out (bags, columns).
Tensor group_read(int64_t group_handle, Tensor ids, std::optional<Tensor> offsets, std::optional<Tensor> weights,
                  std::vector<Tensor> elsewhere_ids, std::vector<Tensor> elsewhere_images) {
  const auto group = groups().get(group_handle);
  const auto given = checked_batch(*group, ids, offsets, weights);
  if (elsewhere_ids.size() != group->tables.size() || elsewhere_images.size() != group->tables.size()) {
    throw InvalidArgument("rows elsewhere must have one entry a table");
  }
  std::vector<RowsElsewhere> elsewhere;
  for (size_t t = 0; t < group->tables.size(); ++t) {
    elsewhere_ids[t] = checked_ids(elsewhere_ids[t]);
    const int64_t n = elsewhere_ids[t].size(0);
    const int64_t* data = id_data(elsewhere_ids[t]);
    if (!std::is_sorted(data, data + n)) throw InvalidArgument("ids of rows elsewhere must ascend");
    elsewhere.push_back({data, n, checked_images(elsewhere_images[t], *group->tables[t], n), group->tables[t]->image_bytes()});
  }
  auto buffer = output_buffer(given.batch.bags, group->columns());
  auto* out = static_cast<float*>(buffer.data());
  read(*group, given.batch, out, elsewhere);
  return pooled_tensor(std::move(buffer), given.batch.bags, group->columns());
}

// Makes the missing rows of a batch ahead of its training forward, on the calling thread alone and table by table.
void group_prefetch(int64_t group_handle, Tensor ids, std::vector<int64_t> counts) {
  const auto group = groups().get(group_handle);
  ids = checked_ids(ids);
  int64_t sum = 0;
  for (const int64_t count : counts) {
    if (count < 0 || count > ids.size(0) - sum) throw InvalidArgument("counts must sum up to the number of ids");
    sum += count;
  }
  if (static_cast<int64_t>(counts.size()) != group->features() || sum != ids.size(0)) {
    throw InvalidArgument("counts must have one entry a feature and sum up to the number of ids");
  }
  SerialExecutor serial;
  const int64_t* next = id_data(ids);
  for (size_t feature = 0; feature < counts.size(); ++feature) {
    const int64_t number = group->feature_tables[feature];
    Table& table = *group->tables[number];
    if (table.config().bounds.limit_new_rows()) {  // which rows it makes, and which leave, its steps decide in their order
      next += counts[feature];
      continue;
    }
    std::vector<int64_t> raw(static_cast<size_t>(counts[feature]));
    std::transform(next, next + counts[feature], raw.begin(), [&](int64_t id) { return group->routings[number].raw_id(id); });
    next += counts[feature];
    std::vector<Slot> slots(raw.size());
    const std::lock_guard<std::mutex> lock(table.mutex());
    table.check_open();
    const int64_t before = table.size();
    find_or_insert(table, raw.data(), counts[feature], slots.data(), serial, Arrival::kUpdate);
    table.counters().misses += table.size() - before;
  }
}

std::shared_ptr<Pass> checked_pass(const Tensor& context) {
  const Tensor handle = checked(context, "context", ScalarType::Long, 1);
  if (handle.size(0) != 1) throw InvalidArgument("context must come from a training group_forward");
  return passes().get(*id_data(handle));
}

// -> the per-sample weights' gradient (n_ids,), empty where weight_grads is not set.
Tensor group_backward(Tensor context, Tensor grad, std::vector<double> learning_rates, bool weight_grads) {
  const auto pass = checked_pass(context);
  grad = checked_rows(grad, "grad", pass->batch().bags, pass->columns());
  if (learning_rates.size() != pass->table_count()) throw InvalidArgument("learning_rates must have one entry a table");
  Tensor grad_weights = empty({weight_grads ? pass->batch().n_ids : 0}, ScalarType::Float);
  pass->backward(float_data(grad), std::vector<float>(learning_rates.begin(), learning_rates.end()),
                 weight_grads ? static_cast<float*>(grad_weights.mutable_data_ptr()) : nullptr, executor());
  return grad_weights;
}

// A backward whose update comes later: the per-sample weights' gradient (n_ids,) alone.
Tensor group_weight_gradients(Tensor context, Tensor grad) {
  const auto pass = checked_pass(context);
  grad = checked_rows(grad, "grad", pass->batch().bags, pass->columns());
  Tensor grad_weights = empty({pass->batch().n_ids}, ScalarType::Float);
  pass->weight_gradients_only(float_data(grad), static_cast<float*>(grad_weights.mutable_data_ptr()), executor());
  return grad_weights;
}

// One update for several passes.
void group_accumulated_backward(std::vector<Tensor> contexts, std::vector<Tensor> grads, std::vector<double> learning_rates) {
  if (contexts.empty() || contexts.size() != grads.size()) throw InvalidArgument("contexts and grads must be as many, and one at least");
  std::vector<std::shared_ptr<Pass>> all;
  std::vector<const float*> data;
  for (size_t i = 0; i < contexts.size(); ++i) {
    all.push_back(checked_pass(contexts[i]));
    grads[i] = checked_rows(grads[i], "grads", all[i]->batch().bags, all[i]->columns());
    data.push_back(float_data(grads[i]));
  }
  if (learning_rates.size() != all[0]->table_count()) throw InvalidArgument("learning_rates must have one entry a table");
  accumulated_backward(all, data, std::vector<float>(learning_rates.begin(), learning_rates.end()), executor());
}

// Bytes of the pool of buffers: in use, idle, and the most that it keeps idle.
std::vector<int64_t> buffer_pool_bytes() {
  const BufferPool::Bytes bytes = BufferPool::instance().bytes();
  return {static_cast<int64_t>(bytes.used), static_cast<int64_t>(bytes.idle), static_cast<int64_t>(bytes.most_idle)};
}

std::string instruction_set() { return row_kernels().name; }

// Rows without pooling, of groups of one feature whose ids follow each other: counts of each.
// -> out (sum of counts * columns,), and the contexts (groups,) that group_backward takes one by one, none where train is not set.
std::tuple<Tensor, Tensor> rows_forward(std::vector<int64_t> group_handles, Tensor ids, std::vector<int64_t> counts, bool train) {
  ids = checked_ids(ids);
  if (counts.size() != group_handles.size()) throw InvalidArgument("counts must have one entry a group");
  std::vector<std::shared_ptr<const Group>> members;
  int64_t left = ids.size(0), floats = 0;
  for (size_t g = 0; g < counts.size(); ++g) {
    members.push_back(groups().get(group_handles[g]));
    if (members[g]->features() != 1) throw InvalidArgument("groups must have one feature");
    if (counts[g] < 0 || counts[g] > left) throw InvalidArgument("counts must sum up to the number of ids");
    left -= counts[g];
    floats += counts[g] * members[g]->columns();
  }
  if (left != 0) throw InvalidArgument("counts must sum up to the number of ids");
  auto buffer = output_buffer(floats, 1);
  auto* out = static_cast<float*>(buffer.data());
  Tensor result = recycled_tensor(std::move(buffer), {floats}, {1});
  const auto for_each_group = [&](const auto& work) {  // work(group, batch, out)
    Batch batch;
    batch.ids = id_data(ids);
    float* next = out;
    for (size_t g = 0; g < counts.size(); ++g) {
      batch.n_ids = batch.bags = counts[g];
      work(members[g], batch, next);
      batch.ids += counts[g];
      next += counts[g] * members[g]->columns();
    }
  };
  if (!train) {
    for_each_group([](const auto& group, const Batch& batch, float* rows) { read(*group, batch, rows); });
    return {std::move(result), empty({0}, ScalarType::Long)};
  }
  std::vector<const Table*> distinct;
  for (const auto& group : members) distinct.push_back(group->tables[0].get());
  std::sort(distinct.begin(), distinct.end());
  if (std::adjacent_find(distinct.begin(), distinct.end()) != distinct.end()) throw InvalidArgument("groups must be of different tables");
  std::vector<std::shared_ptr<Pass>> made;
  std::vector<Pass::Start> starts;
  for_each_group([&](const auto& group, const Batch& batch, float* rows) {
    const auto inputs = std::make_shared<Inputs>(Inputs{ids, {}, std::nullopt});
    made.push_back(std::make_shared<Pass>(group, batch, inputs, executor()));
    starts.push_back({made.back().get(), rows});
  });
  Tensor context = context_of(std::move(made));
  Pass::begin(starts, executor());
  return {std::move(result), std::move(context)};
}

// -> ids (N,) int64, each mapped by mix(), or by its inverse.
Tensor mix_ids(Tensor ids, bool inverse) {
  ids = checked_ids(ids);
  constexpr int64_t kRun = 65536;
  const int64_t n = ids.size(0);
  const int64_t* from = id_data(ids);
  Tensor out = empty({n}, ScalarType::Long);
  auto* to = static_cast<int64_t*>(out.mutable_data_ptr());
  for_each_task(executor(), (n + kRun - 1) / kRun, [&](int64_t run) {
    const int64_t end = std::min((run + 1) * kRun, n);
    const auto apply = [&](auto map) {
      for (int64_t i = run * kRun; i < end; ++i) to[i] = static_cast<int64_t>(map(static_cast<uint64_t>(from[i])));
    };
    inverse ? apply([](uint64_t id) { return unmix(id); }) : apply([](uint64_t id) { return mix(id); });
  });
  return out;
}

// An op that fails for want of memory has changed nothing: what the pool keeps idle is freed, and it is tried again.
template <auto op>
struct WithIdleMemory;
template <class Result, class... Arguments, Result (*op)(Arguments...)>
struct WithIdleMemory<op> {
  static Result call(const Arguments&... arguments) {
    try {
      return op(arguments...);
    } catch (const OutOfMemory&) {
      if (BufferPool::instance().free_idle() == 0) throw;
    } catch (const std::bad_alloc&) {
      if (BufferPool::instance().free_idle() == 0) throw;
    }
    return op(arguments...);
  }
};

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY(recstore_ops, m) {
  m.def(
      "table_create(str name, int column_begin, int column_end, int seed, bool missing_reads_init, int init, float init_a, "
      "float init_b, float init_truncate, int optimizer, float[] optimizer_numbers, int row_type, "
      "bool stochastic_rounding, int[] bounds) -> int");
  m.def("table_destroy(int table) -> ()");
  m.def("table_lookup(int table, Tensor ids, bool train) -> Tensor");
  m.def("table_update(int table, Tensor ids, Tensor grads, float learning_rate) -> ()");
  m.def("table_insert(int table, Tensor ids, Tensor weights) -> ()");
  m.def("table_remove(int table, Tensor ids) -> Tensor");
  m.def("table_contains(int table, Tensor ids) -> Tensor");
  m.def("table_ids(int table) -> Tensor");
  m.def("table_stats(int table) -> int[]");
  m.def("table_export(int table, Tensor ids) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "table_import(int table, Tensor ids, Tensor weights, Tensor elements, Tensor state, Tensor last_step, Tensor frequency) "
      "-> ()");
  m.def("table_sightings(int table) -> (Tensor, int)");
  m.def("table_set_sightings(int table, Tensor cells, int taken) -> ()");
  m.def("table_image_bytes(int table) -> int");
  m.def("table_absent(int table, Tensor ids) -> Tensor");
  m.def("table_may_be_cold(int table, Tensor ids) -> Tensor");
  m.def("table_admits(int table, Tensor ids, bool lookup) -> Tensor");
  m.def("table_leaving(int table, Tensor ids, int new_rows) -> Tensor");
  m.def("table_images(int table, Tensor ids) -> Tensor");
  m.def("table_evict(int table, Tensor ids, Tensor images) -> Tensor");
  m.def("table_bring_back(int table, Tensor ids, Tensor images, bool looked_up) -> ()");
  m.def("table_expired(int table) -> Tensor");
  m.def("table_note_cold(int table, Tensor ids) -> ()");
  m.def("table_note_left(int table, Tensor ids) -> ()");
  m.def("table_count_expired(int table, int rows) -> ()");
  m.def("group_table_ids(int group, Tensor ids, Tensor? offsets) -> Tensor[]");
  m.def(
      "group_read(int group, Tensor ids, Tensor? offsets, Tensor? weights, Tensor[] elsewhere_ids, Tensor[] elsewhere_images) "
      "-> Tensor");
  m.def("table_exchange_rows(int table, int other) -> ()");
  m.def("table_is_being_saved(int table) -> bool");
  m.def("table_mark(int table) -> int");
  m.def("snapshot_open(int table, int? since) -> int");
  m.def("snapshot_moment(int snapshot) -> int[]");
  m.def("snapshot_left(int snapshot) -> Tensor?");
  m.def("snapshot_rows_left(int snapshot) -> int");
  m.def("snapshot_read(int snapshot, int n, bool polite) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("snapshot_close(int snapshot) -> ()");
  m.def("table_optimizer_steps(int table) -> int");
  m.def("table_set_optimizer_steps(int table, int steps) -> ()");
  m.def("table_steps(int table) -> int");
  m.def("table_set_steps(int table, int steps) -> ()");
  m.def("group_create(int[] tables, int[] feature_tables, int[] routings, bool mean) -> int");
  m.def("group_destroy(int group) -> ()");
  m.def("group_forward(int group, Tensor ids, Tensor offsets, Tensor? weights, bool train) -> (Tensor, Tensor)");
  m.def("group_prefetch(int group, Tensor ids, int[] counts) -> ()");
  m.def("group_backward(Tensor context, Tensor grad, float[] learning_rates, bool weight_grads) -> Tensor");
  m.def("group_weight_gradients(Tensor context, Tensor grad) -> Tensor");
  m.def("group_accumulated_backward(Tensor[] contexts, Tensor[] grads, float[] learning_rates) -> ()");
  m.def("buffer_pool_bytes() -> int[]");
  m.def("instruction_set() -> str");
  m.def("rows_forward(int[] groups, Tensor ids, int[] counts, bool train) -> (Tensor, Tensor)");
  m.def("mix_ids(Tensor ids, bool inverse) -> Tensor");
}

// Ops without a tensor argument have no device to be chosen by.
STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("table_create", TORCH_BOX(&recstore::table_create));
  m.impl("table_destroy", TORCH_BOX(&recstore::table_destroy));
  m.impl("table_ids", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_ids>::call));
  m.impl("table_stats", TORCH_BOX(&recstore::table_stats));
  m.impl("table_optimizer_steps", TORCH_BOX(&recstore::table_optimizer_steps));
  m.impl("table_set_optimizer_steps", TORCH_BOX(&recstore::table_set_optimizer_steps));
  m.impl("table_steps", TORCH_BOX(&recstore::table_steps));
  m.impl("table_set_steps", TORCH_BOX(&recstore::table_set_steps));
  m.impl("table_sightings", TORCH_BOX(&recstore::table_sightings));
  m.impl("table_image_bytes", TORCH_BOX(&recstore::table_image_bytes));
  m.impl("table_expired", TORCH_BOX(&recstore::table_expired));
  m.impl("table_count_expired", TORCH_BOX(&recstore::table_count_expired));
  m.impl("table_exchange_rows", TORCH_BOX(&recstore::table_exchange_rows));
  m.impl("table_is_being_saved", TORCH_BOX(&recstore::table_is_being_saved));
  m.impl("table_mark", TORCH_BOX(&recstore::table_mark));
  m.impl("snapshot_open", TORCH_BOX(&recstore::WithIdleMemory<&recstore::snapshot_open>::call));
  m.impl("snapshot_moment", TORCH_BOX(&recstore::snapshot_moment));
  m.impl("snapshot_left", TORCH_BOX(&recstore::snapshot_left));
  m.impl("snapshot_rows_left", TORCH_BOX(&recstore::snapshot_rows_left));
  m.impl("snapshot_read", TORCH_BOX(&recstore::snapshot_read));
  m.impl("snapshot_close", TORCH_BOX(&recstore::snapshot_close));
  m.impl("group_create", TORCH_BOX(&recstore::group_create));
  m.impl("group_destroy", TORCH_BOX(&recstore::group_destroy));
  m.impl("buffer_pool_bytes", TORCH_BOX(&recstore::buffer_pool_bytes));
  m.impl("instruction_set", TORCH_BOX(&recstore::instruction_set));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("table_lookup", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_lookup>::call));
  m.impl("table_update", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_update>::call));
  m.impl("table_insert", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_insert>::call));
  m.impl("table_remove", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_remove>::call));
  m.impl("table_contains", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_contains>::call));
  m.impl("table_export", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_export>::call));
  m.impl("table_import", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_import>::call));
  m.impl("table_set_sightings", TORCH_BOX(&recstore::table_set_sightings));
  m.impl("table_note_cold", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_note_cold>::call));
  m.impl("table_note_left", TORCH_BOX(&recstore::table_note_left));
  m.impl("table_absent", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_absent>::call));
  m.impl("table_may_be_cold", TORCH_BOX(&recstore::table_may_be_cold));
  m.impl("table_admits", TORCH_BOX(&recstore::table_admits));
  m.impl("table_leaving", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_leaving>::call));
  m.impl("table_images", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_images>::call));
  m.impl("table_evict", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_evict>::call));
  m.impl("table_bring_back", TORCH_BOX(&recstore::WithIdleMemory<&recstore::table_bring_back>::call));
  m.impl("group_table_ids", TORCH_BOX(&recstore::WithIdleMemory<&recstore::group_table_ids>::call));
  m.impl("group_read", TORCH_BOX(&recstore::WithIdleMemory<&recstore::group_read>::call));
  m.impl("group_forward", TORCH_BOX(&recstore::WithIdleMemory<&recstore::group_forward>::call));
  m.impl("group_prefetch", TORCH_BOX(&recstore::group_prefetch));
  m.impl("group_backward", TORCH_BOX(&recstore::WithIdleMemory<&recstore::group_backward>::call));
  m.impl("rows_forward", TORCH_BOX(&recstore::WithIdleMemory<&recstore::rows_forward>::call));
  m.impl("mix_ids", TORCH_BOX(&recstore::mix_ids));
  m.impl("group_weight_gradients", TORCH_BOX(&recstore::WithIdleMemory<&recstore::group_weight_gradients>::call));
  m.impl("group_accumulated_backward", TORCH_BOX(&recstore::WithIdleMemory<&recstore::group_accumulated_backward>::call));
}

// Importing the module loads the library, which registers the ops.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
