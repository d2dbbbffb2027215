#pragma once

// Functions for all ops: checks of tensor arguments, new tensors, and torch's threads. Only the files in this directory
// include torch. The ops use torch's stable ABI, so that one binary serves several versions of torch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "base/buffer_pool.h"
#include "base/executor.h"
#include "lookup/batch.h"
#include "rows/table.h"
#include "rows/transfer.h"

namespace recstore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Runs work on torch's thread pool.
Executor& executor();
// A read of as many numbers, or of fewer, runs on the calling thread.
inline constexpr int64_t kSmallRead = int64_t{1} << 18;

// The functions named checked_* return the tensor, made contiguous, or throw InvalidArgument.
// name: the name of the argument in the error; dim: the number of dimensions.
Tensor checked(const Tensor& tensor, const char* name, ScalarType dtype, int64_t dim);
// ids: (N,) int64.
Tensor checked_ids(const Tensor& ids);
// rows: (n, columns) float32.
Tensor checked_rows(const Tensor& rows, const char* name, int64_t n, int64_t columns);
// images: (n, image bytes of the table) uint8.
Tensor checked_images(const Tensor& images, const Table& table, int64_t n);

inline const int64_t* id_data(const Tensor& ids) { return static_cast<const int64_t*>(ids.const_data_ptr()); }
inline const float* float_data(const Tensor& values) { return static_cast<const float*>(values.const_data_ptr()); }
template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// A new tensor in memory of torch's allocator.
Tensor empty(const std::vector<int64_t>& shape, ScalarType dtype);
// A new tensor in a buffer of the pool; the buffer returns to the pool with the last reference to the tensor.
Tensor recycled(const std::vector<int64_t>& shape, ScalarType dtype);
Tensor id_tensor(const std::vector<int64_t>& ids);

// Whole rows as tensors: weights (N, weight_numbers()) of weight_type(), element-wise optimizer states (states, N,
// columns) float32, row-wise optimizer state (N,) float32, last step (N,) int64, frequency (N,) int64.
using RowTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
ScalarType weight_type(const Table& table);
// Number of elements of weight_type() in the weights of a row: the columns, or the bytes of an 8-bit row.
int64_t weight_numbers(const Table& table);
RowTensors empty_rows(const Table& table, int64_t n);
RowImages images_of(const RowTensors& rows);

// The batch of a lookup in which each id is a bag of its own.
Batch plain_batch(const Tensor& ids);

// An op that is called again after idle memory was freed, if its first call ran out of memory.
template <auto op>
struct WithIdleMemory;
template <class Result, class... Arguments, Result (*op)(Arguments...)>
struct WithIdleMemory<op> {
  static Result call(const Arguments&... arguments) {
    return with_idle_memory(BufferPool::instance(), [&]() -> Result { return op(arguments...); });
  }
};

}  // namespace recstore

// The kernel of an op, and the kernel of an op that allocates memory.
#define RECSTORE_OP(op) TORCH_BOX(&recstore::op)
#define RECSTORE_ALLOCATING_OP(op) TORCH_BOX(&recstore::WithIdleMemory<&recstore::op>::call)
