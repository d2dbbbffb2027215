#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace recstore {

constexpr size_t kMostBytes = size_t{1} << 46;  // more than any machine has; sums below it do not overflow

// One growable block of zeroed memory that the kernel hands out page by page as it is touched.
//
// Growing reserves a larger address range and moves the page tables there: beyond the first half MiB
// no byte is copied, but data() may change: grow only while nobody reads. That half MiB is in small
// pages and the rest in huge ones, so that a table of three rows takes little memory and a table of
// millions few TLB entries.
class Region {
 public:
  Region() = default;
  ~Region();
  Region(Region&& other) noexcept { swap(other); }
  Region& operator=(Region&& other) noexcept {
    swap(other);
    return *this;
  }

  char* data() const { return data_; }
  size_t reserved_bytes() const { return bytes_; }

  // Makes at least `bytes` addressable. Throws OutOfMemory and changes nothing where the address range
  // or the machine's available memory does not suffice: a process that touches more is killed.
  void reserve(size_t bytes);
  // Gives the whole pages within [begin, end) back to the system; they read as zeros afterwards.
  void discard(size_t begin, size_t end);

 private:
  void grow(size_t bytes);
  void swap(Region& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(pieces_, other.pieces_);
    std::swap(promised_, other.promised_);
  }

  char* data_ = nullptr;
  size_t bytes_ = 0;
  std::vector<size_t> pieces_;  // where each reservation ended: the mappings that the range consists of
  size_t promised_ = 0;  // bytes for which available memory has been looked at
};

}  // namespace recstore
