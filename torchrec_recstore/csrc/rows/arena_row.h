#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/fields.h"
#include "rows/rows.h"

namespace recstore {

// The layout of the rows of an arena, which is memory of a device; see ArenaLayout in kernels/device_interface.py. A
// row of an arena is the row of the host, followed by the row-wise state, if there is one, and by padding.
struct ArenaLayout {
  static constexpr int64_t kAlignment = 4;  // floats

  int64_t columns = 0;
  RowType row_type = RowType::kFloat32;
  OptimizerKind optimizer = OptimizerKind::kSgd;
  int64_t element_states = 0;
  bool has_row_state = false;

  // Takes the fields that have the names above. Throws InvalidArgument if one of them is missing or out of range.
  static ArenaLayout of(Fields<int64_t>& fields) {
    const auto take = [&](const char* name, int64_t least, int64_t most) {
      const int64_t value = fields.take(name);
      if (value < least || value > most) {
        throw InvalidArgument(std::string(name) + " must be from " + std::to_string(least) + " to " +
                              std::to_string(most));
      }
      return value;
    };
    ArenaLayout layout;
    layout.columns = take("columns", 1, int64_t{1} << 24);
    layout.row_type = static_cast<RowType>(take("row_type", 0, static_cast<int64_t>(RowType::kBfloat16)));
    layout.optimizer = static_cast<OptimizerKind>(take("optimizer", 0, kOptimizers - 1));
    layout.element_states = take("element_states", 0, 2);
    layout.has_row_state = take("has_row_state", 0, 1) != 0;
    return layout;
  }
  static ArenaLayout of(const TableConfig& config) {
    ArenaLayout layout;
    layout.columns = config.columns();
    layout.row_type = config.row_type;
    layout.optimizer = config.optimizer.kind;
    layout.element_states = config.optimizer.element_states();
    layout.has_row_state = static_cast<int64_t>(config.optimizer.states().size()) > layout.element_states;
    return layout;
  }

  // Number of floats of a row of the host.
  int64_t host_floats() const { return weight_floats(row_type, columns) + element_states * columns; }
  // Number of floats of a row of the arena.
  int64_t stride() const {
    const int64_t floats = host_floats() + (has_row_state ? 1 : 0);
    return (floats + kAlignment - 1) / kAlignment * kAlignment;
  }
};

// Copies a row of the host to a row of an arena, whose padding becomes zeros, and back. The host's states are float32.
// The bookkeeping of the row (RowMeta) stays as it is.
inline void to_arena(const ArenaLayout& layout, const Rows& rows, Slot slot, float* arena_row) {
  const int64_t floats = layout.host_floats();
  std::memcpy(arena_row, rows.row(slot), static_cast<size_t>(floats) * sizeof(float));
  std::fill(arena_row + floats, arena_row + layout.stride(), 0.0f);
  if (layout.has_row_state) std::memcpy(arena_row + floats, rows.aside(slot), sizeof(float));
}
inline void from_arena(const ArenaLayout& layout, const float* arena_row, const Rows& rows, Slot slot) {
  const int64_t floats = layout.host_floats();
  std::memcpy(rows.row(slot), arena_row, static_cast<size_t>(floats) * sizeof(float));
  if (layout.has_row_state) std::memcpy(rows.aside(slot), arena_row + floats, sizeof(float));
}

}  // namespace recstore
