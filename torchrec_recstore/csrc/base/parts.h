#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace recstore {

// Where the elements of each part begin if n elements are put in the order of their parts. The last one is n.
// part_of(i): the part of an element, less than kParts, for 0 <= i < n.
template <size_t kParts, class PartOf>
std::array<size_t, kParts + 1> part_begins(size_t n, const PartOf& part_of) {
  std::array<size_t, kParts + 1> begins{};
  for (size_t i = 0; i < n; ++i) ++begins[static_cast<size_t>(part_of(i)) + 1];
  for (size_t p = 0; p < kParts; ++p) begins[p + 1] += begins[p];
  return begins;
}

// Returns the elements in the order of their parts; within a part they keep their order.
template <size_t kParts, class T, class PartOf>
std::vector<T> by_part(const std::vector<T>& elements, const PartOf& part_of) {
  auto next = part_begins<kParts>(elements.size(), [&](size_t i) { return part_of(elements[i]); });
  std::vector<T> sorted(elements.size());
  for (const T& element : elements) sorted[next[static_cast<size_t>(part_of(element))]++] = element;
  return sorted;
}

}  // namespace recstore
