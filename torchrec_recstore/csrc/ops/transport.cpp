// Ops on rows that travel between a client and a server: bytes in memory that the two share, or in a message.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "../error.h"
#include "../mix.h"
#include "tensors.h"

namespace recstore {
namespace {

// Returns uninitialised memory for n rows of row_bytes bytes, (n, row_bytes) uint8. A buffer of the pool has its pages
// already, which costs less than the copy of the rows into new pages.
Tensor rows_empty(int64_t n, int64_t row_bytes) {
  if (n < 0 || row_bytes < 0) throw InvalidArgument("n and row_bytes must not be negative");
  return recycled({n, row_bytes}, ScalarType::Byte);
}

constexpr int64_t kMostOwners = 1 << 16;

void check_places(const Tensor& places, int64_t n, int64_t rows, const std::string& name = "places") {
  if (places.size(0) != n) throw InvalidArgument(name + " must have " + std::to_string(n) + " entries");
  const int64_t* place = id_data(places);
  for (int64_t i = 0; i < n; ++i) {
    if (place[i] < 0 || place[i] >= rows) throw InvalidArgument(name + " must be from 0 to " + std::to_string(rows - 1));
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

// Splits ids among n owners by the slot of each id. owners: (slots,), the owner of each slot.
// Returns the ids, owner by owner, their positions in `ids`, ascending for each owner, and the number of ids of each owner.
std::tuple<Tensor, Tensor, Tensor> ids_split(Tensor ids, Tensor owners, int64_t n) {
  ids = checked_ids(ids);
  owners = checked(owners, "owners", ScalarType::Long, 1);
  const int64_t slots = owners.size(0);
  if (n < 1 || n >= kMostOwners) throw InvalidArgument("n must be from 1 to " + std::to_string(kMostOwners - 1));
  if (slots < 1) throw InvalidArgument("owners must have an entry");
  check_places(owners, slots, n, "owners");
  Tensor sorted = empty({ids.size(0)}, ScalarType::Long), places = empty({ids.size(0)}, ScalarType::Long);
  Tensor counts = empty({n}, ScalarType::Long);
  std::vector<uint16_t> owner(static_cast<size_t>(ids.size(0)));
  std::vector<int64_t> begins(static_cast<size_t>(n) + 1, 0);
  const int64_t *id = id_data(ids), *owner_of = id_data(owners), all = ids.size(0);
  int64_t *out = mutable_data<int64_t>(sorted), *place = mutable_data<int64_t>(places);
  for (int64_t i = 0; i < all; ++i) {
    const int64_t slot = static_cast<int64_t>(unmix(static_cast<uint64_t>(id[i]))) % slots;
    owner[i] = static_cast<uint16_t>(owner_of[slot < 0 ? slot + slots : slot]);
    ++begins[owner[i] + 1];
  }
  std::copy(begins.begin() + 1, begins.end(), mutable_data<int64_t>(counts));
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  for (int64_t i = 0; i < all; ++i) {
    const int64_t p = begins[owner[i]]++;
    out[p] = id[i];
    place[p] = i;
  }
  return {std::move(sorted), std::move(places), std::move(counts)};
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def("rows_empty(int n, int row_bytes) -> Tensor");
  m.def("rows_put(Tensor(a!) out, Tensor places, Tensor rows) -> ()");
  m.def("rows_take(Tensor rows, Tensor places, Tensor(a!) out) -> ()");
  m.def("ids_split(Tensor ids, Tensor owners, int n) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) { m.impl("rows_empty", RECSTORE_ALLOCATING_OP(rows_empty)); }

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("rows_put", RECSTORE_OP(rows_put));
  m.impl("rows_take", RECSTORE_OP(rows_take));
  m.impl("ids_split", RECSTORE_OP(ids_split));
}
