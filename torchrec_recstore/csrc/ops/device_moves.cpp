// Ops on the rows that several tables move between the host and a device. The tensors are on the host; the caller
// copies them. See lookup/device_moves.h.

#include "lookup/device_moves.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "lookup/device_pass.h"
#include "ops/registry.h"
#include "ops/tensors.h"

namespace recstore {
namespace {

Tables tables_of(const std::vector<int64_t>& handles) {
  Tables all;
  for (const int64_t handle : handles) all.push_back(tables().get(handle));
  return all;
}

// rows: (floats,) float32, contiguous.
void check_flat_rows(const Tensor& rows, const char* name, int64_t floats) {
  if (rows.scalar_type() != ScalarType::Float || rows.dim() != 1 || rows.size(0) != floats || !rows.is_contiguous()) {
    throw InvalidArgument(std::string(name) + " must be contiguous (" + std::to_string(floats) + ",) float32");
  }
}

// Writes the device slots of a table's plan to out, as numbers of its arena, and returns the place after them.
// Throws InvalidArgument if there are not `n`.
int32_t* write_slots(const std::vector<DeviceSlots::DeviceSlot>& slots, int64_t n, int64_t first, int32_t* out) {
  if (static_cast<int64_t>(slots.size()) != n) throw InvalidArgument("a plan has ended while its rows are moved");
  return std::transform(slots.begin(), slots.end(), out,
                        [first](DeviceSlots::DeviceSlot slot) { return static_cast<int32_t>(first + slot); });
}

// What the plans of tables copy: the device slots that rows of the host are copied to, and those whose rows are copied
// to the host before, int32, table by table; and the numbers of both for each table, (2, tables).
std::tuple<Tensor, Tensor, Tensor> device_moves(std::vector<int64_t> handles, std::vector<int64_t> firsts) {
  if (firsts.size() != handles.size()) throw InvalidArgument("firsts must have one entry for each table");
  const Tables all = tables_of(handles);
  const size_t n = all.size();
  Tensor counts = empty({2, static_cast<int64_t>(n)}, ScalarType::Long);
  auto* target_counts = mutable_data<int64_t>(counts);
  int64_t* leaving_counts = target_counts + n;
  for (size_t t = 0; t < n; ++t) {
    const SharedTable table(all[t]);
    const DeviceSlots::Plan& plan = device_slots(*table).planned();
    target_counts[t] = static_cast<int64_t>(plan.targets.size());
    leaving_counts[t] = static_cast<int64_t>(plan.leaving.size());
  }
  Tensor targets = empty({std::accumulate(target_counts, leaving_counts, int64_t{0})}, ScalarType::Int);
  Tensor leaving = empty({std::accumulate(leaving_counts, leaving_counts + n, int64_t{0})}, ScalarType::Int);
  auto* next_target = mutable_data<int32_t>(targets);
  auto* next_leaving = mutable_data<int32_t>(leaving);
  for (size_t t = 0; t < n; ++t) {
    const SharedTable table(all[t]);
    const DeviceSlots::Plan& plan = device_slots(*table).planned();
    next_target = write_slots(plan.targets, target_counts[t], firsts[t], next_target);
    next_leaving = write_slots(plan.leaving, leaving_counts[t], firsts[t], next_leaving);
  }
  return {std::move(targets), std::move(leaving), std::move(counts)};
}

void device_stage_moves(std::vector<int64_t> handles, Tensor out) {
  const Tables all = tables_of(handles);
  check_flat_rows(out, "out", planned_floats(all));
  stage_moves(all, mutable_data<float>(out), executor());
}

void device_land_moves(std::vector<int64_t> handles, Tensor rows) {
  const Tables all = tables_of(handles);
  check_flat_rows(rows, "rows", floats_in_flight(all));
  land_moves(all, float_data(rows), executor());
}

void device_commit_moves(std::vector<int64_t> handles) { commit_moves(tables_of(handles), executor()); }
void device_abort_moves(std::vector<int64_t> handles) { abort_moves(tables_of(handles)); }

// Plans for the newest prefetched batches of groups. Returns whether a table has a plan.
bool device_plan_ahead(std::vector<int64_t> handles) {
  std::vector<std::shared_ptr<const Group>> all;
  for (const int64_t handle : handles) all.push_back(groups().get(handle));
  bool is_planned = false;
  try {
    for (const auto& group : all) is_planned = plan_ahead(*group) || is_planned;
  } catch (...) {
    for (const auto& group : all) abort_moves(group->tables);
    throw;
  }
  return is_planned;
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def("device_moves(int[] tables, int[] firsts) -> (Tensor, Tensor, Tensor)");
  m.def("device_stage_moves(int[] tables, Tensor(a!) out) -> ()");
  m.def("device_land_moves(int[] tables, Tensor rows) -> ()");
  m.def("device_commit_moves(int[] tables) -> ()");
  m.def("device_abort_moves(int[] tables) -> ()");
  m.def("device_plan_ahead(int[] groups) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("device_moves", RECSTORE_OP(device_moves));
  m.impl("device_commit_moves", RECSTORE_OP(device_commit_moves));
  m.impl("device_abort_moves", RECSTORE_OP(device_abort_moves));
  m.impl("device_plan_ahead", RECSTORE_OP(device_plan_ahead));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("device_stage_moves", RECSTORE_OP(device_stage_moves));
  m.impl("device_land_moves", RECSTORE_OP(device_land_moves));
}
