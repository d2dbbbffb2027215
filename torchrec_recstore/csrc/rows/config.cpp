#include "rows/config.h"

#include "base/error.h"

namespace recstore {

InitConfig InitConfig::of(int64_t kind, Fields<double>& numbers) {
  if (kind < 0 || kind > 2) throw InvalidArgument("init must be 0, 1 or 2");
  InitConfig init;
  init.kind = static_cast<InitKind>(kind);
  init.low = numbers.take("init_low");
  init.high = numbers.take("init_high");
  init.mean = numbers.take("init_mean");
  init.standard_deviation = numbers.take("init_std");
  init.truncate_std = numbers.take("init_truncate_std");
  init.value = numbers.take("init_value");
  return init;
}

Bounds Bounds::of(Fields<int64_t>& fields) {
  const auto take = [&](const char* name) {
    const int64_t number = fields.take(name);
    if (number < 0) throw InvalidArgument("bounds must not be negative, got " + std::to_string(number));
    return number;
  };
  const auto take_32_bits = [&](const char* name) {
    const int64_t number = take(name);
    if (number > int64_t{0xFFFFFFFF}) throw InvalidArgument(std::string(name) + " must be at most 2**32 - 1");
    return number;
  };
  Bounds bounds;
  bounds.max_rows = take("max_rows");
  bounds.eviction = static_cast<Eviction>(take("eviction"));
  bounds.half_life = take_32_bits("half_life");
  bounds.unscored = static_cast<uint32_t>(take_32_bits("unscored"));
  bounds.expiry = take("expiry");
  bounds.expiry_time = take("expiry_time");
  bounds.max_jump = take("max_jump");
  bounds.min_frequency = take("min_frequency");
  bounds.counter_bytes = take("counter_bytes");
  bounds.cold_store = take("cold_store") != 0;
  bounds.shared = take("shared") != 0;
  if (bounds.eviction > Eviction::kLeastScored) throw InvalidArgument("eviction must be from 0 to 4");
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
