#pragma once

#include <cstdint>

namespace recstore {

// Murmur3's 64-bit finaliser (Appleby, MurmurHash3.cpp, fmix64): a bijection that leaves no pattern in the low bits.
constexpr uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdU;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53U;
  return x ^ (x >> 33);
}

// Its inverse: a shift by more than half the bits undoes itself, the factors are the inverses mod 2**64.
constexpr uint64_t unmix(uint64_t x) {
  x = (x ^ (x >> 33)) * 0x9cb4b2f8129337dbU;
  x = (x ^ (x >> 33)) * 0x4f74430c22a54005U;
  return x ^ (x >> 33);
}

static_assert(unmix(mix(0x0123456789abcdefU)) == 0x0123456789abcdefU && mix(unmix(~uint64_t{0})) == ~uint64_t{0});

}  // namespace recstore
