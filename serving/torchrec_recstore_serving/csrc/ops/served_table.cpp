// The classes of served models: torch.classes.recstore.ServedTable, and ServedRows, which holds what a file has of it;
// ServedHold and ServedChange, by which each call of a model is of one version.
//
// This library has no code of Python, and nothing of TorchRec. torch's stable ABI has no classes, so the library uses
// libtorch's C++ interface and fits the version of torch that it was built with.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <torch/custom_class.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../checksum.h"
#include "../served_rows.h"
#include "base/buffer_pool.h"
#include "base/error.h"
#include "mapped_file.h"
#include "server_table.h"
#include "table_calls.h"

// native_library.py reads the version of torch from the file before it loads the library.
extern "C" __attribute__((visibility("default"), used)) const char recstore_serving_torch[] =
    "recstore serving library for torch " C10_STRINGIZE(TORCH_VERSION_MAJOR) "." C10_STRINGIZE(TORCH_VERSION_MINOR);

namespace recstore {
namespace {

using at::Tensor;

Tensor checked(const Tensor& tensor, const char* name, at::ScalarType type, int64_t dims) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.dim() == dims, name, " must be ",
                    type, " of ", dims, " dimension(s) on the CPU");
  return tensor.contiguous();
}

at::ScalarType element_type(const RowLayout& layout) {
  return layout.format == RowFormat::kFloat32 ? at::kFloat : at::kByte;
}

// Rows without values: (n, columns or bytes).
Tensor empty_rows(const RowLayout& layout, int64_t n, int64_t row_bytes) {
  const bool wide = layout.format == RowFormat::kFloat32;
  return at::empty({n, wide ? layout.dim : row_bytes}, at::TensorOptions(element_type(layout)));
}

// The layout of rows of this format that are in memory as they are in `rows`.
RowLayout layout_of(int64_t format, int64_t dim, const Tensor& rows) {
  const RowLayout layout{static_cast<RowFormat>(format), dim, rows.size(1) * static_cast<int64_t>(rows.element_size())};
  layout.check();
  const bool fits = layout.format != RowFormat::kFloat32 || rows.size(1) == dim;
  TORCH_CHECK_VALUE(fits && rows.scalar_type() == element_type(layout), "the rows are not of the row format");
  return layout;
}

// The same for rows of a file, which need not have the padding with which they are given and returned (row_formats.py).
RowLayout layout_in_file(int64_t format, int64_t dim, const Tensor& rows) {
  constexpr int64_t kPadded = 16;
  RowLayout layout = layout_of(format, dim, rows);
  if (layout.format != RowFormat::kFloat32) layout.row_bytes = (layout.row_bytes + kPadded - 1) / kPadded * kPadded;
  return layout;
}

RowMemory memory_of(const Tensor& rows, bool writable) {
  return {static_cast<char*>(rows.data_ptr()), writable, std::make_shared<Tensor>(rows)};
}

// A tensor of memory that a version keeps.
Tensor view_of(const std::shared_ptr<const ServedRows>& rows, const void* data, at::IntArrayRef shape,
               at::ScalarType type) {
  return at::from_blob(const_cast<void*>(data), shape, [rows](void*) {}, at::TensorOptions(type));
}

// Changes whose memory is that of tensors.
struct Changes {
  Changes(const ServedRows& of, const Tensor& given_ids, const Tensor& given_rows, const Tensor& given_removed)
      : ids(checked(given_ids, "ids", at::kLong, 1)),
        rows(checked(given_rows, "rows", element_type(of.layout()), 2)),
        removed(checked(given_removed, "removed", at::kLong, 1)) {
    TORCH_CHECK_VALUE(rows.size(0) == ids.numel() &&
                          rows.size(1) * static_cast<int64_t>(rows.element_size()) == of.layout().row_bytes,
                      "the rows do not fit the ids and the row format");
    given = {ids.const_data_ptr<int64_t>(), static_cast<const char*>(rows.const_data_ptr()), ids.numel(),
             removed.const_data_ptr<int64_t>(), removed.numel()};
  }

  Tensor ids, rows, removed;
  RowChanges given{};
};

// The checksum of tensors, their names, their data types and their shapes; checksum_of in verification.py.
uint64_t checksum_of(const c10::Dict<std::string, Tensor>& tensors) {
  std::map<std::string, Tensor> sorted;
  for (const auto& entry : tensors) sorted.emplace(entry.key(), entry.value());
  uint64_t state = 0;
  for (const auto& [name, tensor] : sorted) {
    if (name == "checksum") continue;
    std::vector<int64_t> described;
    for (const char byte : name) described.push_back(static_cast<uint8_t>(byte));  // what TorchScript's ord() returns
    described.push_back(-1);
    described.push_back(static_cast<int64_t>(tensor.scalar_type()));
    described.insert(described.end(), tensor.sizes().begin(), tensor.sizes().end());
    state = checksum_after(state, reinterpret_cast<const char*>(described.data()),
                           static_cast<int64_t>(described.size() * sizeof(int64_t)));
    const Tensor data = tensor.detach().cpu().contiguous();
    state = checksum_after(state, static_cast<const char*>(data.const_data_ptr()), static_cast<int64_t>(data.nbytes()));
  }
  return state;
}

Tensor checksum_tensor(const c10::Dict<std::string, Tensor>& tensors) {
  return at::full({1}, static_cast<int64_t>(checksum_of(tensors)), at::kLong);
}

// The checksum of a file, continued with more of its bytes. state: (1,) int64. data: (N,) uint8. Only the last part of
// a file may have a size that is no multiple of a block; see checksum.h.
Tensor checksum_after_bytes(const Tensor& state, const Tensor& data) {
  TORCH_CHECK_VALUE(state.scalar_type() == at::kLong && state.dim() == 1 && state.size(0) == 1,
                    "state must be (1,) int64");
  TORCH_CHECK_VALUE(data.scalar_type() == at::kByte && data.dim() == 1 && data.is_cpu(),
                    "data must be (N,) uint8 on the CPU");
  const Tensor bytes = data.contiguous();
  const auto before = static_cast<uint64_t>(state.item<int64_t>());
  const uint64_t after = checksum_after(before, static_cast<const char*>(bytes.const_data_ptr()), bytes.size(0));
  return at::full({1}, static_cast<int64_t>(after), at::kLong);
}

// The checksum in 16 hexadecimal digits.
std::string version_of(const c10::Dict<std::string, Tensor>& tensors) {
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64, checksum_of(tensors));
  return digits;
}

// The version itself if its index has the entries of its rows alone, and is in memory. Otherwise a copy for which this
// is so: rows have been removed, a later version shares the index, or the rows are in a file.
std::shared_ptr<const ServedRows> whole(const std::shared_ptr<const ServedRows>& of) {
  {
    std::unique_lock<std::mutex> hold;
    if (of->whole_index(hold) != nullptr) return of;
  }
  const RowLayout& layout = of->layout();
  const auto entries = of->entries();
  const auto n = static_cast<int64_t>(entries.size());
  Tensor ids = at::empty({n}, at::kLong), all = empty_rows(layout, n + 1, layout.stride);
  auto* to = static_cast<char*>(all.data_ptr());
  std::memcpy(to, of->row(0), static_cast<size_t>(layout.stride));
  for (int64_t i = 0; i < n; ++i) {
    const auto& entry = entries[static_cast<size_t>(i)];
    ids.mutable_data_ptr<int64_t>()[i] = entry.id;
    std::memcpy(to += layout.stride, entry.row, static_cast<size_t>(layout.stride));
  }
  return ServedRows::build(layout, ids.const_data_ptr<int64_t>(), n, memory_of(all, false));
}

// The table of ids and of their rows, (count + 1, row_bytes) with the row for ids without a row first.
std::shared_ptr<ServedRows> built(const RowLayout& layout, const Tensor& ids, const Tensor& rows) {
  const Tensor packed = layout.stride == layout.row_bytes ? rows : rows.narrow(1, 0, layout.stride).contiguous();
  return ServedRows::build(layout, ids.const_data_ptr<int64_t>(), ids.numel(), memory_of(packed, false));
}

// The table whose index and rows are a record of the model's file: see Rows::Saved.
std::shared_ptr<const ServedRows> mapped_rows(const RowLayout& layout, int64_t slots, uint64_t checksum, uint64_t salt,
                                              int64_t home_lines, const std::string& name) {
  const MappedRecord record = MappedRecord::named(name);
  const int64_t lines_bytes = IdIndex::bytes_of(home_lines), rows_bytes = slots * layout.stride;
  if (record.bytes != lines_bytes + rows_bytes) {
    throw InvalidArgument("the rows of the file do not have the size that it states");
  }
  auto base = std::make_shared<BaseRows>();
  base->layout = layout;
  // The index of base rows never changes.
  base->index = std::make_unique<IdIndex>(const_cast<char*>(record.data), lines_bytes, home_lines, slots - 1, salt);
  base->rows = record.data + lines_bytes;
  base->slots = slots;
  base->checksum = checksum;
  base->check = [file = record.file] { check_unchanged(*file); };
  return ServedRows::over(std::move(base));
}

struct Rows final : torch::CustomClassHolder {
  explicit Rows(std::shared_ptr<const ServedRows> given, std::string apart = "")
      : rows(std::move(given)), record(std::move(apart)) {}
  std::shared_ptr<const ServedRows> rows;
  // The name of the record of the file that has the index and the rows; empty: this object has them.
  std::string record;

  // format, dim, slots, checksum, salt, home lines, lines of the index, rows in the order of their slots. If a record
  // has the lines and the rows: the negative number of home lines, the name of the record, and no rows.
  using Saved = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, Tensor, Tensor>;

  Saved saved() const {
    Saved saved = with_rows();
    if (record.empty()) return saved;
    std::get<5>(saved) *= -1;
    std::get<6>(saved) = at::empty({static_cast<int64_t>(record.size())}, at::kByte);
    std::memcpy(std::get<6>(saved).data_ptr(), record.data(), record.size());
    std::get<7>(saved) = empty_rows(rows->layout(), 0, rows->layout().stride);
    return saved;
  }

  Saved with_rows() const {
    const auto of = whole(rows);
    std::unique_lock<std::mutex> hold;
    const IdIndex& index = *of->whole_index(hold);
    const RowLayout& layout = of->layout();
    Tensor lines = at::empty({index.bytes()}, at::kByte);
    std::memcpy(lines.data_ptr(), index.data(), static_cast<size_t>(index.bytes()));
    Tensor all;
    if (const RowMemory* memory = of->whole_memory()) {
      const bool wide = layout.format == RowFormat::kFloat32;
      all = view_of(of, memory->data, {of->slots(), wide ? layout.dim : layout.stride}, element_type(layout));
    } else {
      all = empty_rows(layout, of->slots(), layout.stride);
      for (int64_t slot = 0; slot < of->slots(); ++slot) {
        std::memcpy(static_cast<char*>(all.data_ptr()) + slot * layout.stride, of->row(slot),
                    static_cast<size_t>(layout.stride));
      }
    }
    return {static_cast<int64_t>(layout.format), layout.dim,         of->slots(), static_cast<int64_t>(of->checksum()),
            static_cast<int64_t>(index.salt()),  index.home_lines(), lines,       all};
  }

  static c10::intrusive_ptr<Rows> loaded(const Saved& saved) {
    const auto& [format, dim, slots, checksum, salt, home_lines, lines, all] = saved;
    const Tensor rows = checked(all, "the rows", all.scalar_type(), 2);
    const RowLayout layout = layout_in_file(format, dim, rows);
    const Tensor index_lines = checked(lines, "the index", at::kByte, 1);
    const bool fits = slots >= 1 && slots < int64_t{kNoSlot} && rows.size(0) == (home_lines < 0 ? 0 : slots) &&
                      home_lines > -int64_t{kNoSlot};
    TORCH_CHECK_VALUE(fits, "the rows of the file are damaged");
    if (home_lines < 0) {
      const std::string name(static_cast<const char*>(index_lines.const_data_ptr()),
                             static_cast<size_t>(index_lines.numel()));
      return c10::make_intrusive<Rows>(
          mapped_rows(layout, slots, static_cast<uint64_t>(checksum), static_cast<uint64_t>(salt), -home_lines, name));
    }
    auto index = std::make_unique<IdIndex>(static_cast<char*>(index_lines.data_ptr()), index_lines.numel(), home_lines,
                                           slots - 1, static_cast<uint64_t>(salt));
    return c10::make_intrusive<Rows>(ServedRows::load(layout, std::move(index), std::make_shared<Tensor>(index_lines),
                                                      memory_of(rows, true), slots, static_cast<uint64_t>(checksum)));
  }
};

// A table of a served model: the version of its rows that it has now. A call works on the calling thread alone, because
// servers answer several requests at a time.
class Table final : public torch::CustomClassHolder {
 public:
  explicit Table(std::shared_ptr<const ServedRows> rows) : rows_(std::move(rows)) {}

  static c10::intrusive_ptr<Table> made(int64_t format, int64_t dim, const Tensor& ids, const Tensor& rows) {
    const Tensor given = checked_integers(ids), all = checked(rows, "rows", rows.scalar_type(), 2);
    TORCH_CHECK_VALUE(all.size(0) == given.numel() + 1,
                      "there must be a row for each id, and one for ids without a row");
    const RowLayout layout =
        RowLayout::compact(static_cast<RowFormat>(format), dim, layout_of(format, dim, all).row_bytes);
    return c10::make_intrusive<Table>(built(layout, given, all));
  }

  std::shared_ptr<const ServedRows> rows() const {
    std::shared_ptr<const ServedRows> rows;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      rows = rows_;
    }
    rows->check();
    return rows;
  }

  Tensor lookup(const Tensor& values) const {
    const auto rows = this->rows();
    const Tensor ids = checked_integers(values);
    const int64_t dim = rows->layout().dim;
    Tensor out = output(ids.numel(), dim);
    rows->lookup(ids.const_data_ptr<int64_t>(), ids.numel(), out.mutable_data_ptr<float>());
    return out;
  }

  Tensor pooled(const Tensor& values, const Tensor& lengths, const std::optional<Tensor>& weights, bool mean) const {
    const auto rows = this->rows();
    const Bags given(values, lengths, weights);
    const int64_t bags = given.count(), dim = rows->layout().dim;
    Tensor out = output(bags, dim);
    rows->pool(given.values(), given.bounds(), bags, given.factors(), mean, out.mutable_data_ptr<float>());
    return out;
  }

  Tensor contains(const Tensor& values) const {
    const Tensor ids = checked_integers(values);
    Tensor found = at::empty({ids.numel()}, at::kBool);
    rows()->contains(ids.const_data_ptr<int64_t>(), ids.numel(), found.mutable_data_ptr<bool>());
    return found;
  }

  // The rows as they are stored.
  Tensor stored(const Tensor& values) const {
    const auto rows = this->rows();
    const Tensor ids = checked_integers(values);
    Tensor out = empty_rows(rows->layout(), ids.numel(), rows->layout().row_bytes);
    rows->copy(ids.const_data_ptr<int64_t>(), ids.numel(), static_cast<char*>(out.data_ptr()));
    return out;
  }

  Tensor missing_row() const {
    const auto rows = this->rows();
    const RowLayout& layout = rows->layout();
    Tensor out = empty_rows(layout, 1, layout.row_bytes).zero_();
    std::memcpy(out.data_ptr(), rows->row(0), static_cast<size_t>(layout.stride));
    return out;
  }

  Tensor ids() const {
    const auto entries = rows()->entries();
    Tensor out = at::empty({static_cast<int64_t>(entries.size())}, at::kLong);
    std::transform(entries.begin(), entries.end(), out.mutable_data_ptr<int64_t>(),
                   [](const auto& entry) { return entry.id; });
    return out;
  }

  int64_t count() const { return rows()->rows(); }
  int64_t bytes() const { return rows()->bytes(); }
  int64_t checksum() const { return static_cast<int64_t>(rows()->checksum()); }
  int64_t recomputed_checksum() const { return static_cast<int64_t>(rows()->recomputed_checksum()); }

  // The checksum of the version that prepare() would make.
  int64_t checksum_after(const Tensor& ids, const Tensor& rows, const Tensor& removed) const {
    const auto now = this->rows();
    return static_cast<int64_t>(now->checksum_with(Changes(*now, ids, rows, removed).given));
  }

  // Makes the next version, which commit() puts in the place of the present one. Returns its checksum.
  int64_t prepare(const Tensor& ids, const Tensor& rows, const Tensor& removed) {
    const std::lock_guard<std::mutex> lock(changing_);
    next_.reset();
    before_.reset();
    const auto now = this->rows();
    const Changes changes(*now, ids, rows, removed);
    // The first delta of a model without rows has all of them, which take less time together.
    const bool first = now->slots() == 1 && now->rows() == 0 && changes.removed.numel() == 0;
    next_ =
        first ? built(now->layout(), changes.ids, at::cat({missing_row(), changes.rows})) : now->with(changes.given);
    return static_cast<int64_t>(next_->checksum());
  }

  // Allocates nothing, so that the tables of a model change together. Without prepare() it changes nothing.
  void commit() {
    const std::lock_guard<std::mutex> lock(changing_);
    if (next_ == nullptr) return;
    next_->keep();
    before_ = std::move(next_);
    const std::lock_guard<std::mutex> reading(mutex_);
    rows_.swap(before_);
  }

  // Frees what only the version before commit() needs. It takes longer than commit(), for which calls wait.
  void end() {
    const std::lock_guard<std::mutex> lock(changing_);
    before_.reset();
  }

  // The gate of the first table of a model is that of the model.
  c10::intrusive_ptr<Hold> hold() const { return c10::make_intrusive<Hold>(gate_->hold()); }
  c10::intrusive_ptr<Change> change() const { return c10::make_intrusive<Change>(gate_); }

  // Returns the lines of the index and the rows of this version. Files that are written now, until write_within(), have
  // the version without them, and with the name of a record of the file. The caller adds the record.
  std::vector<Tensor> write_apart(const std::string& record) {
    auto apart = c10::make_intrusive<Rows>(whole(rows()), record);
    const auto saved = apart->with_rows();
    const std::lock_guard<std::mutex> lock(mutex_);
    apart_ = std::move(apart);
    return {std::get<6>(saved), std::get<7>(saved)};
  }
  void write_within() {
    const std::lock_guard<std::mutex> lock(mutex_);
    apart_.reset();
  }
  c10::intrusive_ptr<Rows> state() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return apart_.defined() ? apart_ : c10::make_intrusive<Rows>(rows_);
  }

  void abandon() {
    const std::lock_guard<std::mutex> lock(changing_);
    next_.reset();
  }

  // What torch.export has to know of a table: see library.py.
  std::tuple<std::tuple<std::string, int64_t>> flattened() const { return {{"dim", rows()->layout().dim}}; }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const ServedRows> rows_;
  c10::intrusive_ptr<Rows> apart_;  // until write_within()
  std::mutex changing_;
  std::shared_ptr<ServedRows> next_;
  std::shared_ptr<const ServedRows> before_;  // the version before commit(), until end()
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

TORCH_LIBRARY(recstore, library) {
  library.def("checksum_of", checksum_tensor);
  library.def("checksum_after", checksum_after_bytes);
  library.def("version_of", version_of);
  library.class_<Rows>("ServedRows")
      .def_pickle([](const c10::intrusive_ptr<Rows>& self) { return self->saved(); },
                  [](const Rows::Saved& saved) { return Rows::loaded(saved); });
  library.class_<Hold>("ServedHold").def("release", &Hold::release);
  library.class_<Change>("ServedChange").def("commit", &Change::commit).def("release", &Change::release);
  define_server_table(library);
  library.class_<Table>("ServedTable")
      .def(torch::init([](int64_t format, int64_t dim, const Tensor& ids, const Tensor& rows) {
        return Table::made(format, dim, ids, rows);
      }))
      .def("lookup", &Table::lookup)
      .def("pooled", &Table::pooled)
      .def("contains", &Table::contains)
      .def("stored", &Table::stored)
      .def("missing_row", &Table::missing_row)
      .def("ids", &Table::ids)
      .def("count", &Table::count)
      .def("bytes", &Table::bytes)
      .def("checksum", &Table::checksum)
      .def("recomputed_checksum", &Table::recomputed_checksum)
      .def("checksum_after", &Table::checksum_after)
      .def("prepare", &Table::prepare)
      .def("commit", &Table::commit)
      .def("abandon", &Table::abandon)
      .def("end", &Table::end)
      .def("write_apart", &Table::write_apart)
      .def("write_within", &Table::write_within)
      .def("hold", &Table::hold)
      .def("change", &Table::change)
      .def("__obj_flatten__", &Table::flattened)
      // A copy of a module passes the rows on as they are, and only a file writes them. So a copy takes no time and
      // little memory, and may be changed while the original answers.
      .def_pickle([](const c10::intrusive_ptr<Table>& self) { return self->state(); },
                  [](const c10::intrusive_ptr<Rows>& rows) { return c10::make_intrusive<Table>(rows->rows); });
}

}  // namespace
}  // namespace recstore
