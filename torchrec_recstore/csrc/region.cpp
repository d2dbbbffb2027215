#include "region.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

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

// Bytes that this process can still touch before the machine, or its control group, kills it.
size_t available_bytes() {
  size_t available = SIZE_MAX;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) available = size_t{kib} * 1024;
  }
  size_t limit = 0, current = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit && std::ifstream("/sys/fs/cgroup/memory.current") >> current) {
    available = std::min(available, limit > current ? limit - current : 0);
  }
  return available;
}

}  // namespace

Region::~Region() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void Region::reserve(size_t bytes) {
  if (bytes > promised_) {
    const size_t wanted = bytes - promised_;
    if (wanted > available_bytes()) throw OutOfMemory(std::to_string(wanted) + " more bytes are not available on this machine");
  }
  if (bytes > bytes_) grow(bytes);
  promised_ = std::max(promised_, (bytes + kPromise - 1) / kPromise * kPromise);
}

void Region::grow(size_t bytes) {
  const bool small = bytes <= kSmall;
  size_t grown = small ? kSmall : std::max(bytes_, kHugePage);
  while (grown < bytes) grown *= 2;
  char* fresh = map_aligned(grown);
  if (fresh == nullptr) throw OutOfMemory("cannot reserve " + std::to_string(grown) + " bytes");
  if (!small) madvise(fresh, grown, MADV_HUGEPAGE);
  if (bytes_ == kSmall) {
    // Small pages cannot be moved into a huge one: this much, once, is copied.
    std::memcpy(fresh, data_, kSmall);
    munmap(data_, bytes_);
  } else if (data_ != nullptr && mremap(data_, bytes_, bytes_, MREMAP_MAYMOVE | MREMAP_FIXED, fresh) == MAP_FAILED) {
    munmap(fresh, grown);
    throw OutOfMemory("cannot move " + std::to_string(bytes_) + " bytes");
  }
  data_ = fresh;
  bytes_ = grown;
}

void Region::discard(size_t begin, size_t end) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  begin = (begin + page - 1) / page * page;
  end = end / page * page;
  if (begin < end) madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace recstore
