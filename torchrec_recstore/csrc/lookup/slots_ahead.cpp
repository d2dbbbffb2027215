#include "lookup/slots_ahead.h"

#include <algorithm>
#include <utility>

namespace recstore {

SlotsAhead::SlotsAhead(const int64_t* given_ids, int64_t n, std::vector<int64_t> feature_counts, size_t tables)
    : n_ids(n),
      counts(std::move(feature_counts)),
      stamps(tables, 0),
      ids(BufferPool::instance().take(static_cast<size_t>(n) * sizeof(int64_t))),
      slots(BufferPool::instance().take(static_cast<size_t>(n) * sizeof(Slot))) {
  std::copy_n(given_ids, n, static_cast<int64_t*>(ids.data()));
}

bool SlotsAhead::resembles(const Batch& batch) const {
  constexpr int64_t kSamples = 32;
  if (batch.n_ids != n_ids) return false;
  int64_t begin = 0;
  for (size_t f = 0; f < counts.size(); ++f) {
    if (batch.offset(static_cast<int64_t>(f) * batch.bags) != begin) return false;
    begin += counts[f];
  }
  const int64_t stride = std::max<int64_t>(1, n_ids / kSamples);
  for (int64_t i = n_ids - 1; i >= 0; i -= stride) {
    if (batch.ids[i] != id_data()[i]) return false;
  }
  return true;
}

void ComingBatches::add(std::unique_ptr<SlotsAhead> batch) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (coming_.size() == kMost) coming_.erase(coming_.begin());
  coming_.push_back({std::move(batch), 0});
}

std::unique_ptr<SlotsAhead> ComingBatches::take(const Batch& batch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto coming = coming_.begin(); coming != coming_.end(); ++coming) {
    if (!coming->batch->resembles(batch)) continue;
    std::unique_ptr<SlotsAhead> found = std::move(coming->batch);
    coming_.erase(coming_.begin(), coming + 1);
    return found;
  }
  coming_.erase(std::remove_if(coming_.begin(), coming_.end(), [](Coming& c) { return ++c.passed_over == kMost; }),
                coming_.end());
  return nullptr;
}

StaleSlots::StaleSlots(const Vacated& vacated, Vacated::Stamp stamp) : all_(!vacated.knows(stamp)) {
  constexpr int64_t kBitsForSlot = 16;
  if (all_ || vacated.since(stamp) == 0) return;
  uint64_t bits = 64;
  while (bits < static_cast<uint64_t>(kBitsForSlot * vacated.since(stamp))) bits *= 2;
  bits = std::min(bits, uint64_t{1} << 32);
  mask_ = static_cast<Slot>(bits - 1);
  bits_.assign(bits / 64, 0);
  vacated.for_each_since(stamp, [&](Slot slot) { bits_[(slot & mask_) / 64] |= uint64_t{1} << (slot % 64); });
}

}  // namespace recstore
