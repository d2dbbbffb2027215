#include "ops/tensors.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"

namespace recstore {
namespace {

torch::stable::Device cpu() { return torch::stable::Device(torch::headeronly::DeviceType::CPU); }

int64_t element_bytes(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Long: return 8;
    case ScalarType::Float: return 4;
    case ScalarType::Byte: return 1;
    default: return 2;
  }
}

}  // namespace

Tensor checked(const Tensor& tensor, const char* name, ScalarType dtype, int64_t dim) {
  if (!tensor.is_cpu()) throw InvalidArgument(std::string(name) + " must be on the CPU");
  if (tensor.scalar_type() != dtype) {
    const char* wanted = dtype == ScalarType::Long ? "int64" : dtype == ScalarType::Byte ? "uint8" : "float32";
    throw InvalidArgument(std::string(name) + " must be of dtype " + wanted);
  }
  if (tensor.dim() != dim) {
    throw InvalidArgument(std::string(name) + " must have " + std::to_string(dim) + " dimensions");
  }
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

Tensor checked_ids(const Tensor& ids) { return checked(ids, "ids", ScalarType::Long, 1); }

Tensor checked_rows(const Tensor& rows, const char* name, int64_t n, int64_t columns) {
  Tensor out = checked(rows, name, ScalarType::Float, 2);
  if (out.size(0) != n || out.size(1) != columns) {
    throw InvalidArgument(std::string(name) + " must have the shape (" + std::to_string(n) + ", " +
                          std::to_string(columns) + ")");
  }
  return out;
}

Tensor checked_images(const Tensor& images, const Table& table, int64_t n) {
  Tensor out = checked(images, "images", ScalarType::Byte, 2);
  if (out.size(0) != n || out.size(1) != table.image_bytes()) {
    throw InvalidArgument("images must have the shape (" + std::to_string(n) + ", " +
                          std::to_string(table.image_bytes()) + ")");
  }
  return out;
}

Tensor empty(const std::vector<int64_t>& shape, ScalarType dtype) {
  return torch::stable::empty(shape, dtype, std::nullopt, cpu());
}

Tensor recycled(const std::vector<int64_t>& shape, ScalarType dtype) {
  auto buffer = BufferPool::instance().take(tensor_bytes(shape, element_bytes(dtype)));
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(shape[d], 1);
  }
  void* data = buffer.data();
  return torch::stable::from_blob(data, shape, strides, cpu(), dtype, [owned = std::move(buffer)](void*) {});
}

Tensor id_tensor(const std::vector<int64_t>& ids) {
  Tensor out = empty({static_cast<int64_t>(ids.size())}, ScalarType::Long);
  std::copy(ids.begin(), ids.end(), mutable_data<int64_t>(out));
  return out;
}

ScalarType weight_type(const Table& table) {
  switch (table.config().row_type) {
    case RowType::kFloat16: return ScalarType::Half;
    case RowType::kBfloat16: return ScalarType::BFloat16;
    case RowType::kInt8: return ScalarType::Byte;
    case RowType::kFloat32: break;
  }
  return ScalarType::Float;
}

int64_t weight_numbers(const Table& table) {
  const int64_t columns = table.config().columns();
  return table.config().row_type == RowType::kInt8 ? weight_bytes(RowType::kInt8, columns) : columns;
}

RowTensors empty_rows(const Table& table, int64_t n) {
  const int64_t columns = table.config().columns(), states = table.config().optimizer.element_states();
  return {recycled({n, weight_numbers(table)}, weight_type(table)), recycled({states, n, columns}, ScalarType::Float),
          recycled({n}, ScalarType::Float), recycled({n}, ScalarType::Long), recycled({n}, ScalarType::Long)};
}

RowImages images_of(const RowTensors& rows) {
  const auto& [weights, elements, state, last_step, frequency] = rows;
  RowImages images{weights.mutable_data_ptr(),
                   {},
                   mutable_data<float>(state),
                   mutable_data<int64_t>(last_step),
                   mutable_data<int64_t>(frequency)};
  for (int64_t e = 0; e < elements.size(0); ++e) {
    images.elements.push_back(mutable_data<float>(elements) + e * elements.size(1) * elements.size(2));
  }
  return images;
}

Batch plain_batch(const Tensor& ids) {
  Batch batch;
  batch.ids = id_data(ids);
  batch.n_ids = batch.bags = ids.size(0);
  return batch;
}

}  // namespace recstore
