#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace recstore {

// Makes room for `count` more elements, so that push_back() cannot fail for them; room grows geometrically.
template <class T>
void reserve_more(std::vector<T>& vector, size_t count) {
  const size_t wanted = vector.size() + count;
  if (wanted > vector.capacity()) vector.reserve(std::max(wanted, 2 * vector.capacity()));
}

}  // namespace recstore
