#pragma once

#include <cstdint>

#include "base/slots.h"  // unmix(), the inverse of mix()

namespace recstore {

// The 64-bit finaliser of MurmurHash3 (A. Appleby, public domain, fmix64): a bijection that leaves no pattern in the
// low bits.
constexpr uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdU;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53U;
  return x ^ (x >> 33);
}

static_assert(unmix(mix(0x0123456789abcdefU)) == 0x0123456789abcdefU && mix(unmix(~uint64_t{0})) == ~uint64_t{0});

}  // namespace recstore
