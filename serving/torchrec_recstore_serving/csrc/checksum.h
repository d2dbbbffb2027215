#pragma once

#include <cstdint>

namespace recstore {

// The checksum of docs/serving.md, continued with `bytes` bytes of data. The first state is 0.
uint64_t checksum_after(uint64_t state, const char* data, int64_t bytes);

}  // namespace recstore
