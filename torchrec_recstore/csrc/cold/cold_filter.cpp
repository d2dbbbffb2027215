#include "cold/cold_filter.h"

#include <algorithm>
#include <utility>

#include "base/mix.h"

namespace recstore {
namespace {

constexpr int64_t kLeastIds = 1 << 12;
constexpr int64_t kBlockIds = 64;  // ids of a block of 512 bits
constexpr int kBits = 6;           // bits that an id sets

}  // namespace

ColdFilter::ColdFilter(int64_t ids) : first_ids_(std::max(ids, kLeastIds)) {}

ColdFilter::Mask ColdFilter::mask_of(uint64_t hash) {
  Mask mask{};
  uint64_t bits = mix(hash ^ 0x9E3779B97F4A7C15u);
  for (int b = 0; b < kBits; ++b, bits >>= 9) mask.words[(bits >> 6) & 7] |= uint64_t{1} << (bits & 63);
  return mask;
}

uint64_t* ColdFilter::block_of(const Level& level, uint64_t hash) {
  const auto block =
      static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * static_cast<uint64_t>(level.blocks)) >> 64);
  return reinterpret_cast<uint64_t*>(level.memory.data()) + block * kBlockWords;
}

void ColdFilter::reserve(std::vector<Level>& levels, const int64_t* ids, int64_t n) const {
  int64_t room = 0;
  for (const Level& level : levels) room += level.blocks * kBlockIds - level.ids;
  const int64_t fresh = std::count_if(ids, ids + n, [&](int64_t id) { return !contains(levels, id); });
  while (room < fresh) {
    Level level;
    level.blocks = ((first_ids_ << levels.size()) + kBlockIds - 1) / kBlockIds;
    level.memory.reserve(static_cast<size_t>(level.blocks) * kBlockWords * sizeof(uint64_t));
    room += level.blocks * kBlockIds;
    levels.push_back(std::move(level));
  }
}

void ColdFilter::add(std::vector<Level>& levels, const int64_t* ids, int64_t n) noexcept {
  std::for_each(ids, ids + n, [&](int64_t id) {
    if (contains(levels, id)) return;
    Level& level =
        *std::find_if(levels.begin(), levels.end(), [](const Level& one) { return one.ids < one.blocks * kBlockIds; });
    const uint64_t hash = mix(static_cast<uint64_t>(id));
    const Mask mask = mask_of(hash);
    uint64_t* block = block_of(level, hash);
    for (int64_t w = 0; w < kBlockWords; ++w) block[w] |= mask.words[w];
    ++level.ids;
  });
}

bool ColdFilter::contains(const std::vector<Level>& levels, int64_t id) {
  const uint64_t hash = mix(static_cast<uint64_t>(id));
  const Mask mask = mask_of(hash);
  return std::any_of(levels.begin(), levels.end(), [&](const Level& level) {
    const uint64_t* block = block_of(level, hash);
    uint64_t absent = 0;
    for (int64_t w = 0; w < kBlockWords; ++w) absent |= mask.words[w] & ~block[w];
    return absent == 0;
  });
}

void ColdFilter::add(const int64_t* ids, int64_t n) {
  reserve(levels_, ids, n);
  if (renewing_) keep(ids, n);
  add(levels_, ids, n);
}

void ColdFilter::clear() {
  levels_.clear();
  next_.clear();
  renewing_ = false;
}

void ColdFilter::begin_renewal() {
  next_.clear();
  renewing_ = true;
}

void ColdFilter::keep(const int64_t* ids, int64_t n) {
  reserve(next_, ids, n);
  add(next_, ids, n);
}

void ColdFilter::end_renewal() {
  levels_ = std::exchange(next_, {});
  renewing_ = false;
}

int64_t ColdFilter::bytes() const {
  int64_t blocks = 0;
  for (const Level& level : levels_) blocks += level.blocks;
  for (const Level& level : next_) blocks += level.blocks;
  return blocks * kBlockWords * static_cast<int64_t>(sizeof(uint64_t));
}

}  // namespace recstore
