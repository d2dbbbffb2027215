#pragma once

#include <cstdint>

#include "buffer_pool.h"
#include "executor.h"
#include "group.h"

namespace recstore {

// A batch's output gradient with the columns of the tables that clip by value kept within
// [-max_gradient, max_gradient], as FBGEMM's gradient_clipping does ahead of its backward: each bag's
// gradient, before anything is summed. The gradient itself where no table of the group clips.
class ClippedGradient {
 public:
  // grad: (bags, columns of the group), contiguous; it must outlive this.
  ClippedGradient(const Group& group, const float* grad, int64_t bags, Executor& executor);

  const float* data() const { return data_; }

 private:
  BufferPool::Buffer buffer_;
  const float* data_;
};

}  // namespace recstore
