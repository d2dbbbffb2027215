// The functions of row_api.h, and the op that returns their addresses.

#include "ops/row_api.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "ops/registry.h"
#include "ops/tensors.h"

namespace recstore {
namespace {

// Runs a call, and turns its exception into a status and a message.
template <class Call>
int guarded(RowError* error, const Call& call) noexcept {
  const auto failed = [&](RowStatus status, const char* text) {
    std::snprintf(error->text, sizeof error->text, "%s", text);
    return status;
  };
  try {
    with_idle_memory(BufferPool::instance(), [&]() -> int {
      call();
      return 0;
    });
    return kRowsDone;
  } catch (const InvalidArgument& invalid) {
    const std::string text = invalid.what();
    const bool closed = text.find("is closed") != std::string::npos ||
                        text.find("no open table") != std::string::npos ||
                        text.find("no open group") != std::string::npos;
    return failed(closed ? kRowsClosed : kRowsInvalid, text.c_str());
  } catch (const std::exception& no_memory) {
    return failed(kRowsNoMemory, no_memory.what());
  }
}

Batch batch_of(const RowsOfTable& part) {
  Batch batch;
  batch.ids = part.ids;
  batch.n_ids = batch.bags = part.n;
  return batch;
}

RowType type_of(const RowsOfTable& part) { return tables().get(part.table)->config().row_type; }

template <class Narrow>
void widen(const void* from, int64_t n, float* to) {
  std::transform(static_cast<const Narrow*>(from), static_cast<const Narrow*>(from) + n, to,
                 [](Narrow value) { return static_cast<float>(value); });
}
template <class Narrow>
void narrow(const float* from, int64_t n, void* to) {
  std::transform(from, from + n, static_cast<Narrow*>(to), [](float value) { return static_cast<Narrow>(value); });
}

// The values of a part as float32: the caller's memory, or memory of this object for values with 16 bits.
class Floats {
 public:
  Floats(const RowsOfTable& part, int64_t columns) : part_(part), n_(part.n * columns), type_(type_of(part)) {
    if (is_narrow()) own_ = BufferPool::instance().take(static_cast<size_t>(n_) * sizeof(float));
  }
  float* data() const { return static_cast<float*>(is_narrow() ? own_.data() : part_.values); }
  const float* read() const {
    if (is_narrow()) {
      type_ == RowType::kFloat16 ? widen<c10::Half>(part_.values, n_, data())
                                 : widen<c10::BFloat16>(part_.values, n_, data());
    }
    return data();
  }
  void write_back() const {
    if (is_narrow()) {
      type_ == RowType::kFloat16 ? narrow<c10::Half>(data(), n_, part_.values)
                                 : narrow<c10::BFloat16>(data(), n_, part_.values);
    }
  }

 private:
  bool is_narrow() const { return part_.narrow && (type_ == RowType::kFloat16 || type_ == RowType::kBfloat16); }
  const RowsOfTable& part_;
  int64_t n_;
  RowType type_;
  BufferPool::Buffer own_;
};

void read_part(const RowsOfTable& part, Executor& of_part) {
  const auto group = groups().get(part.group);
  SerialExecutor serial;
  const int64_t columns = group->columns();
  Executor& chosen = part.n * columns <= kSmallRead ? serial : of_part;
  const Floats floats(part, columns);
  const auto has_row = [&] {
    std::vector<char> found(static_cast<size_t>(part.n));
    contains(*SharedTable(tables().get(part.table)), part.ids, part.n, reinterpret_cast<bool*>(found.data()), chosen);
    return found;
  };
  // A row that is made or removed meanwhile reads as if that had happened before, or after.
  const std::vector<char> before = part.zeros ? has_row() : std::vector<char>{};
  read(*group, batch_of(part), floats.data(), chosen);
  if (part.zeros) {
    const std::vector<char> after = has_row();
    for (int64_t i = 0; i < part.n; ++i) {
      if (!before[i] || !after[i]) std::fill_n(floats.data() + i * columns, columns, 0.0f);
    }
  }
  floats.write_back();
}

int read_parts(const RowsOfTable* parts, int64_t count, RowError* error) {
  return guarded(error, [&] {
    for_each_part(executor(), count, [&](int64_t p, Executor& of_part) { read_part(parts[p], of_part); });
  });
}

int update_parts(const RowsOfTable* parts, int64_t count, RowError* error) {
  return guarded(error, [&] {
    std::vector<std::shared_ptr<Pass>> made;
    std::vector<Floats> grads;
    std::vector<Pass::Start> starts;
    std::vector<Pass::End> ends;
    grads.reserve(static_cast<size_t>(count));
    for (const RowsOfTable* part = parts; part < parts + count; ++part) {
      const auto group = groups().get(part->group);
      grads.emplace_back(*part, group->columns());
      made.push_back(std::make_shared<Pass>(group, batch_of(*part), nullptr, executor()));
      starts.push_back({made.back().get(), nullptr});
      ends.push_back({made.back().get(), grads.back().read(), static_cast<float>(part->learning_rate)});
    }
    Pass::begin(starts, executor());
    Pass::end(ends, executor());
  });
}

int contains_ids(int64_t table, const int64_t* ids, int64_t n, bool* out, RowError* error) {
  return guarded(error, [&] { contains(*SharedTable(tables().get(table)), ids, n, out, executor()); });
}

int insert_rows(const RowsOfTable* rows, RowError* error) {
  return guarded(error, [&] {
    const auto owner = tables().get(rows->table);
    const Floats weights(*rows, owner->config().columns());
    const float* values = weights.read();
    write_weights(*LockedTable(owner), rows->ids, rows->n, values, executor());
  });
}

int remove_ids(int64_t table, const int64_t* ids, int64_t n, int64_t* removed, RowError* error) {
  return guarded(error, [&] { *removed = LockedTable(tables().get(table))->remove(ids, n); });
}

int64_t row_api() {
  static constexpr RowApi api{kRowApiVersion, read_parts, update_parts, contains_ids, insert_rows, remove_ids};
  return reinterpret_cast<int64_t>(&api);
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) { m.def("row_api() -> int"); }
STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) { m.impl("row_api", RECSTORE_OP(row_api)); }
