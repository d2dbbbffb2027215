// Ops of the cold store on an SSD.

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>

#include "base/error.h"
#include "cold/ssd_store.h"
#include "ops/registry.h"
#include "ops/tensors.h"

namespace recstore {
namespace {

int64_t ssd_open(std::string path, int64_t row_bytes, bool keep) {
  if (row_bytes < 1 || row_bytes > int64_t{1} << 30) throw InvalidArgument("row_bytes must be within 1 and 2**30");
  return ssd_stores().add(std::make_shared<SsdStore>(path, row_bytes, keep));
}

// The number of rows that were dropped when the store was opened, see SsdStore::dropped().
int64_t ssd_dropped(int64_t store) { return ssd_stores().get(store)->dropped(); }

void ssd_close(int64_t store) { ssd_stores().remove(store); }

// Returns which ids have a row, (N,) bool, and their rows, (n, row bytes) uint8.
std::tuple<Tensor, Tensor> ssd_get(int64_t store, Tensor ids) {
  ids = checked_ids(ids);
  const auto owner = ssd_stores().get(store);
  Tensor found = empty({ids.size(0)}, ScalarType::Bool), rows;
  const auto receive = [&](int64_t n) {
    rows = empty({n, owner->row_bytes()}, ScalarType::Byte);
    return mutable_data<char>(rows);
  };
  owner->get(id_data(ids), ids.size(0), mutable_data<bool>(found), receive, executor());
  return {found, rows};
}

void ssd_put(int64_t store, Tensor ids, Tensor rows) {
  ids = checked_ids(ids);
  const auto owner = ssd_stores().get(store);
  rows = checked(rows, "rows", ScalarType::Byte, 2);
  if (rows.size(0) != ids.size(0) || rows.size(1) != owner->row_bytes()) {
    throw InvalidArgument("rows must be (N, row bytes)");
  }
  owner->put(id_data(ids), static_cast<const char*>(rows.const_data_ptr()), ids.size(0));
}

void ssd_delete(int64_t store, Tensor ids) {
  ids = checked_ids(ids);
  ssd_stores().get(store)->remove(id_data(ids), ids.size(0));
}

Tensor ssd_ids(int64_t store) { return id_tensor(ssd_stores().get(store)->ids()); }

int64_t ssd_scan(int64_t store) { return ssd_scans().add(std::make_shared<SsdScan>(ssd_stores().get(store))); }

// Returns the next ids, at most n, ascending, and their rows, (n, row bytes) uint8.
std::tuple<Tensor, Tensor> ssd_scan_read(int64_t scan, int64_t n) {
  const auto owner = ssd_scans().get(scan);
  n = std::min(std::max(n, int64_t{0}), owner->left());
  Tensor ids = empty({n}, ScalarType::Long), rows = empty({n, owner->row_bytes()}, ScalarType::Byte);
  owner->read(n, mutable_data<int64_t>(ids), mutable_data<char>(rows), executor());
  return {ids, rows};
}

void ssd_scan_close(int64_t scan) { ssd_scans().remove(scan); }

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def("ssd_open(str path, int row_bytes, bool keep) -> int");
  m.def("ssd_dropped(int store) -> int");
  m.def("ssd_close(int store) -> ()");
  m.def("ssd_get(int store, Tensor ids) -> (Tensor, Tensor)");
  m.def("ssd_put(int store, Tensor ids, Tensor rows) -> ()");
  m.def("ssd_delete(int store, Tensor ids) -> ()");
  m.def("ssd_ids(int store) -> Tensor");
  m.def("ssd_scan(int store) -> int");
  m.def("ssd_scan_read(int scan, int n) -> (Tensor, Tensor)");
  m.def("ssd_scan_close(int scan) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("ssd_open", RECSTORE_OP(ssd_open));
  m.impl("ssd_dropped", RECSTORE_OP(ssd_dropped));
  m.impl("ssd_close", RECSTORE_OP(ssd_close));
  m.impl("ssd_ids", RECSTORE_ALLOCATING_OP(ssd_ids));
  m.impl("ssd_scan", RECSTORE_ALLOCATING_OP(ssd_scan));
  m.impl("ssd_scan_read", RECSTORE_ALLOCATING_OP(ssd_scan_read));
  m.impl("ssd_scan_close", RECSTORE_OP(ssd_scan_close));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("ssd_get", RECSTORE_ALLOCATING_OP(ssd_get));
  m.impl("ssd_put", RECSTORE_ALLOCATING_OP(ssd_put));
  m.impl("ssd_delete", RECSTORE_ALLOCATING_OP(ssd_delete));
}
