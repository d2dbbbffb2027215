#include "rows/config.h"

#include "base/error.h"

namespace recstore {

Bounds Bounds::of(const std::vector<int64_t>& numbers) {
  if (numbers.size() != 9) {
    throw InvalidArgument("bounds must have nine numbers, got " + std::to_string(numbers.size()));
  }
  for (const int64_t number : numbers) {
    if (number < 0) throw InvalidArgument("bounds must not be negative, got " + std::to_string(number));
  }
  Bounds bounds;
  bounds.max_rows = numbers[0];
  bounds.eviction = static_cast<Eviction>(numbers[1]);
  if (bounds.eviction == Eviction::kLeastScored) {
    bounds.unscored = static_cast<uint32_t>(numbers[2]);
  } else {
    bounds.half_life = numbers[2];
  }
  bounds.expiry = numbers[3];
  bounds.expiry_time = numbers[4];
  bounds.max_jump = numbers[5];
  bounds.min_frequency = numbers[6];
  bounds.counter_bytes = numbers[7];
  bounds.cold_store = numbers[8] != 0;
  bounds.shared = numbers[8] == 2;
  if (bounds.eviction > Eviction::kLeastScored) throw InvalidArgument("eviction must be from 0 to 4");
  if (numbers[2] > int64_t{0xFFFFFFFF}) throw InvalidArgument("half_life must be at most 2**32 - 1");
  if (bounds.expiry > 0 && bounds.expiry_time > 0) {
    throw InvalidArgument("rows expire after steps or after a time, not both");
  }
  if (bounds.expiry_time > 0 && bounds.max_jump == 0) {
    throw InvalidArgument("rows that expire after a time need a max_jump");
  }
  const bool is_power_of_two = (bounds.counter_bytes & (bounds.counter_bytes - 1)) == 0;
  if (bounds.min_frequency > 1 && (bounds.counter_bytes < 16 || !is_power_of_two)) {
    throw InvalidArgument("counter_bytes must be a power of two, at least 16");
  }
  return bounds;
}

}  // namespace recstore
