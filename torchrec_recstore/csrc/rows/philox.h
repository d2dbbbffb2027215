#pragma once

#include <cstdint>

namespace recstore {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). It computes `Lanes` counters
// at a time, so that the compiler vectorises over them. The counter of a lane has the words id (two words), block +
// lane, and 0. out: [4][Lanes]. The function has internal linkage, because each instruction set compiles its own.
template <int Lanes>
static inline void philox_blocks(uint64_t key, uint64_t id, uint32_t block, uint32_t (*out)[Lanes]) {
  constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u, kW0 = 0x9E3779B9u, kW1 = 0xBB67AE85u;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  uint32_t *c0 = out[0], *c1 = out[1], *c2 = out[2], *c3 = out[3];
  for (int l = 0; l < Lanes; ++l) {
    c0[l] = static_cast<uint32_t>(id);
    c1[l] = static_cast<uint32_t>(id >> 32);
    c2[l] = block + static_cast<uint32_t>(l);
    c3[l] = 0;
  }
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < Lanes; ++l) {
      const uint64_t p0 = uint64_t{kM0} * c0[l];
      const uint64_t p1 = uint64_t{kM1} * c2[l];
      c0[l] = static_cast<uint32_t>(p1 >> 32) ^ c1[l] ^ k0;
      c1[l] = static_cast<uint32_t>(p1);
      c2[l] = static_cast<uint32_t>(p0 >> 32) ^ c3[l] ^ k1;
      c3[l] = static_cast<uint32_t>(p0);
    }
    k0 += kW0;
    k1 += kW1;
  }
}

}  // namespace recstore
