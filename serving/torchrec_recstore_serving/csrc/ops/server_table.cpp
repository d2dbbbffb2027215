// torch.classes.recstore.ServerTable: a table of a served model whose rows are on parameter servers.
#include "server_table.h"

#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "../server_rows.h"
#include "base/error.h"
#include "table_calls.h"

namespace recstore {
namespace {

class RemoteTable final : public torch::CustomClassHolder {
 public:
  // name, dim, data type, servers, whether connections are encrypted
  using Saved = std::tuple<std::string, int64_t, std::string, std::string, bool>;

  explicit RemoteTable(const Saved& saved)
      : saved_(saved), servers_(RowServers::of(std::get<3>(saved), std::get<4>(saved))) {
    std::tie(table_.name, table_.dim, table_.dtype) =
        std::tie(std::get<0>(saved), std::get<1>(saved), std::get<2>(saved));
    TORCH_CHECK_VALUE(table_.dim > 0 && table_.dim <= int64_t{1} << 24, "dim must be from 1 to 2**24");
  }

  Tensor lookup(const Tensor& values) const {
    const Tensor ids = checked_integers(values);
    Tensor out = output(ids.numel(), table_.dim);
    servers_->lookup(table_, ids.const_data_ptr<int64_t>(), ids.numel(), out.mutable_data_ptr<float>());
    return out;
  }

  // The same sums as those of ServedRows::pool.
  Tensor pooled(const Tensor& values, const Tensor& lengths, const std::optional<Tensor>& weights, bool mean) const {
    const Bags given(values, lengths, weights);
    const int64_t bags = given.count(), dim = table_.dim;
    const Tensor rows = output(given.ids(), dim);
    servers_->lookup(table_, given.values(), given.ids(), rows.mutable_data_ptr<float>());
    Tensor out = output(bags, dim).zero_();
    const auto* row = rows.const_data_ptr<float>();
    auto* sum = out.mutable_data_ptr<float>();
    const float* factors = given.factors();
    for (int64_t b = 0; b < bags; ++b, sum += dim) {
      for (int64_t i = given.bounds()[b]; i < given.bounds()[b + 1]; ++i, row += dim) {
        if (factors == nullptr) {
          for (int64_t c = 0; c < dim; ++c) sum[c] += row[c];
        } else {
          for (int64_t c = 0; c < dim; ++c) sum[c] += row[c] * factors[i];
        }
      }
      const auto length = static_cast<float>(std::max<int64_t>(1, given.bounds()[b + 1] - given.bounds()[b]));
      for (int64_t c = 0; mean && c < dim; ++c) sum[c] /= length;
    }
    return out;
  }

  Tensor contains(const Tensor& values) const {
    const Tensor ids = checked_integers(values);
    Tensor found = at::empty({ids.numel()}, at::kBool);
    servers_->contains(table_, ids.const_data_ptr<int64_t>(), ids.numel(), found.mutable_data_ptr<bool>());
    return found;
  }

  c10::intrusive_ptr<Hold> hold() const { return c10::make_intrusive<Hold>(gate_->hold()); }
  c10::intrusive_ptr<Change> change() const { return c10::make_intrusive<Change>(gate_); }
  const Saved& saved() const { return saved_; }
  // What torch.export has to know of a table: see library.py.
  std::tuple<std::tuple<std::string, int64_t>> flattened() const { return {{"dim", table_.dim}}; }

 private:
  Saved saved_;
  ServerTable table_;
  std::shared_ptr<RowServers> servers_;
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
};

}  // namespace

void define_server_table(torch::Library& library) {
  library.class_<RemoteTable>("ServerTable")
      .def(torch::init(
          [](const std::string& name, int64_t dim, const std::string& dtype, const std::string& servers, bool tls) {
            return c10::make_intrusive<RemoteTable>(RemoteTable::Saved{name, dim, dtype, servers, tls});
          }))
      .def("lookup", &RemoteTable::lookup)
      .def("pooled", &RemoteTable::pooled)
      .def("contains", &RemoteTable::contains)
      .def("hold", &RemoteTable::hold)
      .def("change", &RemoteTable::change)
      .def("__obj_flatten__", &RemoteTable::flattened)
      .def_pickle([](const c10::intrusive_ptr<RemoteTable>& self) { return self->saved(); },
                  [](const RemoteTable::Saved& saved) { return c10::make_intrusive<RemoteTable>(saved); });
}

}  // namespace recstore
