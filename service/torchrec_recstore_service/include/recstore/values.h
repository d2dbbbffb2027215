#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace recstore::detail {

// The value of a number of 16 bits, bfloat16 or IEEE 754's half. The conversion is exact, and keeps NaN a NaN.
inline float of_16_bits(const char* from, bool brain) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  if (!brain) {
    const uint32_t sign = wide & 0x80000000U, exponent = (bits >> 10) & 31U, fraction = bits & 1023U;
    if (exponent == 0) {  // zero, or a subnormal number
      const float value = std::ldexp(static_cast<float>(fraction), -24);
      return sign ? -value : value;
    }
    wide = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
  }
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

}  // namespace recstore::detail
