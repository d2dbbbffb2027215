#include "checksum.h"

#include <algorithm>
#include <cstring>

namespace recstore {
namespace {

constexpr int64_t kBlockBytes = 1 << 19;

uint64_t mixed(uint64_t word, uint64_t number) {
  word += number * 0x9E3779B97F4A7C15u;
  word = (word ^ word >> 32) * 0xff51afd7ed558ccdu;
  word = (word ^ word >> 29) * 0xc4ceb9fe1a85ec53u;
  return word ^ word >> 32;
}

}  // namespace

uint64_t checksum_after(uint64_t state, const char* data, int64_t bytes) {
  for (int64_t first = 0; first < bytes; first += kBlockBytes) {
    const int64_t size = std::min(kBlockBytes, bytes - first);
    uint64_t sum = 0, word = 0, number = 0;
    int64_t at = 0;
    for (; at + 8 <= size; at += 8) {
      std::memcpy(&word, data + first + at, 8);
      sum += mixed(word, ++number);
    }
    if (at < size) {
      word = 0;
      std::memcpy(&word, data + first + at, static_cast<size_t>(size - at));
      sum += mixed(word, ++number);
    }
    state = state * 6364136223846793005u + sum + static_cast<uint64_t>(size);
  }
  return state;
}

}  // namespace recstore
