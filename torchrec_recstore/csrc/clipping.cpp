#include "clipping.h"

#include <algorithm>
#include <vector>

#include "table.h"

namespace recstore {
namespace {

struct ClippedColumns {
  int64_t begin;
  int64_t end;
  float bound;
};

std::vector<ClippedColumns> clipped_columns(const Group& group) {
  std::vector<ClippedColumns> clipped;
  for (int64_t f = 0; f < group.features(); ++f) {
    const TableConfig& config = group.tables[group.feature_tables[f]]->config();
    const auto bound = static_cast<float>(config.optimizer.max_gradient);
    const int64_t begin = group.column_offsets[f];
    if (bound > 0.0f) clipped.push_back({begin, begin + config.columns(), bound});
  }
  return clipped;
}

}  // namespace

ClippedGradient::ClippedGradient(const Group& group, const float* grad, int64_t bags, Executor& executor) : data_(grad) {
  const std::vector<ClippedColumns> clipped = clipped_columns(group);
  if (clipped.empty()) return;
  const int64_t columns = group.columns();
  buffer_ = BufferPool::instance().take(static_cast<size_t>(bags * columns) * sizeof(float));
  auto* out = static_cast<float*>(buffer_.data());
  constexpr int64_t kBags = 256;
  for_each_task(executor, (bags + kBags - 1) / kBags, [&](int64_t run) {
    const int64_t last = std::min((run + 1) * kBags, bags);
    std::copy(grad + run * kBags * columns, grad + last * columns, out + run * kBags * columns);
    for (int64_t bag = run * kBags; bag < last; ++bag) {
      for (const ClippedColumns& c : clipped) {
        for (float* x = out + bag * columns + c.begin; x < out + bag * columns + c.end; ++x) {
          *x = *x < -c.bound ? -c.bound : *x > c.bound ? c.bound : *x;  // NaN stays NaN
        }
      }
    }
  });
  data_ = out;
}

}  // namespace recstore
