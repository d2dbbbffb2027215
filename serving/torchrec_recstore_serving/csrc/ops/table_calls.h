#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "../gate.h"
#include "base/buffer_pool.h"

namespace recstore {

using at::Tensor;

inline Tensor checked_integers(const Tensor& values, const char* name = "values") {
  TORCH_CHECK_VALUE(
      values.device().is_cpu() && values.dim() == 1 && at::isIntegralType(values.scalar_type(), /*includeBool=*/false),
      name, " must be integers of shape (N,)");
  return values.to(at::kLong).contiguous();
}

// An output, in memory that is used again when nothing refers to it.
inline Tensor output(int64_t n, int64_t dim) {
  auto buffer =
      std::make_shared<BufferPool::Buffer>(BufferPool::instance().take(tensor_bytes({n, dim}, sizeof(float))));
  void* data = buffer->data();
  return at::from_blob(data, {n, dim}, [buffer](void*) {}, at::TensorOptions(at::kFloat));
}

// The arguments of a table's pooled(): (N,) ids, and (bags,) lengths; weights: (N,), or none.
class Bags {
 public:
  Bags(const Tensor& values, const Tensor& lengths, const std::optional<Tensor>& weights)
      : ids_(checked_integers(values)), offsets_(at::empty({lengths.numel() + 1}, at::kLong)) {
    const Tensor sizes = checked_integers(lengths, "lengths");
    const int64_t bags = sizes.numel();
    auto* bounds = offsets_.mutable_data_ptr<int64_t>();
    const auto* size = sizes.const_data_ptr<int64_t>();
    bounds[0] = 0;
    for (int64_t b = 0; b < bags; ++b) {
      TORCH_CHECK_VALUE(size[b] >= 0 && size[b] <= ids_.numel() - bounds[b],
                        "lengths must not be negative and add up to the number of values");
      bounds[b + 1] = bounds[b] + size[b];
    }
    TORCH_CHECK_VALUE(bounds[bags] == ids_.numel(), "lengths must not be negative and add up to the number of values");
    if (!weights.has_value()) return;
    weights_ = weights->to(at::kFloat).contiguous();
    TORCH_CHECK_VALUE(weights_.dim() == 1 && weights_.numel() == ids_.numel(),
                      "weights must be a number for each value");
  }
  int64_t count() const { return offsets_.numel() - 1; }
  int64_t ids() const { return ids_.numel(); }
  const int64_t* values() const { return ids_.const_data_ptr<int64_t>(); }
  const int64_t* bounds() const { return offsets_.const_data_ptr<int64_t>(); }
  const float* factors() const { return weights_.defined() ? weights_.const_data_ptr<float>() : nullptr; }

 private:
  Tensor ids_, offsets_, weights_;
};

// A call of a model, and a change of it: see Gate. Each ends with release(), or when nothing refers to it.
struct Hold final : torch::CustomClassHolder {
  explicit Hold(std::shared_ptr<Gate::Hold> given) : hold(std::move(given)) {}
  void release() { hold.reset(); }
  std::shared_ptr<Gate::Hold> hold;
};

struct Change final : torch::CustomClassHolder {
  explicit Change(std::shared_ptr<Gate> gate) : change(std::make_unique<Gate::Change>(std::move(gate))) {}
  void commit() { change->commit(); }
  void release() { change.reset(); }
  std::unique_ptr<Gate::Change> change;
};

}  // namespace recstore
