// Philox4x32-10 against the known answers of its authors (Random123, kat_vectors).

#include <cstdint>

#include "rows/philox.h"
#include "testing.h"

int main() {
  uint32_t out[4][1];
  recstore::philox_blocks<1>(0, 0, 0, out);
  const uint32_t zeros[4] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
  for (int w = 0; w < 4; ++w) CHECK(out[w][0] == zeros[w]);

  // Lanes are consecutive counters.
  uint32_t lanes[4][16], single[4][1];
  recstore::philox_blocks<16>(0x0123456789abcdefULL, 0xfedcba9876543210ULL, 5, lanes);
  for (uint32_t lane = 0; lane < 16; ++lane) {
    recstore::philox_blocks<1>(0x0123456789abcdefULL, 0xfedcba9876543210ULL, 5 + lane, single);
    for (int w = 0; w < 4; ++w) CHECK(lanes[w][lane] == single[w][0]);
  }
  std::puts("test_philox passed");
}
