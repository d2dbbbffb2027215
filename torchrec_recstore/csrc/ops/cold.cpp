// Ops for the owner of a table's cold store: which rows move, and their images.

#include <vector>

#include "base/error.h"
#include "bounds/arrivals.h"
#include "cold/cold_rows.h"
#include "ops/registry.h"
#include "ops/tensors.h"

namespace recstore {
namespace {

int64_t table_image_bytes(int64_t table) { return tables().get(table)->image_bytes(); }

// Returns the distinct ids that have no row in memory, in the order of their first occurrence.
Tensor table_absent(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  return id_tensor(absent_ids(*SharedTable(tables().get(table)), id_data(ids), ids.size(0), executor()));
}

// Returns (N,) bool: test(table, id) for each id.
template <class Test>
Tensor tested(int64_t table, Tensor ids, const Test& test) {
  ids = checked_ids(ids);
  Tensor out = empty({ids.size(0)}, ScalarType::Bool);
  const SharedTable owner(tables().get(table));
  for (int64_t i = 0; i < ids.size(0); ++i) mutable_data<bool>(out)[i] = test(*owner, id_data(ids)[i]);
  return out;
}

// Returns whether the row of each id may be in the cold store.
Tensor table_may_be_cold(int64_t table, Tensor ids) {
  return tested(table, ids, [](const Table& owner, int64_t id) { return owner.cold_filter().may_contain(id); });
}

// Returns whether a training lookup, or else an update, would make a row for each id. No id has a row.
Tensor table_admits(int64_t table, Tensor ids, bool lookup) {
  const Arrival arrival = lookup ? Arrival::kLookup : Arrival::kUpdate;
  return tested(table, ids, [&](const Table& owner, int64_t id) { return is_admitted(owner, id, arrival); });
}

// Returns the ids whose rows must be evicted before new_rows more rows are made; none of ids.
Tensor table_leaving(int64_t table, Tensor ids, int64_t new_rows) {
  ids = checked_ids(ids);
  if (new_rows < 0 || new_rows > int64_t{kNoSlot}) throw InvalidArgument("new_rows must be within 0 and 2**32 - 1");
  return id_tensor(leaving_ids(*LockedTable(tables().get(table)), id_data(ids), ids.size(0), new_rows, executor()));
}

// Returns the images of the rows, (N, image bytes) uint8.
Tensor table_images(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  const Tensor images = recycled({ids.size(0), owner->image_bytes()}, ScalarType::Byte);
  const SharedTable shared(owner, executor());
  read_images(*shared, id_data(ids), ids.size(0), mutable_data<char>(images), executor());
  return images;
}

// Returns whether each row was removed, (N,) bool.
Tensor table_evict(int64_t table, Tensor ids, Tensor images) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  images = checked_images(images, *owner, ids.size(0));
  Tensor left = empty({ids.size(0)}, ScalarType::Bool);
  evict(*LockedTable(owner), id_data(ids), ids.size(0), static_cast<const char*>(images.const_data_ptr()),
        mutable_data<bool>(left));
  return left;
}

void table_bring_back(int64_t table, Tensor ids, Tensor images, bool looked_up) {
  ids = checked_ids(ids);
  const auto owner = tables().get(table);
  images = checked_images(images, *owner, ids.size(0));
  bring_back(*LockedTable(owner), id_data(ids), ids.size(0), static_cast<const char*>(images.const_data_ptr()),
             looked_up, executor());
}

Tensor table_expired(int64_t table) { return id_tensor(expired_ids(*SharedTable(tables().get(table)), executor())); }

// ids: their rows are about to be written to the cold store.
void table_note_cold(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  LockedTable(tables().get(table))->cold_filter().add(id_data(ids), ids.size(0));
}

void table_begin_refilter(int64_t table) { LockedTable(tables().get(table))->cold_filter().begin_renewal(); }

// ids: a scan since table_begin_refilter has found their rows in the cold store.
void table_keep_cold(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  LockedTable(tables().get(table))->cold_filter().keep(id_data(ids), ids.size(0));
}

// Returns whether each id may have been noted or kept since table_begin_refilter.
Tensor table_may_be_kept(int64_t table, Tensor ids) {
  return tested(table, ids, [](const Table& owner, int64_t id) { return owner.cold_filter().may_be_kept(id); });
}

// Forgets the ids that were neither noted nor kept since table_begin_refilter.
void table_end_refilter(int64_t table) { LockedTable(tables().get(table))->cold_filter().end_renewal(); }

// ids: their rows were deleted from the cold store for good.
void table_note_left(int64_t table, Tensor ids) {
  ids = checked_ids(ids);
  note_left(*LockedTable(tables().get(table)), id_data(ids), ids.size(0));
}

void table_count_expired(int64_t table, int64_t rows) { LockedTable(tables().get(table))->counters().expired += rows; }

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
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
  m.def("table_begin_refilter(int table) -> ()");
  m.def("table_keep_cold(int table, Tensor ids) -> ()");
  m.def("table_may_be_kept(int table, Tensor ids) -> Tensor");
  m.def("table_end_refilter(int table) -> ()");
  m.def("table_note_left(int table, Tensor ids) -> ()");
  m.def("table_count_expired(int table, int rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("table_image_bytes", RECSTORE_OP(table_image_bytes));
  m.impl("table_expired", RECSTORE_OP(table_expired));
  m.impl("table_begin_refilter", RECSTORE_OP(table_begin_refilter));
  m.impl("table_end_refilter", RECSTORE_OP(table_end_refilter));
  m.impl("table_count_expired", RECSTORE_OP(table_count_expired));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("table_absent", RECSTORE_ALLOCATING_OP(table_absent));
  m.impl("table_may_be_cold", RECSTORE_OP(table_may_be_cold));
  m.impl("table_admits", RECSTORE_OP(table_admits));
  m.impl("table_leaving", RECSTORE_ALLOCATING_OP(table_leaving));
  m.impl("table_images", RECSTORE_ALLOCATING_OP(table_images));
  m.impl("table_evict", RECSTORE_ALLOCATING_OP(table_evict));
  m.impl("table_bring_back", RECSTORE_ALLOCATING_OP(table_bring_back));
  m.impl("table_note_cold", RECSTORE_ALLOCATING_OP(table_note_cold));
  m.impl("table_keep_cold", RECSTORE_ALLOCATING_OP(table_keep_cold));
  m.impl("table_may_be_kept", RECSTORE_OP(table_may_be_kept));
  m.impl("table_note_left", RECSTORE_OP(table_note_left));
}
