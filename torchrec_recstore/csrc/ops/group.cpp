// Ops on a group of tables: the forward and backward of a batch.

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "lookup/pass.h"
#include "lookup/prefetch.h"
#include "ops/registry.h"
#include "ops/tensors.h"

namespace recstore {
namespace {

// block_rows, world_sizes, ranks and mixed are the members of the tables' routings; see Routing.
int64_t group_create(std::vector<int64_t> handles, std::vector<int64_t> feature_tables, std::vector<int64_t> block_rows,
                     std::vector<int64_t> world_sizes, std::vector<int64_t> ranks, std::vector<int64_t> mixed,
                     bool mean) {
  const auto n = static_cast<int64_t>(handles.size());
  for (const auto* numbers : {&block_rows, &world_sizes, &ranks, &mixed}) {
    if (numbers->size() != handles.size()) {
      throw InvalidArgument("routings must have a block_rows, a world_size, a rank and a mixed for each table");
    }
  }
  std::vector<std::shared_ptr<Table>> members;
  std::vector<Routing> member_routings;
  for (int64_t t = 0; t < n; ++t) {
    members.push_back(tables().get(handles[t]));
    if (std::count(handles.begin(), handles.end(), handles[t]) > 1) throw InvalidArgument("tables must be distinct");
    member_routings.push_back({block_rows[t], world_sizes[t], ranks[t], mixed[t] != 0});
  }
  for (const int64_t t : feature_tables) {
    if (t < 0 || t >= n) throw InvalidArgument("feature_tables must be positions in tables, got " + std::to_string(t));
  }
  return groups().add(
      std::make_shared<const Group>(std::move(members), std::move(member_routings), std::move(feature_tables), mean));
}

void group_destroy(int64_t group) { groups().remove(group); }

// The arrays that a pass needs until its backward. The offsets are a copy, because the backward finds the bags by them
// and the caller may overwrite its tensor before that.
struct Inputs {
  Tensor ids;  // stochastic rounding draws its bits by the ids; the rows are found by their slots
  BufferPool::Buffer offsets;
  std::optional<Tensor> weights;
};

// Throws InvalidArgument if an op cannot write float32 of this shape to out.
void check_out(const Tensor& out, const std::vector<int64_t>& shape) {
  if (!out.is_contiguous()) throw InvalidArgument("out must be contiguous");
  checked(out, "out", ScalarType::Float, static_cast<int64_t>(shape.size()));
  for (size_t d = 0; d < shape.size(); ++d) {
    if (out.size(static_cast<int64_t>(d)) == shape[d]) continue;
    throw InvalidArgument("out must have " + std::to_string(shape[d]) + " elements in dimension " + std::to_string(d));
  }
}

// The batch that an op got, and the arrays that it refers to.
struct GivenBatch {
  Batch batch;
  std::shared_ptr<Inputs> inputs;
};

// offsets: int32 or int64. Without offsets, each id is a bag of its own.
GivenBatch checked_batch(const Group& group, const Tensor& given_ids, std::optional<Tensor> offsets,
                         const std::optional<Tensor>& weights) {
  const Tensor ids = checked_ids(given_ids);
  GivenBatch given{plain_batch(ids), std::make_shared<Inputs>(Inputs{ids, {}, std::nullopt})};
  Batch& batch = given.batch;
  if (offsets.has_value()) {
    const bool narrow = offsets->scalar_type() == ScalarType::Int;
    offsets = checked(*offsets, "offsets", narrow ? ScalarType::Int : ScalarType::Long, 1);
    const int64_t n = offsets->size(0);
    batch.bags = count_bags(n, group.features());
    const auto keep = [&](const auto* data) {
      if (each_its_own(data, n, executor())) return;
      given.inputs->offsets = copy_offsets(data, n, executor());
      batch.offsets = static_cast<const int64_t*>(given.inputs->offsets.data());
    };
    narrow ? keep(static_cast<const int32_t*>(offsets->const_data_ptr())) : keep(id_data(*offsets));
  } else if (group.features() != 1) {
    throw InvalidArgument("a batch without offsets needs a group of one feature");
  }
  if (weights.has_value()) {
    given.inputs->weights = checked(*weights, "weights", ScalarType::Float, 1);
    if (given.inputs->weights->size(0) != batch.n_ids) throw InvalidArgument("weights must have one entry for each id");
    batch.weights = float_data(*given.inputs->weights);
  }
  return given;
}

// Returns the handles of the passes, (passes,) int64. The passes live as long as this tensor.
Tensor context_of(std::vector<std::shared_ptr<Pass>> all) {
  const auto owner = std::make_shared<OwnedHandles<Pass>>(passes(), std::move(all));
  return torch::stable::from_blob(owner->data(), {owner->size()}, {1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Long,
                                  [owner](void*) {});
}
Tensor no_context() { return empty({0}, ScalarType::Long); }

std::shared_ptr<Pass> checked_pass(const Tensor& context) {
  const Tensor handle = checked(context, "context", ScalarType::Long, 1);
  if (handle.size(0) != 1) throw InvalidArgument("context must come from a training group_forward");
  return passes().get(*id_data(handle));
}

// Looks a batch up, and writes the output, (bags, columns). Returns the context for group_backward, which is empty
// without train.
Tensor forward(std::shared_ptr<const Group> group, const GivenBatch& given, float* out, bool train) {
  if (!train) {
    read(*group, given.batch, out, executor());
    return no_context();
  }
  auto pass = std::make_shared<Pass>(std::move(group), given.batch, given.inputs, executor());
  const Pass::Start start{pass.get(), out};
  Tensor context = context_of({std::move(pass)});  // may fail, so before the tables change
  Pass::begin({start}, executor());
  return context;
}

// Returns the output (bags, columns), and the context for group_backward; the context is empty without train.
std::tuple<Tensor, Tensor> group_forward(int64_t group_handle, Tensor ids, Tensor offsets,
                                         std::optional<Tensor> weights, bool train) {
  auto group = groups().get(group_handle);
  const auto given = checked_batch(*group, ids, offsets, weights);
  Tensor out = recycled({given.batch.bags, group->columns()}, ScalarType::Float);
  Tensor context = forward(std::move(group), given, mutable_data<float>(out), train);
  return {std::move(out), std::move(context)};
}

// The step of a training lookup without its output, which a device pools. Returns the context; see
// lookup/device_pass.h.
Tensor group_begin(int64_t group_handle, Tensor ids, Tensor offsets, std::optional<Tensor> weights) {
  const auto group = groups().get(group_handle);
  const auto [batch, inputs] = checked_batch(*group, ids, offsets, weights);
  auto pass = std::make_shared<Pass>(group, batch, inputs, executor());
  const Pass::Start start{pass.get(), nullptr};
  Tensor context = context_of({std::move(pass)});
  Pass::begin({start}, executor());
  return context;
}

// Writes the output to out, (bags, columns). Returns the context.
Tensor group_forward_into(int64_t group_handle, Tensor ids, Tensor offsets, std::optional<Tensor> weights, bool train,
                          Tensor out) {
  auto group = groups().get(group_handle);
  const auto given = checked_batch(*group, ids, offsets, weights);
  check_out(out, {given.batch.bags, group->columns()});
  return forward(std::move(group), given, mutable_data<float>(out), train);
}

// Reads the rows of all parts. outs: for each part, (batch.bags, columns). See read.
void read_each(const std::vector<GroupRows>& parts, const std::vector<float*>& outs) {
  for_each_part(executor(), static_cast<int64_t>(parts.size()),
                [&](int64_t p, Executor& of_part) { read(*parts[p].group, parts[p].batch, outs[p], of_part); });
}

// Returns the groups and the parts of a batch that rows_forward looks up, and the number of floats of the rows.
std::tuple<std::vector<GroupRows>, int64_t> divided(const std::vector<int64_t>& group_handles, const Tensor& ids,
                                                    const std::vector<int64_t>& counts) {
  std::vector<GroupRows> parts;
  for (const int64_t handle : group_handles) parts.push_back({groups().get(handle), {}});
  const int64_t floats = divide_ids(parts, id_data(ids), ids.size(0), counts);
  return {std::move(parts), floats};
}

// Looks up the rows of all parts, and writes them to out, unless it is null. Returns the contexts (groups,), which are
// empty without train.
Tensor rows_of_parts(const std::vector<GroupRows>& parts, const Tensor& ids, float* out, bool train) {
  std::vector<std::shared_ptr<Pass>> made;
  std::vector<Pass::Start> starts;
  std::vector<float*> outs;
  for (const auto& [group, batch] : parts) {
    outs.push_back(out);
    if (train) {
      const auto inputs = std::make_shared<Inputs>(Inputs{ids, {}, std::nullopt});
      made.push_back(std::make_shared<Pass>(group, batch, inputs, executor()));
      starts.push_back({made.back().get(), out});
    }
    if (out != nullptr) out += batch.bags * group->columns();
  }
  if (!train) {
    read_each(parts, outs);
    return no_context();
  }
  Tensor context = context_of(std::move(made));
  Pass::begin(starts, executor());
  return context;
}

// A lookup without pooling in several groups of one feature. The first counts[0] of ids belong to the first group, the
// next ones to the second, and so on. Returns the rows (sum of counts * columns,), and the contexts (groups,), each for
// a group_backward of its own; they are empty without train.
std::tuple<Tensor, Tensor> rows_forward(std::vector<int64_t> group_handles, Tensor ids, std::vector<int64_t> counts,
                                        bool train) {
  ids = checked_ids(ids);
  const auto [parts, floats] = divided(group_handles, ids, counts);
  Tensor rows = recycled({floats}, ScalarType::Float);
  Tensor context = rows_of_parts(parts, ids, mutable_data<float>(rows), train);
  return {std::move(rows), std::move(context)};
}

// Writes the rows to out, (sum of counts * columns,). Returns the contexts.
Tensor rows_forward_into(std::vector<int64_t> group_handles, Tensor ids, std::vector<int64_t> counts, bool train,
                         Tensor out) {
  ids = checked_ids(ids);
  const auto [parts, floats] = divided(group_handles, ids, counts);
  check_out(out, {floats});
  return rows_of_parts(parts, ids, mutable_data<float>(out), train);
}

// The step of a training lookup of plain rows, without the rows. Returns the context for the update.
Tensor rows_begin(int64_t group_handle, Tensor ids) {
  ids = checked_ids(ids);
  std::vector<GroupRows> parts{{groups().get(group_handle), {}}};
  divide_ids(parts, id_data(ids), ids.size(0), {ids.size(0)});
  Inputs inputs{ids, {}, std::nullopt};
  const auto pass =
      std::make_shared<Pass>(parts[0].group, parts[0].batch, std::make_shared<Inputs>(std::move(inputs)), executor());
  Tensor context = context_of({pass});
  Pass::begin({{pass.get(), nullptr}}, executor());
  return context;
}

// The step of rows_forward, without the rows, which a device reads. Returns the contexts (groups,); see
// lookup/device_pass.h.
Tensor rows_begin_each(std::vector<int64_t> group_handles, Tensor ids, std::vector<int64_t> counts) {
  ids = checked_ids(ids);
  return rows_of_parts(std::get<0>(divided(group_handles, ids, counts)), ids, nullptr, true);
}

// Returns the parts of a call for several groups of one feature. ids: the ids of each group, which this function makes
// contiguous. rows: (n, columns) float32 for each group.
std::vector<GroupRows> parts_of(const std::vector<int64_t>& group_handles, std::vector<Tensor>& ids,
                                std::vector<Tensor>& rows) {
  if (ids.size() != group_handles.size() || rows.size() != group_handles.size()) {
    throw InvalidArgument("ids and rows must have an entry for each group");
  }
  std::vector<GroupRows> parts;
  for (size_t p = 0; p < ids.size(); ++p) {
    parts.push_back({groups().get(group_handles[p]), {}});
    if (parts[p].group->features() != 1) throw InvalidArgument("each group must have one feature");
    ids[p] = checked_ids(ids[p]);
    parts[p].batch = plain_batch(ids[p]);
    rows[p] = checked_rows(rows[p], "rows", parts[p].batch.bags, parts[p].group->columns());
  }
  return parts;
}

// Reads rows of several groups of one feature.
void rows_read(std::vector<int64_t> group_handles, std::vector<Tensor> ids, std::vector<Tensor> out) {
  for (const Tensor& rows : out) {
    if (!rows.is_contiguous()) throw InvalidArgument("out must be contiguous");
  }
  const auto parts = parts_of(group_handles, ids, out);
  std::vector<float*> outs;
  for (const Tensor& rows : out) outs.push_back(mutable_data<float>(rows));
  read_each(parts, outs);
}

// A training step and a backward of each of several groups of one feature, which have no table in common. Throws
// OutOfMemory before a row is updated.
void rows_update(std::vector<int64_t> group_handles, std::vector<Tensor> ids, std::vector<Tensor> grads,
                 std::vector<double> learning_rates) {
  const auto parts = parts_of(group_handles, ids, grads);
  if (learning_rates.size() != parts.size()) throw InvalidArgument("learning_rates must have one entry for each group");
  std::vector<std::shared_ptr<Pass>> made;
  std::vector<Pass::Start> starts;
  std::vector<Pass::End> ends;
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto inputs = std::make_shared<Inputs>(Inputs{ids[p], {}, std::nullopt});
    made.push_back(std::make_shared<Pass>(parts[p].group, parts[p].batch, inputs, executor()));
    starts.push_back({made.back().get(), nullptr});
    ends.push_back({made.back().get(), float_data(grads[p]), static_cast<float>(learning_rates[p])});
  }
  Pass::begin(starts, executor());
  Pass::end(ends, executor());
}

// Returns the raw ids that a batch looks up in each table, feature by feature.
std::vector<Tensor> group_table_ids(int64_t group_handle, Tensor ids, std::optional<Tensor> offsets) {
  const auto group = groups().get(group_handle);
  const auto given = checked_batch(*group, ids, offsets, std::nullopt);
  check_offsets(given.batch, group->features(), executor());
  std::vector<Tensor> out;
  std::vector<int64_t*> data;
  for (const int64_t count : count_table_ids(*group, given.batch)) {
    out.push_back(recycled({count}, ScalarType::Long));
    data.push_back(mutable_data<int64_t>(out.back()));
  }
  copy_table_ids(*group, given.batch, data);
  return out;
}

// An evaluation lookup in which some rows of each table are stored elsewhere: ids (N,) int64, ascending, and their
// images. Returns the output (bags, columns).
Tensor group_read(int64_t group_handle, Tensor ids, std::optional<Tensor> offsets, std::optional<Tensor> weights,
                  std::vector<Tensor> elsewhere_ids, std::vector<Tensor> elsewhere_images) {
  const auto group = groups().get(group_handle);
  const auto given = checked_batch(*group, ids, offsets, weights);
  if (elsewhere_ids.size() != group->tables.size() || elsewhere_images.size() != group->tables.size()) {
    throw InvalidArgument("elsewhere_ids and elsewhere_images must have one entry for each table");
  }
  std::vector<RowsElsewhere> elsewhere;
  for (size_t t = 0; t < group->tables.size(); ++t) {
    const Table& table = *group->tables[t];
    elsewhere_ids[t] = checked_ids(elsewhere_ids[t]);
    const int64_t n = elsewhere_ids[t].size(0);
    const int64_t* data = id_data(elsewhere_ids[t]);
    if (!std::is_sorted(data, data + n)) throw InvalidArgument("elsewhere_ids must ascend");
    elsewhere_images[t] = checked_images(elsewhere_images[t], table, n);
    elsewhere.push_back({data, n, static_cast<const char*>(elsewhere_images[t].const_data_ptr()), table.image_bytes()});
  }
  Tensor out = recycled({given.batch.bags, group->columns()}, ScalarType::Float);
  read(*group, given.batch, mutable_data<float>(out), executor(), elsewhere);
  return out;
}

// Makes the missing rows of a batch before its training forward. It runs on the calling thread alone, because the other
// threads are busy with the present batch, unless a device is busy with it.
void group_prefetch(int64_t group_handle, Tensor ids, std::vector<int64_t> counts) {
  const auto group = groups().get(group_handle);
  ids = checked_ids(ids);
  const auto is_on_device = [](const auto& table) { return table->device() != nullptr; };
  const bool uses_threads = std::any_of(group->tables.begin(), group->tables.end(), is_on_device);
  SerialExecutor serial;
  prefetch(*group, id_data(ids), ids.size(0), counts, uses_threads ? executor() : serial);
}

// Returns the gradient of the per-sample weights (n_ids,), which is empty without weight_grads.
Tensor group_backward(Tensor context, Tensor grad, std::vector<double> learning_rates, bool weight_grads) {
  const auto pass = checked_pass(context);
  grad = checked_rows(grad, "grad", pass->batch().bags, pass->columns());
  if (learning_rates.size() != pass->table_count()) {
    throw InvalidArgument("learning_rates must have one entry for each table");
  }
  Tensor grad_weights = empty({weight_grads ? pass->batch().n_ids : 0}, ScalarType::Float);
  pass->backward(float_data(grad), std::vector<float>(learning_rates.begin(), learning_rates.end()),
                 weight_grads ? mutable_data<float>(grad_weights) : nullptr, executor());
  return grad_weights;
}

// The first half of a backward whose update comes later. Returns the gradient of the per-sample weights (n_ids,).
Tensor group_weight_gradients(Tensor context, Tensor grad) {
  const auto pass = checked_pass(context);
  grad = checked_rows(grad, "grad", pass->batch().bags, pass->columns());
  Tensor grad_weights = empty({pass->batch().n_ids}, ScalarType::Float);
  pass->weight_gradients_only(float_data(grad), mutable_data<float>(grad_weights), executor());
  return grad_weights;
}

// One update for several passes.
void group_accumulated_backward(std::vector<Tensor> contexts, std::vector<Tensor> grads,
                                std::vector<double> learning_rates) {
  if (contexts.empty() || contexts.size() != grads.size()) {
    throw InvalidArgument("contexts and grads must have the same number of entries, at least one");
  }
  std::vector<std::shared_ptr<Pass>> all;
  std::vector<const float*> data;
  for (size_t i = 0; i < contexts.size(); ++i) {
    all.push_back(checked_pass(contexts[i]));
    grads[i] = checked_rows(grads[i], "grads", all[i]->batch().bags, all[i]->columns());
    data.push_back(float_data(grads[i]));
  }
  if (learning_rates.size() != all[0]->table_count()) {
    throw InvalidArgument("learning_rates must have one entry for each table");
  }
  accumulated_backward(all, data, std::vector<float>(learning_rates.begin(), learning_rates.end()), executor());
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def(
      "group_create(int[] tables, int[] feature_tables, int[] block_rows, int[] world_sizes, int[] ranks, int[] mixed, "
      "bool mean) -> int");
  m.def("group_destroy(int group) -> ()");
  m.def("group_forward(int group, Tensor ids, Tensor offsets, Tensor? weights, bool train) -> (Tensor, Tensor)");
  m.def("group_begin(int group, Tensor ids, Tensor offsets, Tensor? weights) -> Tensor");
  m.def(
      "group_forward_into(int group, Tensor ids, Tensor offsets, Tensor? weights, bool train, Tensor(a!) out) -> "
      "Tensor");
  m.def("rows_forward(int[] groups, Tensor ids, int[] counts, bool train) -> (Tensor, Tensor)");
  m.def("rows_forward_into(int[] groups, Tensor ids, int[] counts, bool train, Tensor(a!) out) -> Tensor");
  m.def("rows_begin(int group, Tensor ids) -> Tensor");
  m.def("rows_begin_each(int[] groups, Tensor ids, int[] counts) -> Tensor");
  m.def("rows_read(int[] groups, Tensor[] ids, Tensor(a!)[] out) -> ()");
  m.def("rows_update(int[] groups, Tensor[] ids, Tensor[] grads, float[] learning_rates) -> ()");
  m.def("group_table_ids(int group, Tensor ids, Tensor? offsets) -> Tensor[]");
  m.def(
      "group_read(int group, Tensor ids, Tensor? offsets, Tensor? weights, Tensor[] elsewhere_ids, Tensor[] "
      "elsewhere_images) "
      "-> Tensor");
  m.def("group_prefetch(int group, Tensor ids, int[] counts) -> ()");
  m.def("group_backward(Tensor context, Tensor grad, float[] learning_rates, bool weight_grads) -> Tensor");
  m.def("group_weight_gradients(Tensor context, Tensor grad) -> Tensor");
  m.def("group_accumulated_backward(Tensor[] contexts, Tensor[] grads, float[] learning_rates) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("group_create", RECSTORE_OP(group_create));
  m.impl("group_destroy", RECSTORE_OP(group_destroy));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("group_forward", RECSTORE_ALLOCATING_OP(group_forward));
  m.impl("group_begin", RECSTORE_ALLOCATING_OP(group_begin));
  m.impl("group_forward_into", RECSTORE_ALLOCATING_OP(group_forward_into));
  m.impl("rows_forward", RECSTORE_ALLOCATING_OP(rows_forward));
  m.impl("rows_forward_into", RECSTORE_ALLOCATING_OP(rows_forward_into));
  m.impl("rows_begin", RECSTORE_ALLOCATING_OP(rows_begin));
  m.impl("rows_begin_each", RECSTORE_ALLOCATING_OP(rows_begin_each));
  m.impl("rows_read", RECSTORE_ALLOCATING_OP(rows_read));
  m.impl("rows_update", RECSTORE_ALLOCATING_OP(rows_update));
  m.impl("group_table_ids", RECSTORE_ALLOCATING_OP(group_table_ids));
  m.impl("group_read", RECSTORE_ALLOCATING_OP(group_read));
  m.impl("group_prefetch", RECSTORE_OP(group_prefetch));
  m.impl("group_backward", RECSTORE_ALLOCATING_OP(group_backward));
  m.impl("group_weight_gradients", RECSTORE_ALLOCATING_OP(group_weight_gradients));
  m.impl("group_accumulated_backward", RECSTORE_ALLOCATING_OP(group_accumulated_backward));
}
