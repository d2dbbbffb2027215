#pragma once

#include <cstdint>
#include <cstring>

namespace recstore {

enum class RowFormat : int64_t { kFloat32 = 0, kFloat16 = 1, kInt8 = 2, kInt4 = 3 };  // FBGEMM's numbers

inline float half_to_float(const char* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof(half));
  const uint32_t magnitude = (half & 0x7FFFu) << 13;
  uint32_t bits = magnitude;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  value *= 0x1p112f;  // the exponents of the two types differ by this; exact, also for denormal numbers
  std::memcpy(&bits, &value, sizeof(bits));
  if ((half & 0x7C00u) == 0x7C00u) bits |= 0x7F800000u;
  bits |= (half & 0x8000u) << 16;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Calls use(column, value) for the columns of a row, in ascending order.
template <RowFormat format, class Use>
void for_each_column(const char* row, int64_t dim, const Use& use) {
  if constexpr (format == RowFormat::kFloat32) {
    const auto* values = reinterpret_cast<const float*>(row);
    for (int64_t c = 0; c < dim; ++c) use(c, values[c]);
  } else {
    const float scale = half_to_float(row), bias = half_to_float(row + 2);
    const auto* bytes = reinterpret_cast<const uint8_t*>(row) + 4;
    if constexpr (format == RowFormat::kInt8) {
      for (int64_t c = 0; c < dim; ++c) use(c, static_cast<float>(bytes[c]) * scale + bias);
    } else {
      for (int64_t c = 0; c < dim; ++c) use(c, static_cast<float>(bytes[c / 2] >> c % 2 * 4 & 15) * scale + bias);
    }
  }
}

}  // namespace recstore
