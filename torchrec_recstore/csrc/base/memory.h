#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace recstore {

constexpr size_t kMostBytes = size_t{1} << 46;  // more than any machine has; sums of sizes below it do not overflow

// Bytes that this process can still touch before the kernel kills it: the least of the memory that is available on the
// machine and in each of its control groups (version 1 or 2).
// root: precedes every path that is read; tests pass a directory.
size_t available_memory(const std::string& root = "");

// Throws OutOfMemory if this process cannot touch so many more bytes, also after idle buffers have been freed.
void check_available(size_t bytes);

// One growable block of zeroed memory. The kernel commits its pages as they are touched.
//
// To grow, a region reserves a larger address range and moves its page tables there. Beyond the first 512 KiB no byte
// is copied, but data() may change: grow only while no other thread reads. The first 512 KiB use small pages and the
// rest uses huge pages, so that a table of three rows takes little memory and a table of millions of rows few TLB
// entries.
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

  // Makes at least `bytes` addressable. Throws OutOfMemory and changes nothing if the address range or the available
  // memory of the machine does not suffice. Without this check, the kernel would kill the process later.
  void reserve(size_t bytes);
  // Returns the whole pages within [begin, end) to the system. They read as zeros afterwards.
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
  std::vector<size_t> pieces_;  // the end of each reservation: the range consists of these mappings
  size_t promised_ = 0;         // available memory has been checked for this many bytes
};

// Makes room for `count` more elements, so that push_back() cannot fail for them. The capacity grows geometrically.
template <class T>
void reserve_more(std::vector<T>& vector, size_t count) {
  const size_t wanted = vector.size() + count;
  if (wanted > vector.capacity()) vector.reserve(std::max(wanted, 2 * vector.capacity()));
}

}  // namespace recstore
