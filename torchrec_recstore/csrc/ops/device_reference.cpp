// Ops for rows in the memory of a device: the settings of an update, and reference kernels, which do the work of the
// device's kernels with the row loops of this core on tensors of the host. DeviceKernels in kernels/device_interface.py
// explains their arguments. The simulated device of the tests runs them, and its kernels are compared with them.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fields.h"
#include "lookup/backward.h"
#include "ops/registry.h"
#include "ops/tensors.h"
#include "row_loops/row_loops.h"
#include "rows/arena_row.h"

namespace recstore {
namespace {

using Names = std::vector<std::string>;

// The numbers of a table in one update. max_gradient is no member of StepScalars, because the core clips gradients by
// value before the update.
struct TableNumbers {
  StepScalars scalars = {};
  float max_gradient = 0.0f;
  float decouple = 0.0f;

  template <class Self, class Visit>  // visit(name, number)
  static void for_each(Self& self, const Visit& visit) {
    auto& s = self.scalars;
    visit("learning_rate", s.learning_rate);
    visit("eps", s.eps);
    visit("weight_decay", s.weight_decay);
    visit("decay_factor", s.decay_factor);
    visit("momentum", s.momentum);
    visit("beta1", s.beta1);
    visit("beta2", s.beta2);
    visit("one_minus_beta1", s.one_minus_beta1);
    visit("one_minus_beta2", s.one_minus_beta2);
    visit("adam_rate", s.adam_rate);
    visit("bias1", s.bias1);
    visit("bias2", s.bias2);
    visit("eta", s.eta);
    visit("alpha", s.alpha);
    visit("one_minus_alpha", s.one_minus_alpha);
    visit("l1", s.l1);
    visit("l2", s.l2);
    visit("beta", s.beta);
    visit("max_gradient", self.max_gradient);
    visit("max_gradient_norm", s.max_gradient_norm);
    visit("max_norm", s.max_norm);
    visit("decouple", self.decouple);
  }
};

// The integers of a table in one update.
struct TableIntegers {
  int64_t stochastic = 0;
  int64_t rounding_key = 0;
  int64_t column_begin = 0;
  int64_t block_rows = 0;
  int64_t world_size = 0;
  int64_t rank = 0;
  int64_t mixed = 0;
  int64_t nonfinite = 0;

  template <class Self, class Visit>  // visit(name, integer)
  static void for_each(Self& self, const Visit& visit) {
    visit("stochastic", self.stochastic);
    visit("rounding_key", self.rounding_key);
    visit("column_begin", self.column_begin);
    visit("block_rows", self.block_rows);
    visit("world_size", self.world_size);
    visit("rank", self.rank);
    visit("mixed", self.mixed);
    visit("nonfinite", self.nonfinite);
  }
};

// Writes structs to arrays with an entry for each name, in the order of the names.
template <class Struct>
class NamedFields {
 public:
  // Throws InvalidArgument if a name is unknown or a field is not asked for.
  explicit NamedFields(const Names& names) {
    std::vector<int64_t> places(names.size());
    std::iota(places.begin(), places.end(), int64_t{0});
    Fields<int64_t> by_name(names, places);
    const Struct any;
    Struct::for_each(any, [&](const char* name, auto) { places_.push_back(by_name.take(name)); });
    by_name.check_all_taken();
  }

  template <class T>
  void write(const Struct& fields, T* out) const {
    const int64_t* place = places_.data();
    Struct::for_each(fields, [&](const char*, T value) { out[*place++] = value; });
  }

 private:
  std::vector<int64_t> places_;  // in the array, by field
};

// The inverse of NamedFields::write().
template <class Struct, class T>
Struct read_fields(const Names& names, const T* values) {
  Fields<T> by_name(names, std::vector<T>(values, values + names.size()));
  Struct fields;
  Struct::for_each(fields, [&](const char* name, T& value) { value = by_name.take(name); });
  by_name.check_all_taken();
  return fields;
}

void write_settings(const Group& group, size_t t, double learning_rate, const NamedFields<TableNumbers>& named_numbers,
                    const NamedFields<TableIntegers>& named_integers, float* numbers, int64_t* integers) {
  const Table& table = *group.tables[t];
  const TableConfig& config = table.config();
  const Routing& routing = group.routings[t];
  TableNumbers of_table;
  of_table.scalars = step_scalars(config.optimizer, static_cast<float>(learning_rate), table.optimizer_steps() + 1);
  of_table.max_gradient = static_cast<float>(config.optimizer.max_gradient);
  of_table.decouple = of_table.scalars.decouple ? 1.0f : 0.0f;
  const StochasticRounding rounding = rounding_of(table, routing);
  TableIntegers integers_of_table;
  integers_of_table.stochastic = rounding.of_weights ? 1 : 0;
  integers_of_table.rounding_key = static_cast<int64_t>(rounding.key);
  integers_of_table.column_begin = config.column_begin;
  integers_of_table.block_rows = routing.block_rows;
  integers_of_table.world_size = routing.world_size;
  integers_of_table.rank = routing.rank;
  integers_of_table.mixed = routing.mixed ? 1 : 0;
  integers_of_table.nonfinite = static_cast<int64_t>(config.nonfinite);
  named_numbers.write(of_table, numbers);
  named_integers.write(integers_of_table, integers);
}

// Returns the settings of the next update of each table of groups: numbers (tables, number names) float32, and integers
// (tables, integer names) int64.
std::tuple<Tensor, Tensor> device_settings(std::vector<int64_t> group_handles, std::vector<double> learning_rates,
                                           Names number_names, Names integer_names) {
  std::vector<std::shared_ptr<const Group>> all;
  size_t tables = 0;
  for (const int64_t handle : group_handles) {
    all.push_back(groups().get(handle));
    tables += all.back()->tables.size();
  }
  if (learning_rates.size() != tables) throw InvalidArgument("learning_rates must have one entry for each table");
  const auto number_count = static_cast<int64_t>(number_names.size());
  const auto integer_count = static_cast<int64_t>(integer_names.size());
  Tensor numbers = empty({static_cast<int64_t>(tables), number_count}, ScalarType::Float);
  Tensor integers = empty({static_cast<int64_t>(tables), integer_count}, ScalarType::Long);
  const NamedFields<TableNumbers> named_numbers(number_names);
  const NamedFields<TableIntegers> named_integers(integer_names);
  int64_t row = 0;
  for (const auto& group : all) {
    const auto locks = group->lock_shared();
    for (size_t t = 0; t < group->tables.size(); ++t, ++row) {
      write_settings(*group, t, learning_rates[static_cast<size_t>(row)], named_numbers, named_integers,
                     mutable_data<float>(numbers) + row * number_count,
                     mutable_data<int64_t>(integers) + row * integer_count);
    }
  }
  return {std::move(numbers), std::move(integers)};
}

// A tensor that an op changes.
template <class T>
T* changed(const Tensor& tensor, const char* name, ScalarType dtype, int64_t dim) {
  if (!tensor.is_contiguous()) throw InvalidArgument(std::string(name) + " must be contiguous");
  return mutable_data<T>(checked(tensor, name, dtype, dim));
}

void check_size(const Tensor& tensor, const char* name, int64_t dim, int64_t size) {
  if (tensor.size(dim) != size) {
    throw InvalidArgument("dimension " + std::to_string(dim) + " of " + name + " must have the size " +
                          std::to_string(size) + ", got " + std::to_string(tensor.size(dim)));
  }
}

const int32_t* int32_data(const Tensor& tensor) { return static_cast<const int32_t*>(tensor.const_data_ptr()); }

// Bags of one feature. All numbers are checked.
struct Segment {
  int64_t first_bag;
  int64_t bags;
  int64_t out_first;   // an element of the flat output
  int64_t out_stride;  // elements between bags
  int64_t table;
};

// The segments of a call, and the bags of their batch.
class Segments {
 public:
  static constexpr int64_t kFields = 5;

  // positions: number of positions of the batch; elements: number of elements of the output, of which a bag has
  // `columns`; tables: number of tables.
  Segments(const Tensor& segments, const std::optional<Tensor>& offsets, int64_t positions, int64_t elements,
           int64_t columns, int64_t tables)
      : segments_(checked(segments, "segments", ScalarType::Long, 2)) {
    check_size(segments_, "segments", 1, kFields);
    int64_t bags = positions;
    if (offsets.has_value()) {
      offsets_ = checked(*offsets, "offsets", ScalarType::Long, 1);
      bags = offsets_->size(0) - 1;
      const int64_t* data = id_data(*offsets_);
      const bool fits = bags >= 0 && data[0] >= 0 && data[bags] <= positions && std::is_sorted(data, data + bags + 1);
      if (!fits) throw InvalidArgument("offsets must ascend from 0 to the number of positions");
    }
    for (int64_t s = 0; s < count(); ++s) {
      const Segment segment = (*this)[s];
      const bool has_bags = segment.bags >= 0 && segment.first_bag >= 0 && segment.first_bag <= bags - segment.bags;
      if (!has_bags) throw InvalidArgument("segments must have bags of the batch");
      const int64_t last = segment.out_first + (segment.bags - 1) * segment.out_stride;
      const bool has_elements =
          segment.bags == 0 || (segment.out_first >= 0 && segment.out_stride >= 0 && last + columns <= elements);
      if (!has_elements) throw InvalidArgument("segments must have elements of the output");
      if (segment.table < 0 || segment.table >= tables) throw InvalidArgument("segments must have tables of the group");
    }
  }

  int64_t count() const { return segments_.size(0); }
  Segment operator[](int64_t s) const {
    const int64_t* fields = id_data(segments_) + s * kFields;
    return {fields[0], fields[1], fields[2], fields[3], fields[4]};
  }
  // The position at which a bag begins.
  int64_t offset(int64_t bag) const { return offsets_.has_value() ? id_data(*offsets_)[bag] : bag; }
  // The offsets from a bag on, or null if each position is a bag.
  const int64_t* bounds(int64_t bag) const { return offsets_.has_value() ? id_data(*offsets_) + bag : nullptr; }

 private:
  Tensor segments_;
  std::optional<Tensor> offsets_;
};

ArenaLayout layout_of(const Names& names, const std::vector<int64_t>& values) {
  Fields<int64_t> fields(names, values);
  const ArenaLayout layout = ArenaLayout::of(fields);
  fields.check_all_taken();
  return layout;
}

// The rows that the slots of a batch refer to: those of an arena, and those of a staging tensor.
class ArenaRows {
 public:
  ArenaRows(const ArenaLayout& layout, const Tensor& arena, int64_t base, const std::optional<Tensor>& staging)
      : stride_(layout.stride()), arena_(checked(arena, "arena", ScalarType::Float, 2)), base_(base) {
    check_size(arena_, "arena", 1, stride_);
    if (!staging.has_value()) return;
    staging_ = checked(*staging, "staging", ScalarType::Float, 2);
    check_size(*staging_, "staging", 1, stride_);
  }

  // Returns the row, or null for a position without a row. Throws InvalidArgument if there is no such row.
  const float* find(int32_t slot) const {
    if (slot == -1) return nullptr;
    const bool is_staged = slot < 0;
    const int64_t row = is_staged ? -2 - int64_t{slot} : slot - base_;
    const int64_t rows = is_staged ? (staging_.has_value() ? staging_->size(0) : 0) : arena_.size(0);
    if (row < 0 || row >= rows) throw InvalidArgument("slots must be those of the arena or of staging");
    return float_data(is_staged ? *staging_ : arena_) + row * stride_;
  }
  int64_t stride() const { return stride_; }

 private:
  int64_t stride_;
  Tensor arena_;
  int64_t base_;
  std::optional<Tensor> staging_;
};

// Pools the bags of segments. out: the flat output, float32.
void device_pool(Names layout_names, std::vector<int64_t> layout_values, Tensor arena, int64_t base,
                 std::optional<Tensor> staging, Tensor slots, std::optional<Tensor> offsets,
                 std::optional<Tensor> weights, Tensor segments, bool mean, Tensor out) {
  const ArenaLayout layout = layout_of(layout_names, layout_values);
  const ArenaRows rows(layout, arena, base, staging);
  slots = checked(slots, "slots", ScalarType::Int, 1);
  const int64_t n = slots.size(0);
  float* out_data = changed<float>(out, "out", ScalarType::Float, 1);
  const Segments all(segments, offsets, n, out.size(0), layout.columns, INT64_MAX);
  if (weights.has_value()) {
    weights = checked(*weights, "weights", ScalarType::Float, 1);
    check_size(*weights, "weights", 0, n);
  }
  // The row loops read rows of one array, so the rows of the batch are copied, a row for each position.
  std::vector<Slot> places(static_cast<size_t>(n), kNoSlot);
  for (int64_t s = 0; s < all.count(); ++s) {
    const Segment segment = all[s];
    const int64_t first = all.offset(segment.first_bag);
    const int64_t last = all.offset(segment.first_bag + segment.bags);
    std::vector<float> copies(static_cast<size_t>((last - first) * rows.stride()));
    for (int64_t p = first; p < last; ++p) {
      const float* row = rows.find(int32_data(slots)[p]);
      places[static_cast<size_t>(p)] = kNoSlot;
      if (row == nullptr) continue;
      places[static_cast<size_t>(p)] = static_cast<Slot>(p - first);
      std::copy(row, row + rows.stride(), copies.begin() + (p - first) * rows.stride());
    }
    PoolArgs args;
    args.rows = {copies.data(), rows.stride(), layout.columns, nullptr, layout.row_type, StateType::kFloat32};
    args.slots = places.data();
    args.bounds = all.bounds(segment.first_bag);
    args.first = first;
    args.weights = weights.has_value() ? float_data(*weights) : nullptr;
    args.bags = segment.bags;
    args.out = out_data + segment.out_first;
    args.out_stride = segment.out_stride;
    args.mean = mean;
    args.stream = false;
    if (first < last) {
      row_loops().pool(args);
      continue;
    }
    for (int64_t bag = 0; bag < segment.bags; ++bag)
      std::fill_n(args.out + bag * args.out_stride, layout.columns, 0.0f);
  }
}

float mean_scale(int64_t length) { return length > 1 ? 1.0f / static_cast<float>(length) : 1.0f; }

// Writes for each position of the segments the element of the flat gradient, the factor, and the table.
void device_locate(std::optional<Tensor> offsets, std::optional<Tensor> weights, Tensor segments, bool mean,
                   Tensor sources, Tensor scales, Tensor tables) {
  auto* source_data = changed<int64_t>(sources, "sources", ScalarType::Long, 1);
  auto* scale_data = changed<float>(scales, "scales", ScalarType::Float, 1);
  auto* table_data = changed<int32_t>(tables, "tables", ScalarType::Int, 1);
  const int64_t n = sources.size(0);
  check_size(scales, "scales", 0, n);
  check_size(tables, "tables", 0, n);
  if (weights.has_value()) {
    weights = checked(*weights, "weights", ScalarType::Float, 1);
    check_size(*weights, "weights", 0, n);
  }
  const Segments all(segments, offsets, n, INT64_MAX, 0, INT32_MAX);
  for (int64_t s = 0; s < all.count(); ++s) {
    const Segment segment = all[s];
    for (int64_t bag = 0; bag < segment.bags; ++bag) {
      const int64_t first = all.offset(segment.first_bag + bag), last = all.offset(segment.first_bag + bag + 1);
      for (int64_t p = first; p < last; ++p) {
        float scale = weights.has_value() ? float_data(*weights)[p] : 1.0f;
        if (mean && last - first > 1) scale *= mean_scale(last - first);
        source_data[p] = segment.out_first + bag * segment.out_stride;
        scale_data[p] = scale;
        table_data[p] = static_cast<int32_t>(segment.table);
      }
    }
  }
}

// The numbers of all tables.
std::vector<TableNumbers> numbers_of(const Names& names, const Tensor& given) {
  const Tensor numbers = checked(given, "numbers", ScalarType::Float, 2);
  const auto fields = static_cast<int64_t>(names.size());
  check_size(numbers, "numbers", 1, fields);
  std::vector<TableNumbers> all;
  for (int64_t t = 0; t < numbers.size(0); ++t) {
    all.push_back(read_fields<TableNumbers>(names, float_data(numbers) + t * fields));
    all.back().scalars.decouple = all.back().decouple != 0.0f;
    all.back().scalars.lr_power = -0.5f;  // the only power for which there is a kernel
  }
  return all;
}
std::vector<TableIntegers> integers_of(const Names& names, const Tensor& given) {
  const Tensor integers = checked(given, "integers", ScalarType::Long, 2);
  const auto fields = static_cast<int64_t>(names.size());
  check_size(integers, "integers", 1, fields);
  std::vector<TableIntegers> all;
  for (int64_t t = 0; t < integers.size(0); ++t) {
    all.push_back(read_fields<TableIntegers>(names, id_data(integers) + t * fields));
  }
  return all;
}

// Limits each of n numbers to [-bound, bound]. NaN stays NaN. A bound of 0 is none.
void clip(float* x, int64_t n, float bound) {
  if (bound <= 0.0f) return;
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] < -bound ? -bound : x[i] > bound ? bound : x[i];
}

// Writes the gradient of the per-sample weight of each position of the segments.
void device_weight_gradients(Names layout_names, std::vector<int64_t> layout_values, Tensor arena, int64_t base,
                             std::optional<Tensor> staging, Tensor slots, std::optional<Tensor> offsets,
                             Tensor segments, bool mean, Tensor grad, Names number_names, Tensor numbers, Tensor out) {
  const ArenaLayout layout = layout_of(layout_names, layout_values);
  const ArenaRows rows(layout, arena, base, staging);
  slots = checked(slots, "slots", ScalarType::Int, 1);
  grad = checked(grad, "grad", ScalarType::Float, 1);
  float* out_data = changed<float>(out, "out", ScalarType::Float, 1);
  check_size(out, "out", 0, slots.size(0));
  const std::vector<TableNumbers> settings = numbers_of(number_names, numbers);
  const auto tables = static_cast<int64_t>(settings.size());
  const Segments all(segments, offsets, slots.size(0), grad.size(0), layout.columns, tables);
  std::vector<float> bag_grad(static_cast<size_t>(layout.columns));
  for (int64_t s = 0; s < all.count(); ++s) {
    const Segment segment = all[s];
    for (int64_t bag = 0; bag < segment.bags; ++bag) {
      const float* source = float_data(grad) + segment.out_first + bag * segment.out_stride;
      std::copy(source, source + layout.columns, bag_grad.begin());
      clip(bag_grad.data(), layout.columns, settings[segment.table].max_gradient);
      const int64_t first = all.offset(segment.first_bag + bag), last = all.offset(segment.first_bag + bag + 1);
      const float scale = mean ? mean_scale(last - first) : 1.0f;
      for (int64_t p = first; p < last; ++p) {
        const float* row = rows.find(int32_data(slots)[p]);
        const auto product = [&] { return row_loops().dot(layout.row_type, row, bag_grad.data(), layout.columns); };
        out_data[p] = row == nullptr ? 0.0f : scale * product();
      }
    }
  }
}

// Sets failed[t] and failed[tables] if a gradient of a table with Nonfinite::kRaise is not finite.
void device_check_finite(Tensor grad, Tensor segments, int64_t columns, Names integer_names, Tensor integers,
                         Tensor failed) {
  grad = checked(grad, "grad", ScalarType::Float, 1);
  auto* failed_data = changed<int32_t>(failed, "failed", ScalarType::Int, 1);
  const std::vector<TableIntegers> settings = integers_of(integer_names, integers);
  const auto tables = static_cast<int64_t>(settings.size());
  check_size(failed, "failed", 0, tables + 1);
  if (columns < 1) throw InvalidArgument("columns must be at least 1");
  const Segments all(segments, std::nullopt, INT64_MAX, grad.size(0), columns, tables);
  for (int64_t s = 0; s < all.count(); ++s) {
    const Segment segment = all[s];
    if (static_cast<Nonfinite>(settings[segment.table].nonfinite) != Nonfinite::kRaise) continue;
    for (int64_t bag = 0; bag < segment.bags; ++bag) {
      const float* source = float_data(grad) + segment.out_first + bag * segment.out_stride;
      if (std::all_of(source, source + columns, [](float x) { return std::isfinite(x); })) continue;
      failed_data[segment.table] = 1;
      failed_data[tables] = 1;
    }
  }
}

// The gradients of the sorted positions [begin, end), each of which is a bag of its own for the row loops.
struct SortedGradients {
  std::vector<float> grads;     // (end - begin, columns), clipped by value
  std::vector<float> scales;    // (end - begin,)
  std::vector<int64_t> ids;     // (end - begin,), zeros without ids
  std::vector<Link> links;      // (end - begin,): the positions of a slot, in the order of the batch
  std::vector<Slot> rows;       // (end - begin,): the number of the slot among the distinct ones
  std::vector<int64_t> firsts;  // for each distinct slot, its first position
};

// A row of an arena with the bookkeeping that the row loops expect.
struct UnpackedRows {
  std::vector<float> data;              // (rows, host floats)
  std::vector<RowAside<float>> asides;  // (rows,)
};

UnpackedRows unpack(const ArenaLayout& layout, const float* arena, const std::vector<int64_t>& rows) {
  UnpackedRows unpacked;
  const int64_t floats = layout.host_floats();
  unpacked.data.resize(rows.size() * static_cast<size_t>(floats));
  unpacked.asides.resize(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    const float* row = arena + rows[r] * layout.stride();
    std::copy(row, row + floats, unpacked.data.begin() + static_cast<int64_t>(r) * floats);
    if (layout.has_row_state) unpacked.asides[r].state = row[floats];
  }
  return unpacked;
}

void pack(const ArenaLayout& layout, const UnpackedRows& unpacked, const std::vector<int64_t>& rows, float* arena) {
  const int64_t floats = layout.host_floats();
  for (size_t r = 0; r < rows.size(); ++r) {
    float* row = arena + rows[r] * layout.stride();
    std::copy_n(unpacked.data.begin() + static_cast<int64_t>(r) * floats, floats, row);
    if (layout.has_row_state) row[floats] = unpacked.asides[r].state;
  }
}

// Throws InvalidArgument unless a row of the layout has the states of its optimizer.
void check_states(const ArenaLayout& layout, const TableNumbers& numbers) {
  OptimizerConfig optimizer;
  optimizer.kind = layout.optimizer;
  optimizer.momentum = numbers.scalars.momentum;
  const int64_t element_states = optimizer.element_states();
  const bool has_row_state = static_cast<int64_t>(optimizer.states().size()) > element_states;
  if (element_states != layout.element_states || has_row_state != layout.has_row_state) {
    throw InvalidArgument("the states of the layout must be those of the optimizer");
  }
}

// Updates the rows of the sorted positions [begin, end) of one arena.
void device_update(Names layout_names, std::vector<int64_t> layout_values, Tensor arena, int64_t base, Tensor keys,
                   Tensor order, int64_t begin, int64_t end, Tensor sources, Tensor scales, Tensor tables, Tensor grad,
                   Names number_names, Tensor numbers, Names integer_names, Tensor integers, std::optional<Tensor> ids,
                   std::optional<Tensor> failed, std::optional<Tensor> skipped) {
  const ArenaLayout layout = layout_of(layout_names, layout_values);
  const int64_t columns = layout.columns;
  auto* arena_data = changed<float>(arena, "arena", ScalarType::Float, 2);
  check_size(arena, "arena", 1, layout.stride());
  keys = checked(keys, "keys", ScalarType::Int, 1);
  const int64_t n = keys.size(0);
  order = checked(order, "order", ScalarType::Long, 1);
  sources = checked(sources, "sources", ScalarType::Long, 1);
  scales = checked(scales, "scales", ScalarType::Float, 1);
  tables = checked(tables, "tables", ScalarType::Int, 1);
  for (const Tensor* tensor : {&order, &sources, &scales, &tables}) check_size(*tensor, "an array by position", 0, n);
  grad = checked(grad, "grad", ScalarType::Float, 1);
  if (begin < 0 || begin > end || end > n) throw InvalidArgument("begin and end must be positions");
  const std::vector<TableNumbers> settings = numbers_of(number_names, numbers);
  const std::vector<TableIntegers> integer_settings = integers_of(integer_names, integers);
  const auto table_count = static_cast<int64_t>(settings.size());
  std::vector<bool> is_checked(settings.size(), false);  // tables of other layouts have other states
  if (integer_settings.size() != settings.size()) throw InvalidArgument("integers must have a row for each table");
  if (ids.has_value()) {
    ids = checked_ids(*ids);
    check_size(*ids, "ids", 0, n);
  }
  int64_t* skipped_data = nullptr;
  if (skipped.has_value()) {
    skipped_data = changed<int64_t>(*skipped, "skipped", ScalarType::Long, 1);
    check_size(*skipped, "skipped", 0, table_count);
  }
  if (failed.has_value()) {
    failed = checked(*failed, "failed", ScalarType::Int, 1);
    check_size(*failed, "failed", 0, table_count + 1);
    if (int32_data(*failed)[table_count] != 0) return;
  }

  const auto count = static_cast<size_t>(end - begin);
  SortedGradients sorted;
  sorted.grads.resize(count * static_cast<size_t>(columns));
  sorted.scales.resize(count);
  sorted.ids.assign(count, 0);
  sorted.links.assign(count, kNotFirst);
  sorted.rows.resize(count);
  std::vector<int64_t> rows;        // of the arena, one for each distinct slot
  std::vector<int64_t> row_tables;  // the tables of `rows`
  for (int64_t i = 0; i < end - begin; ++i) {
    const int32_t key = int32_data(keys)[begin + i];
    const int64_t position = id_data(order)[begin + i];
    if (position < 0 || position >= n) throw InvalidArgument("order must have positions");
    const int64_t source = id_data(sources)[position];
    const int32_t table = int32_data(tables)[position];
    if (key < base || key - base >= arena.size(0)) throw InvalidArgument("keys must be slots of the arena");
    if (table < 0 || table >= table_count) throw InvalidArgument("tables must have numbers of tables");
    if (source < 0 || source + columns > grad.size(0)) throw InvalidArgument("sources must be elements of grad");
    const bool is_first = i == 0 || key != int32_data(keys)[begin + i - 1];
    if (!is_checked[table]) check_states(layout, settings[table]);
    is_checked[table] = true;
    if (is_first) {
      sorted.firsts.push_back(i);
      sorted.links[i] = 0;
      rows.push_back(key - base);
      row_tables.push_back(table);
    } else {
      sorted.links[i - 1] |= static_cast<Link>(i) + 1;
    }
    sorted.rows[i] = static_cast<Slot>(rows.size() - 1);
    sorted.scales[i] = float_data(scales)[position];
    if (ids.has_value()) sorted.ids[i] = id_data(*ids)[position];
    float* copy = sorted.grads.data() + i * columns;
    std::copy_n(float_data(grad) + source, columns, copy);
    clip(copy, columns, settings[row_tables.back()].max_gradient);
  }

  UnpackedRows unpacked = unpack(layout, arena_data, rows);
  const auto padded = static_cast<size_t>((columns + 15) / 16 * 16);
  std::vector<float> scratch(padded);
  std::vector<float> weights(padded * kStoredTogether);
  std::vector<uint32_t> random(padded);
  std::vector<uint32_t> bag_of(count);
  std::iota(bag_of.begin(), bag_of.end(), 0);
  const std::vector<int64_t> column_offsets{0, columns};
  Batch batch;
  batch.ids = sorted.ids.data();
  batch.n_ids = end - begin;
  batch.weights = sorted.scales.data();
  batch.bags = end - begin;
  for (size_t r = 0; r < rows.size(); ++r) {
    const TableIntegers& of_table = integer_settings[row_tables[r]];
    const Routing routing{of_table.block_rows, of_table.world_size, of_table.rank, of_table.mixed != 0};
    std::atomic<int64_t> nonfinite{0};
    UpdateArgs args = {};
    args.rows = {unpacked.data.data(), layout.host_floats(), columns, reinterpret_cast<char*>(unpacked.asides.data()),
                 layout.row_type,      StateType::kFloat32};
    args.batch = &batch;
    args.slots = sorted.rows.data();
    args.links = sorted.links.data();
    args.bag_of = bag_of.data();
    args.column_offsets = column_offsets.data();
    args.grad = sorted.grads.data();
    args.grad_stride = columns;
    args.bag_begin = sorted.firsts[r];
    args.bag_end = sorted.firsts[r] + 1;
    args.scratch = scratch.data();
    args.weights = weights.data();
    args.random = random.data();
    args.rounding = {of_table.stochastic != 0, static_cast<uint64_t>(of_table.rounding_key), &routing,
                     of_table.column_begin};
    args.optimizer = layout.optimizer;
    args.scalars = settings[row_tables[r]].scalars;
    const bool skips = static_cast<Nonfinite>(of_table.nonfinite) != Nonfinite::kPass;
    args.nonfinite = skips ? &nonfinite : nullptr;
    args.only = -1;
    row_loops().update(args);
    if (skipped_data != nullptr) skipped_data[row_tables[r]] += nonfinite;
  }
  pack(layout, unpacked, rows, arena_data);
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def(
      "device_settings(int[] groups, float[] learning_rates, str[] number_names, str[] integer_names) -> (Tensor, "
      "Tensor)");
  m.def(
      "device_pool(str[] layout_names, int[] layout, Tensor arena, int base, Tensor? staging, Tensor slots, Tensor? "
      "offsets, Tensor? weights, Tensor segments, bool mean, Tensor(a!) out) -> ()");
  m.def(
      "device_locate(Tensor? offsets, Tensor? weights, Tensor segments, bool mean, Tensor(a!) sources, Tensor(b!) "
      "scales, Tensor(c!) tables) -> ()");
  m.def(
      "device_weight_gradients(str[] layout_names, int[] layout, Tensor arena, int base, Tensor? staging, Tensor "
      "slots, Tensor? offsets, Tensor segments, bool mean, Tensor grad, str[] number_names, Tensor numbers, "
      "Tensor(a!) out) -> ()");
  m.def(
      "device_check_finite(Tensor grad, Tensor segments, int columns, str[] integer_names, Tensor integers, "
      "Tensor(a!) failed) -> ()");
  m.def(
      "device_update(str[] layout_names, int[] layout, Tensor(a!) arena, int base, Tensor keys, Tensor order, int "
      "begin, int end, Tensor sources, Tensor scales, Tensor tables, Tensor grad, str[] number_names, Tensor numbers, "
      "str[] integer_names, Tensor integers, Tensor? ids, Tensor? failed, Tensor(b!)? skipped) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("device_settings", RECSTORE_ALLOCATING_OP(device_settings));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("device_pool", RECSTORE_ALLOCATING_OP(device_pool));
  m.impl("device_locate", RECSTORE_ALLOCATING_OP(device_locate));
  m.impl("device_weight_gradients", RECSTORE_ALLOCATING_OP(device_weight_gradients));
  m.impl("device_check_finite", RECSTORE_ALLOCATING_OP(device_check_finite));
  m.impl("device_update", RECSTORE_ALLOCATING_OP(device_update));
}
