// Ops on the rows of tables that are also on a device: which rows are copied in which direction. The tensors are on the
// host; the caller copies them. See lookup/device_pass.h.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "lookup/device_pass.h"
#include "lookup/find.h"
#include "ops/registry.h"
#include "ops/tensors.h"

namespace recstore {
namespace {

std::shared_ptr<Pass> pass_of(const Tensor& context) {
  const Tensor handle = checked(context, "context", ScalarType::Long, 1);
  if (handle.size(0) != 1) throw InvalidArgument("context must come from group_begin");
  return passes().get(*id_data(handle));
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

// Plans that the rows of a pass have device slots, and writes them to out (n_ids,) int32. Returns whether they fit.
bool device_plan(Tensor context, std::vector<int64_t> firsts, Tensor out) {
  const auto pass = pass_of(context);
  if (out.scalar_type() != ScalarType::Int || out.dim() != 1 || out.size(0) != pass->batch().n_ids ||
      !out.is_contiguous()) {
    throw InvalidArgument("out must be contiguous (N,) int32, N ids");
  }
  return pass->plan_on_device(firsts, mutable_data<int32_t>(out));
}

void device_plan_refresh(Tensor context) { pass_of(context)->plan_refresh(); }
void device_commit(Tensor context) { pass_of(context)->commit_plan(); }
void device_abort(Tensor context) { pass_of(context)->abort_plan(); }
void device_updated(Tensor context) { pass_of(context)->updated_on_device(executor()); }

// What the plan of a table copies: the device slots that rows of the host are copied to, and those whose rows are
// copied to the host before, int32.
std::tuple<Tensor, Tensor> device_planned(int64_t table_handle) {
  const SharedTable table(tables().get(table_handle));
  const DeviceSlots::Plan& plan = device_slots(*table).planned();
  return {narrow_tensor(plan.targets), narrow_tensor(plan.leaving)};
}

// Writes the rows that the plan of a table copies to the device to out.
void device_stage(int64_t table_handle, Tensor out) {
  const SharedTable table(tables().get(table_handle));
  check_arena_rows(out, "out", *table, static_cast<int64_t>(device_slots(*table).planned().rows.size()));
  stage_planned(*table, mutable_data<float>(out));
}

// The output of a training lookup that has begun without one.
Tensor device_read_on_host(Tensor context) {
  const auto pass = pass_of(context);
  Tensor out = recycled({pass->batch().bags, pass->columns()}, ScalarType::Float);
  pass->read_on_host(mutable_data<float>(out), executor());
  return out;
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

// The dirty device slots of the rows of a pass, by table.
std::vector<Tensor> device_dirty_of_pass(Tensor context) {
  const auto pass = pass_of(context);
  const auto locks = pass->group().lock_shared();
  std::vector<Tensor> dirty;
  for (size_t t = 0; t < pass->table_count(); ++t) {
    const DeviceSlots& device = device_slots(*pass->group().tables[t]);
    dirty.push_back(narrow_tensor(device.dirty_slots(pass->ranges(static_cast<int64_t>(t)))));
  }
  return dirty;
}

// Writes the rows in flight to the host.
void device_land(int64_t table_handle, Tensor rows) {
  const LockedTable table(tables().get(table_handle));
  check_arena_rows(rows, "rows", *table, device_slots(*table).in_flight());
  land(*table, float_data(rows), rows.size(0));
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
  m.def("device_plan(Tensor context, int[] firsts, Tensor(a!) out) -> bool");
  m.def("device_plan_refresh(Tensor context) -> ()");
  m.def("device_commit(Tensor context) -> ()");
  m.def("device_abort(Tensor context) -> ()");
  m.def("device_updated(Tensor context) -> ()");
  m.def("device_planned(int table) -> (Tensor, Tensor)");
  m.def("device_stage(int table, Tensor(a!) out) -> ()");
  m.def("device_read_on_host(Tensor context) -> Tensor");
  m.def("device_dirty(int table, Tensor? ids) -> Tensor");
  m.def("device_dirty_of_pass(Tensor context) -> Tensor[]");
  m.def("device_land(int table, Tensor rows) -> ()");
  m.def("device_settle(int table, Tensor dirty, Tensor rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("table_make_device_slots", RECSTORE_OP(table_make_device_slots));
  m.impl("device_planned", RECSTORE_OP(device_planned));
  m.impl("device_dirty", RECSTORE_OP(device_dirty));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("device_plan", RECSTORE_OP(device_plan));
  m.impl("device_plan_refresh", RECSTORE_OP(device_plan_refresh));
  m.impl("device_commit", RECSTORE_OP(device_commit));
  m.impl("device_abort", RECSTORE_OP(device_abort));
  m.impl("device_updated", RECSTORE_OP(device_updated));
  m.impl("device_stage", RECSTORE_OP(device_stage));
  m.impl("device_read_on_host", RECSTORE_ALLOCATING_OP(device_read_on_host));
  m.impl("device_dirty_of_pass", RECSTORE_OP(device_dirty_of_pass));
  m.impl("device_land", RECSTORE_OP(device_land));
  m.impl("device_settle", RECSTORE_OP(device_settle));
}
