#include "sightings.h"

#include <algorithm>
#include <cstring>

#include "mix.h"

namespace recstore {

Sightings::Sightings(int64_t bytes) : cells_(bytes / (kGenerations * kRows)) { memory_.reserve(static_cast<size_t>(bytes)); }

Sightings::Place Sightings::place_of(int64_t id) {
  const uint64_t first = mix(static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15u);
  return {first, mix(first) | 1};
}

uint8_t Sightings::least(int64_t generation, const Place& place) const {
  uint8_t value = 255;
  for (int64_t row = 0; row < kRows; ++row) value = std::min(value, *cell(generation, row, place));
  return value;
}

int64_t Sightings::count(int64_t id) const {
  const Place place = place_of(id);
  return std::min(255, least(0, place) + least(1, place));
}

void Sightings::add(int64_t id) {
  if (taken_ == cells_ / 2) {
    present_ = 1 - present_;
    std::memset(memory_.data() + present_ * kRows * cells_, 0, static_cast<size_t>(kRows * cells_));
    taken_ = 0;
  }
  ++taken_;
  const Place place = place_of(id);
  const uint8_t value = least(present_, place);
  if (value == 255) return;
  for (int64_t row = 0; row < kRows; ++row) {
    uint8_t* one = cell(present_, row, place);
    *one = std::max<uint8_t>(*one, value + 1);
  }
}

void Sightings::read(uint8_t* cells) const {
  const auto size = static_cast<size_t>(kRows * cells_);
  std::memcpy(cells, memory_.data() + static_cast<size_t>(present_) * size, size);
  std::memcpy(cells + size, memory_.data() + static_cast<size_t>(1 - present_) * size, size);
}

void Sightings::write(const uint8_t* cells, int64_t taken) {
  std::memcpy(memory_.data(), cells, static_cast<size_t>(bytes()));
  present_ = 0;
  taken_ = std::min(taken, cells_ / 2);
}

}  // namespace recstore
