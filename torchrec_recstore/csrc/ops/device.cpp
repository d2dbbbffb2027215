// Ops on the rows of tables that are also on a device: which rows are copied in which direction. The tensors are on the
// host; the caller copies them. See lookup/device_pass.h.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "lookup/device_moves.h"
#include "lookup/device_pass.h"
#include "lookup/find.h"
#include "ops/registry.h"
#include "ops/tensors.h"

namespace recstore {
namespace {

// The passes of a lookup: one, or one for each table of a lookup without pooling.
std::vector<std::shared_ptr<Pass>> passes_of(const Tensor& context) {
  const Tensor handles = checked(context, "context", ScalarType::Long, 1);
  std::vector<std::shared_ptr<Pass>> all;
  for (int64_t i = 0; i < handles.size(0); ++i) all.push_back(passes().get(id_data(handles)[i]));
  return all;
}

int64_t ids_of(const std::vector<std::shared_ptr<Pass>>& all) {
  int64_t ids = 0;
  for (const auto& pass : all) ids += pass->batch().n_ids;
  return ids;
}

template <class Numbers>
Tensor narrow_tensor(const Numbers& numbers) {
  Tensor out = empty({static_cast<int64_t>(numbers.size())}, ScalarType::Int);
  std::copy(numbers.begin(), numbers.end(), mutable_data<int32_t>(out));
  return out;
}

// rows: (n, stride of the table's arena) float32, contiguous.
void check_arena_rows(const Tensor& rows, const char* name, const Table& table, int64_t n) {
  const int64_t stride = ArenaLayout::of(table.config()).stride();
  if (rows.scalar_type() != ScalarType::Float || rows.dim() != 2 || rows.size(0) != n || rows.size(1) != stride ||
      !rows.is_contiguous()) {
    throw InvalidArgument(std::string(name) + " must be contiguous (" + std::to_string(n) + ", " +
                          std::to_string(stride) + ") float32");
  }
}

void table_make_device_slots(int64_t table, int64_t slots) {
  LockedTable(tables().get(table))->make_device_slots(slots);
}

void abort_plans(const std::vector<std::shared_ptr<Pass>>& all, size_t n) {
  for (size_t i = 0; i < n; ++i) abort_moves(all[i]->group().tables);
}

// The entries of one pass in an array with an entry for each table of all passes.
std::vector<int64_t> entries_of(const Pass& pass, const std::vector<int64_t>& entries, size_t first) {
  if (entries.size() < first + pass.table_count()) {
    throw InvalidArgument("firsts and arenas must have one entry for each table");
  }
  const auto begin = entries.begin() + static_cast<int64_t>(first);
  return {begin, begin + static_cast<int64_t>(pass.table_count())};
}

// Plans that the rows of a lookup have device slots, and writes their numbers to out (n_ids,) int32. firsts, arenas: by
// table, the number of its first device slot, and its arena. Returns whether the rows fit. See Pass::plan_on_device.
bool device_plan(Tensor context, std::vector<int64_t> firsts, std::vector<int64_t> arenas, Tensor out) {
  const auto all = passes_of(context);
  if (out.scalar_type() != ScalarType::Int || out.dim() != 1 || out.size(0) != ids_of(all) || !out.is_contiguous()) {
    throw InvalidArgument("out must be contiguous (N,) int32, N ids");
  }
  const auto count = static_cast<int64_t>(arenas.size());
  const auto is_wrong = [&](int64_t arena) { return arena < 0 || arena >= count; };
  if (std::any_of(arenas.begin(), arenas.end(), is_wrong)) throw InvalidArgument("arenas must be numbers of arenas");
  std::vector<int64_t> staged(arenas.size(), 0);
  auto* numbers = mutable_data<int32_t>(out);
  size_t table = 0;
  size_t planned = 0;
  try {
    for (; planned < all.size(); ++planned) {
      Pass& pass = *all[planned];
      const auto pass_firsts = entries_of(pass, firsts, table), pass_arenas = entries_of(pass, arenas, table);
      if (!pass.plan_on_device(pass_firsts, pass_arenas, staged, numbers, executor())) {
        abort_plans(all, planned);
        return false;
      }
      table += pass.table_count();
      numbers += pass.batch().n_ids;
    }
  } catch (...) {
    abort_plans(all, planned);
    throw;
  }
  return true;
}

// The ids whose initial rows are in the staging of a planned lookup, table by table, and their number of each table.
std::tuple<Tensor, Tensor> device_refused(Tensor context) {
  std::vector<int64_t> refused, counts;
  for (const auto& pass : passes_of(context)) {
    if (pass->refused_ids().size() != pass->table_count()) throw InvalidArgument("the pass has no plan");
    for (const auto& ids : pass->refused_ids()) {
      refused.insert(refused.end(), ids.begin(), ids.end());
      counts.push_back(static_cast<int64_t>(ids.size()));
    }
  }
  return {id_tensor(refused), id_tensor(counts)};
}

// Whether each bag of a lookup has one position. The lookup leaves out offsets that say no more than this.
bool device_has_bags_of_one(Tensor context) {
  const auto all = passes_of(context);
  return std::all_of(all.begin(), all.end(), [](const auto& pass) { return pass->batch().offsets == nullptr; });
}

// Returns for each table whether it counts the update, int64.
Tensor device_plan_refresh(Tensor context) {
  const auto all = passes_of(context);
  std::vector<int64_t> counts;
  size_t planned = 0;
  try {
    for (; planned < all.size(); ++planned) {
      for (const bool is_counted : all[planned]->plan_refresh(executor())) counts.push_back(is_counted ? 1 : 0);
    }
    return id_tensor(counts);
  } catch (...) {
    abort_plans(all, planned);
    throw;
  }
}
void device_updated(Tensor context) {
  for (const auto& pass : passes_of(context)) pass->updated_on_device(executor());
}

// Notes that an update has left rows as they are, because their gradient was not finite.
void device_skipped(int64_t table_handle, int64_t rows) {
  const LockedTable table(tables().get(table_handle));
  table->counters().updates -= rows;
  table->counters().nonfinite += rows;
}

// Where an evaluation lookup on the device reads rows: the numbers of ids (n,) int32, and the slots and ids of the rows
// that are staged. staged: number of rows that the staging array has already. See find_on_device.
std::tuple<Tensor, Tensor, Tensor> device_find(int64_t table_handle, Tensor ids, int64_t first, int64_t staged,
                                               bool stages_missing) {
  const SharedTable table(tables().get(table_handle));
  ids = checked_ids(ids);
  Tensor numbers = empty({ids.size(0)}, ScalarType::Int);
  StagedRows rows(staged);
  find_on_device(*table, id_data(ids), ids.size(0), first, stages_missing, rows, mutable_data<int32_t>(numbers),
                 executor());
  return {std::move(numbers), id_tensor(rows.slots()), id_tensor(rows.ids())};
}

// Writes staged rows to out (n, stride). slots: those of device_find, or none if all ids have no row. See stage_rows.
void device_stage_rows(int64_t table_handle, std::optional<Tensor> slots, Tensor ids, bool initial,
                       std::optional<Tensor> elsewhere_ids, std::optional<Tensor> elsewhere_images, Tensor out) {
  const SharedTable table(tables().get(table_handle));
  ids = checked_ids(ids);
  const int64_t n = ids.size(0);
  const Tensor given = slots.has_value() ? checked(*slots, "slots", ScalarType::Long, 1)
                                         : id_tensor(std::vector<int64_t>(static_cast<size_t>(n), kNoSlot));
  const auto is_wrong = [&](int64_t slot) { return slot != kNoSlot && (slot < 0 || slot >= table->rows().slots()); };
  if (given.size(0) != n || std::any_of(id_data(given), id_data(given) + n, is_wrong)) {
    throw InvalidArgument("slots must have a slot for each id");
  }
  check_arena_rows(out, "out", *table, n);
  RowsElsewhere elsewhere;
  if (elsewhere_ids.has_value() && elsewhere_images.has_value()) {
    elsewhere_ids = checked_ids(*elsewhere_ids);
    elsewhere = {id_data(*elsewhere_ids), elsewhere_ids->size(0), nullptr, table->image_bytes()};
    if (!std::is_sorted(elsewhere.ids, elsewhere.ids + elsewhere.n)) {
      throw InvalidArgument("elsewhere_ids must ascend");
    }
    elsewhere_images = checked_images(*elsewhere_images, *table, elsewhere.n);
    elsewhere.rows = static_cast<const char*>(elsewhere_images->const_data_ptr());
  }
  stage_rows(*table, id_data(given), id_data(ids), n, initial, elsewhere, mutable_data<float>(out));
}

// Writes the output of a training lookup that has begun without one, (elements,) float32.
void device_read_on_host(Tensor context, Tensor out) {
  const auto all = passes_of(context);
  int64_t elements = 0;
  for (const auto& pass : all) elements += pass->batch().bags * pass->columns();
  if (out.scalar_type() != ScalarType::Float || out.numel() != elements || !out.is_contiguous()) {
    throw InvalidArgument("out must be contiguous float32 with " + std::to_string(elements) + " elements");
  }
  auto* rows = mutable_data<float>(out);
  for (const auto& pass : all) {
    pass->read_on_host(rows, executor());
    rows += pass->batch().bags * pass->columns();
  }
}

// The dirty device slots of the rows of ids, or of all rows: (n,) int32.
Tensor device_dirty(int64_t table_handle, std::optional<Tensor> ids) {
  const SharedTable table(tables().get(table_handle));
  const DeviceSlots& device = device_slots(*table);
  if (!ids.has_value()) return narrow_tensor(device.dirty_slots());
  const Tensor given = checked_ids(*ids);
  std::vector<Slot> slots(static_cast<size_t>(given.size(0)));
  find(*table, id_data(given), given.size(0), slots.data(), executor());
  return narrow_tensor(device.dirty_slots({{slots.data(), given.size(0)}}));
}

// The dirty device slots of the rows of a lookup, by table.
std::vector<Tensor> device_dirty_of_pass(Tensor context) {
  std::vector<Tensor> dirty;
  for (const auto& pass : passes_of(context)) {
    const auto locks = pass->group().lock_shared();
    for (size_t t = 0; t < pass->table_count(); ++t) {
      const DeviceSlots& device = device_slots(*pass->group().tables[t]);
      dirty.push_back(narrow_tensor(device.dirty_slots(pass->ranges(static_cast<int64_t>(t)))));
    }
  }
  return dirty;
}

// Writes dirty rows to the host.
void device_settle(int64_t table_handle, Tensor dirty, Tensor rows) {
  const LockedTable table(tables().get(table_handle));
  dirty = checked(dirty, "dirty", ScalarType::Int, 1);
  check_arena_rows(rows, "rows", *table, dirty.size(0));
  settle_device_slots(*table, static_cast<const int32_t*>(dirty.const_data_ptr()), dirty.size(0), float_data(rows));
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def("table_make_device_slots(int table, int slots) -> ()");
  m.def("device_plan(Tensor context, int[] firsts, int[] arenas, Tensor(a!) out) -> bool");
  m.def("device_refused(Tensor context) -> (Tensor, Tensor)");
  m.def("device_has_bags_of_one(Tensor context) -> bool");
  m.def("device_plan_refresh(Tensor context) -> Tensor");
  m.def("device_updated(Tensor context) -> ()");
  m.def("device_skipped(int table, int rows) -> ()");
  m.def("device_find(int table, Tensor ids, int first, int staged, bool stages_missing) -> (Tensor, Tensor, Tensor)");
  m.def(
      "device_stage_rows(int table, Tensor? slots, Tensor ids, bool initial, Tensor? elsewhere_ids, Tensor? "
      "elsewhere_images, Tensor(a!) out) -> ()");
  m.def("device_read_on_host(Tensor context, Tensor(a!) out) -> ()");
  m.def("device_dirty(int table, Tensor? ids) -> Tensor");
  m.def("device_dirty_of_pass(Tensor context) -> Tensor[]");
  m.def("device_settle(int table, Tensor dirty, Tensor rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("table_make_device_slots", RECSTORE_OP(table_make_device_slots));
  m.impl("device_skipped", RECSTORE_OP(device_skipped));
  m.impl("device_dirty", RECSTORE_OP(device_dirty));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("device_plan", RECSTORE_OP(device_plan));
  m.impl("device_refused", RECSTORE_OP(device_refused));
  m.impl("device_has_bags_of_one", RECSTORE_OP(device_has_bags_of_one));
  m.impl("device_plan_refresh", RECSTORE_OP(device_plan_refresh));
  m.impl("device_updated", RECSTORE_OP(device_updated));
  m.impl("device_find", RECSTORE_ALLOCATING_OP(device_find));
  m.impl("device_stage_rows", RECSTORE_OP(device_stage_rows));
  m.impl("device_read_on_host", RECSTORE_ALLOCATING_OP(device_read_on_host));
  m.impl("device_dirty_of_pass", RECSTORE_OP(device_dirty_of_pass));
  m.impl("device_settle", RECSTORE_OP(device_settle));
}
