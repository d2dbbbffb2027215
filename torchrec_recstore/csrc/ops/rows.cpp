// Ops that copy whole rows out of a table and into it: export, import, and snapshots for checkpoints.

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "ops/registry.h"
#include "ops/tensors.h"
#include "snapshot/snapshot.h"

namespace recstore {
namespace {

RowTensors table_export(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const RowTensors rows = empty_rows(*owner, ids.size(0));
  const SharedTable shared(owner, executor());
  read_rows(*shared, id_data(ids), ids.size(0), images_of(rows), executor());
  return rows;
}

void table_import(int64_t table, Tensor ids, Tensor weights, Tensor elements, Tensor state, Tensor last_step,
                  Tensor frequency) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const int64_t n = ids.size(0), columns = owner->config().columns(),
                states = owner->config().optimizer.element_states();
  weights = checked(weights, "weights", weight_type(*owner), 2);
  elements = checked(elements, "elements", ScalarType::Float, 3);
  state = checked(state, "state", ScalarType::Float, 1);
  last_step = checked(last_step, "last_step", ScalarType::Long, 1);
  frequency = checked(frequency, "frequency", ScalarType::Long, 1);
  if (weights.size(0) != n || weights.size(1) != weight_numbers(*owner) || elements.size(0) != states ||
      elements.size(1) != n || elements.size(2) != columns || state.size(0) != n || last_step.size(0) != n ||
      frequency.size(0) != n) {
    throw InvalidArgument("rows must have one entry for each id, and the columns and optimizer states of the table");
  }
  ConstRowImages images{weights.const_data_ptr(), {}, float_data(state), id_data(last_step), id_data(frequency)};
  for (int64_t e = 0; e < states; ++e) images.elements.push_back(float_data(elements) + e * n * columns);
  const LockedTable locked(owner);
  owner->settle_passes(executor());
  write_rows(*owner, id_data(ids), n, images, executor());
}

bool table_is_being_saved(int64_t table) { return SharedTable(tables().get(table))->snapshot() != nullptr; }

int64_t table_mark(int64_t table) { return LockedTable(tables().get(table))->rows().mark(); }

void table_locate_rows(int64_t table) { locate_rows(tables().get(table)); }

void table_reserve(int64_t table, int64_t rows) {
  if (rows < 0) throw InvalidArgument("rows must be at least 0, got " + std::to_string(rows));
  const LockedTable locked(tables().get(table));
  locked->reserve(rows);
}

void table_shrink(int64_t table) { LockedTable(tables().get(table))->shrink(); }

int64_t snapshot_open(int64_t table, std::optional<int64_t> since) {
  return snapshots().add(open_snapshot(tables().get(table), since, executor()));
}

// Returns the mark of the snapshot, and the table's rows, steps and optimizer steps at that moment.
std::vector<int64_t> snapshot_moment(int64_t snapshot) {
  const auto reader = snapshots().get(snapshot);
  return {reader->mark(), reader->table_rows(), reader->steps(), reader->optimizer_steps()};
}

// Returns the ids that had left since the snapshot's mark, (N,) int64, ascending; none if they are no longer known.
std::optional<Tensor> snapshot_left(int64_t snapshot) {
  const auto reader = snapshots().get(snapshot);
  if (!reader->left()) return std::nullopt;
  return id_tensor(*reader->left());
}

int64_t snapshot_rows_left(int64_t snapshot) { return snapshots().get(snapshot)->rows_left(); }

// Returns the next n ids, (n,) int64, ascending, and their rows.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> snapshot_read(int64_t snapshot, int64_t n, bool polite) {
  const auto reader = snapshots().get(snapshot);
  reader->check_count(n);
  const Tensor ids = recycled({n}, ScalarType::Long);
  const RowTensors rows = empty_rows(reader->table(), n);
  reader->read(n, mutable_data<int64_t>(ids), images_of(rows), polite, executor());
  return std::tuple_cat(std::make_tuple(ids), rows);
}

void snapshot_close(int64_t snapshot) { snapshots().remove(snapshot); }

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def("table_export(int table, Tensor ids) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "table_import(int table, Tensor ids, Tensor weights, Tensor elements, Tensor state, Tensor last_step, Tensor "
      "frequency) "
      "-> ()");
  m.def("table_is_being_saved(int table) -> bool");
  m.def("table_mark(int table) -> int");
  m.def("table_locate_rows(int table) -> ()");
  m.def("table_reserve(int table, int rows) -> ()");
  m.def("table_shrink(int table) -> ()");
  m.def("snapshot_open(int table, int? since) -> int");
  m.def("snapshot_moment(int snapshot) -> int[]");
  m.def("snapshot_left(int snapshot) -> Tensor?");
  m.def("snapshot_rows_left(int snapshot) -> int");
  m.def("snapshot_read(int snapshot, int n, bool polite) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("snapshot_close(int snapshot) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("table_is_being_saved", RECSTORE_OP(table_is_being_saved));
  m.impl("table_mark", RECSTORE_OP(table_mark));
  m.impl("table_locate_rows", RECSTORE_OP(table_locate_rows));
  m.impl("table_reserve", RECSTORE_OP(table_reserve));
  m.impl("table_shrink", RECSTORE_OP(table_shrink));
  m.impl("snapshot_open", RECSTORE_ALLOCATING_OP(snapshot_open));
  m.impl("snapshot_moment", RECSTORE_OP(snapshot_moment));
  m.impl("snapshot_left", RECSTORE_OP(snapshot_left));
  m.impl("snapshot_rows_left", RECSTORE_OP(snapshot_rows_left));
  m.impl("snapshot_read", RECSTORE_OP(snapshot_read));
  m.impl("snapshot_close", RECSTORE_OP(snapshot_close));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("table_export", RECSTORE_ALLOCATING_OP(table_export));
  m.impl("table_import", RECSTORE_ALLOCATING_OP(table_import));
}
