#include "lookup/clipping.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "rows/table.h"

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

constexpr int64_t kBags = 256;  // of a task

// Whether all n numbers are finite. Bits are compared, so that the loop has no branch and no dependence on the order.
bool is_finite(const float* x, int64_t n) {
  uint32_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    found |= static_cast<uint32_t>((bits & 0x7F800000u) == 0x7F800000u);
  }
  return found == 0;
}

void check_finite(const Group& group, const float* grad, int64_t bags, Executor& executor) {
  std::vector<int64_t> checked;
  for (int64_t f = 0; f < group.features(); ++f) {
    if (group.tables[group.feature_tables[f]]->config().nonfinite == Nonfinite::kRaise) checked.push_back(f);
  }
  if (checked.empty()) return;
  std::atomic<bool> all_finite{true};
  const auto check = [&](int64_t f, int64_t bag) {
    const int64_t begin = group.column_offsets[f];
    return is_finite(grad + bag * group.columns() + begin, group.column_offsets[f + 1] - begin);
  };
  for_each_task(executor, (bags + kBags - 1) / kBags, [&](int64_t run) {
    for (int64_t bag = run * kBags; bag < std::min((run + 1) * kBags, bags); ++bag) {
      for (const int64_t f : checked) {
        if (!check(f, bag)) all_finite.store(false, std::memory_order_relaxed);
      }
    }
  });
  if (all_finite.load(std::memory_order_relaxed)) return;
  for (const int64_t f : checked) {
    for (int64_t bag = 0; bag < bags; ++bag) {
      if (check(f, bag)) continue;
      throw InvalidArgument(
          "table '" + group.tables[group.feature_tables[f]]->config().name +
          "': a gradient is NaN or infinite, and nonfinite='raise': no row was changed. Clip the gradients "
          "of the dense part, lower the learning rate, or set TableOptions(nonfinite='skip')");
    }
  }
}

}  // namespace

ClippedGradient::ClippedGradient(const Group& group, const float* grad, int64_t bags, Executor& executor)
    : data_(grad) {
  check_finite(group, grad, bags, executor);
  const std::vector<ClippedColumns> clipped = clipped_columns(group);
  if (clipped.empty()) return;
  const int64_t columns = group.columns();
  buffer_ = BufferPool::instance().take(static_cast<size_t>(bags * columns) * sizeof(float));
  auto* out = static_cast<float*>(buffer_.data());
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
