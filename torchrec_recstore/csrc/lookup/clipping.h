#pragma once

#include <cstdint>

#include "base/buffer_pool.h"
#include "base/executor.h"
#include "lookup/group.h"

namespace recstore {

// The output gradient of a batch, clipped by value: in the columns of tables with max_gradient, each bag's gradient is
// limited to [-max_gradient, max_gradient] before gradients are summed. FBGEMM's gradient_clipping does the same. If no
// table of the group clips, this is the gradient itself. Before that, the columns of tables with Nonfinite::kRaise are
// checked.
class ClippedGradient {
 public:
  // grad: (bags, columns of the group), contiguous. It must outlive this object. Throws InvalidArgument if a table with
  // Nonfinite::kRaise has a gradient that is not finite.
  ClippedGradient(const Group& group, const float* grad, int64_t bags, Executor& executor);

  const float* data() const { return data_; }

 private:
  BufferPool::Buffer buffer_;
  const float* data_;
};

}  // namespace recstore
