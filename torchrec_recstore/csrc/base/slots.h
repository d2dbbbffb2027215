#pragma once

#include <cstdint>

namespace recstore {

// The inverse of the 64-bit finaliser of MurmurHash3 (A. Appleby, public domain, fmix64): a bijection that leaves no
// pattern in the low bits. A shift by more than half of the bits is its own inverse, and the factors are the inverses
// modulo 2**64.
constexpr uint64_t unmix(uint64_t x) {
  x = (x ^ (x >> 33)) * 0x9cb4b2f8129337dbU;
  x = (x ^ (x >> 33)) * 0x4f74430c22a54005U;
  return x ^ (x >> 33);
}

// Returns the slot of an id, from 0 to slots - 1. The map of a set of servers gives the server of each slot. Clients in
// every language compute the same slot, so this function never changes.
constexpr int64_t slot_of(int64_t id, int64_t slots) {
  const int64_t slot = static_cast<int64_t>(unmix(static_cast<uint64_t>(id))) % slots;
  return slot < 0 ? slot + slots : slot;
}

static_assert(slot_of(0, 5040) == 0 && slot_of(7, 5040) == 4830 && slot_of(-1, 5040) == 4522 &&
              slot_of(INT64_MAX, 5040) == 964 && slot_of(INT64_MIN, 5040) == 4894);

}  // namespace recstore
