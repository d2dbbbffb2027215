#pragma once

#include <cstdint>

namespace recstore {

// What a row's weights are stored as; optimizer state is fp32 for each. The native order of ops.py, _ROW_TYPES.
enum class RowType : int64_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// Memory of so many weights, in floats: 16-bit weights are padded so that the state behind them is aligned.
inline int64_t weight_floats(RowType type, int64_t columns) {
  return type == RowType::kFloat32 ? columns : (columns + 1) / 2;
}

}  // namespace recstore
