// Ops on rows that travel between a client and a server: bytes in memory that the two share, or in a message.

#include <cstring>
#include <optional>
#include <string>

#include "../error.h"
#include "tensors.h"

namespace recstore {
namespace {

// Returns uninitialised memory for n rows of row_bytes bytes, (n, row_bytes) uint8. A buffer of the pool has its pages
// already, which costs less than the copy of the rows into new pages.
Tensor rows_empty(int64_t n, int64_t row_bytes) {
  if (n < 0 || row_bytes < 0) throw InvalidArgument("n and row_bytes must not be negative");
  return recycled({n, row_bytes}, ScalarType::Byte);
}

void check_places(const Tensor& places, int64_t n, int64_t rows) {
  if (places.size(0) != n) throw InvalidArgument("places must have " + std::to_string(n) + " entries");
  const int64_t* place = id_data(places);
  for (int64_t i = 0; i < n; ++i) {
    if (place[i] < 0 || place[i] >= rows) throw InvalidArgument("places must be from 0 to " + std::to_string(rows - 1));
  }
}

Tensor checked_bytes(const Tensor& rows, const char* name) { return checked(rows, name, ScalarType::Byte, 2); }

// A row of `bytes` bytes. The usual sizes are constants, so that the compiler copies a row with a few wide moves.
template <class Copy>
void with_row_size(size_t bytes, const Copy& copy) {
  switch (bytes) {
    case 64: return copy([](char* to, const char* from) { std::memcpy(to, from, 64); });
    case 128: return copy([](char* to, const char* from) { std::memcpy(to, from, 128); });
    case 256: return copy([](char* to, const char* from) { std::memcpy(to, from, 256); });
    case 512: return copy([](char* to, const char* from) { std::memcpy(to, from, 512); });
    default: return copy([bytes](char* to, const char* from) { std::memcpy(to, from, bytes); });
  }
}

// Sets out[places[i]] = rows[i]. Runs on the calling thread: client and server share the cores, and idle threads of a
// team would spin on them.
void rows_put(Tensor out, Tensor places, Tensor rows) {
  rows = checked_bytes(rows, "rows");
  places = checked(places, "places", ScalarType::Long, 1);
  if (!out.is_contiguous()) throw InvalidArgument("out must be contiguous");
  out = checked_bytes(out, "out");
  if (out.size(1) != rows.size(1)) throw InvalidArgument("rows and out must have rows of one size");
  check_places(places, rows.size(0), out.size(0));
  const auto bytes = static_cast<size_t>(rows.size(1));
  const int64_t* place = id_data(places);
  const auto* from = static_cast<const char*>(rows.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  with_row_size(bytes, [&](auto copy) {
    for (int64_t i = 0, n = rows.size(0); i < n; ++i) copy(to + static_cast<size_t>(place[i]) * bytes, from + static_cast<size_t>(i) * bytes);
  });
}

// Sets out[i] = rows[places[i]]. Runs on the calling thread, as rows_put does.
void rows_take(Tensor rows, Tensor places, Tensor out) {
  rows = checked_bytes(rows, "rows");
  places = checked(places, "places", ScalarType::Long, 1);
  if (!out.is_contiguous()) throw InvalidArgument("out must be contiguous");
  out = checked_bytes(out, "out");
  if (out.size(1) != rows.size(1)) throw InvalidArgument("rows and out must have rows of one size");
  check_places(places, out.size(0), rows.size(0));
  const auto bytes = static_cast<size_t>(rows.size(1));
  const int64_t* place = id_data(places);
  const auto* from = static_cast<const char*>(rows.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  with_row_size(bytes, [&](auto copy) {
    for (int64_t i = 0, n = out.size(0); i < n; ++i) copy(to + static_cast<size_t>(i) * bytes, from + static_cast<size_t>(place[i]) * bytes);
  });
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def("rows_empty(int n, int row_bytes) -> Tensor");
  m.def("rows_put(Tensor(a!) out, Tensor places, Tensor rows) -> ()");
  m.def("rows_take(Tensor rows, Tensor places, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) { m.impl("rows_empty", RECSTORE_ALLOCATING_OP(rows_empty)); }

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("rows_put", RECSTORE_OP(rows_put));
  m.impl("rows_take", RECSTORE_OP(rows_take));
}
