#include "region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "available_memory.h"
#include "buffer_pool.h"
#include "error.h"

namespace recstore {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmall = size_t{512} << 10;  // up to here small pages are used
// Asking the system what is available costs tens of microseconds: ask once for this much growth.
constexpr size_t kPromise = size_t{64} << 20;

// A fresh private mapping of `bytes` that begins on a huge page's border.
char* map_aligned(size_t bytes) {
  void* raw = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (begin + kHugePage - 1) & ~(kHugePage - 1);
  if (aligned > begin) munmap(raw, aligned - begin);
  const uintptr_t end = begin + bytes + kHugePage;
  if (end > aligned + bytes) munmap(reinterpret_cast<void*>(aligned + bytes), end - aligned - bytes);
  return reinterpret_cast<char*>(aligned);
}

}  // namespace

Region::~Region() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void Region::reserve(size_t bytes) {
  if (bytes > kMostBytes) throw OutOfMemory(std::to_string(bytes) + " bytes are more than any machine has");
  if (bytes > promised_) {
    const size_t wanted = bytes - promised_;
    const bool enough = wanted <= available_memory() || (BufferPool::instance().free_idle() > 0 && wanted <= available_memory());
    if (!enough) throw OutOfMemory(std::to_string(wanted) + " more bytes are not available on this machine");
  }
  if (bytes > bytes_) grow(bytes);
  promised_ = std::max(promised_, (bytes + kPromise - 1) / kPromise * kPromise);
}

void Region::grow(size_t bytes) {
  pieces_.reserve(pieces_.size() + 1);  // nothing may fail once pages have been moved
  const bool small = bytes <= kSmall;
  size_t grown = small ? kSmall : std::max(bytes_, kHugePage);
  while (grown < bytes) grown *= 2;
  char* fresh = map_aligned(grown);
  if (fresh == nullptr && BufferPool::instance().free_idle() > 0) fresh = map_aligned(grown);
  if (fresh == nullptr) throw OutOfMemory("cannot reserve " + std::to_string(grown) + " bytes");
  if (!small) madvise(fresh, grown, MADV_HUGEPAGE);
  // Piece by piece, as the range has grown: before Linux 6.17 a call moves pages of one mapping only.
  size_t begin = 0;
  for (const size_t end : pieces_) {
    char* from = data_ + begin;
    const bool moved = bytes_ != kSmall &&  // small pages cannot become part of a huge one
                       mremap(from, end - begin, end - begin, MREMAP_MAYMOVE | MREMAP_FIXED, fresh + begin) != MAP_FAILED;
    if (!moved) {
      std::memcpy(fresh + begin, from, end - begin);
      munmap(from, end - begin);
    }
    begin = end;
  }
  pieces_.push_back(grown);
  data_ = fresh;
  bytes_ = grown;
}

void Region::discard(size_t begin, size_t end) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  begin = (begin + page - 1) / page * page;
  end = end / page * page;
  if (begin >= end) return;
  madvise(data_ + begin, end - begin, MADV_DONTNEED);
  promised_ = std::min(promised_, begin);  // ask again before it is touched again
}

}  // namespace recstore
