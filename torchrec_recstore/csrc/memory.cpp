#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "buffer_pool.h"
#include "error.h"

namespace recstore {
namespace {

// The files of one version of control groups, and the lines of memory.stat that count the page cache, which the kernel
// frees first. In version 1 the lines named total_* include the groups below.
struct Files {
  const char* limit;
  const char* usage;
  const char* inactive;
  const char* active;
};
constexpr Files kVersion1{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file %llu", "total_active_file %llu"};
constexpr Files kVersion2{"/memory.max", "/memory.current", "inactive_file %llu", "active_file %llu"};

size_t left_in_group(const std::string& folder, const Files& files) {
  size_t limit = 0, usage = 0;
  if (!(std::ifstream(folder + files.limit) >> limit)) return SIZE_MAX;  // "max", or the container does not see the group
  if (!(std::ifstream(folder + files.usage) >> usage)) return SIZE_MAX;
  std::ifstream stat(folder + "/memory.stat");
  for (std::string line; std::getline(stat, line);) {
    unsigned long long cached = 0;
    if (std::sscanf(line.c_str(), files.inactive, &cached) == 1) usage -= std::min<size_t>(usage, cached);
    if (std::sscanf(line.c_str(), files.active, &cached) == 1) usage -= std::min<size_t>(usage, cached);
  }
  return limit > usage ? limit - usage : 0;
}

// The limits of the groups above a group apply to it too. In a container the path may be that of the host; the root of
// the mount is then the group of the container.
size_t left_in_groups(const std::string& mount, std::string path, const Files& files) {
  size_t left = SIZE_MAX;
  while (!path.empty() && path != "/") {
    left = std::min(left, left_in_group(mount + path, files));
    path.resize(path.rfind('/'));
  }
  return std::min(left, left_in_group(mount, files));
}

bool has_memory(const std::string& controllers) { return ("," + controllers + ",").find(",memory,") != std::string::npos; }

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmall = size_t{512} << 10;  // regions up to this size use small pages
// To ask the system for its available memory takes tens of microseconds, so a region asks once for this much growth.
constexpr size_t kPromise = size_t{64} << 20;

// Returns a new private mapping of `bytes` that is aligned to a huge page, or null.
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

size_t available_memory(const std::string& root) {
  size_t available = SIZE_MAX;
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) available = size_t{kib} * 1024;
  }
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // a line is number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos || line[second + 1] != '/') continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) available = std::min(available, left_in_groups(root + "/sys/fs/cgroup", path, kVersion2));
    if (has_memory(controllers)) {
      available = std::min(available, left_in_groups(root + "/sys/fs/cgroup/memory", path, kVersion1));
    }
  }
  return available;
}

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
  pieces_.reserve(pieces_.size() + 1);  // nothing may fail after pages have been moved
  const bool small = bytes <= kSmall;
  size_t grown = small ? kSmall : std::max(bytes_, kHugePage);
  while (grown < bytes) grown *= 2;
  char* fresh = map_aligned(grown);
  if (fresh == nullptr && BufferPool::instance().free_idle() > 0) fresh = map_aligned(grown);
  if (fresh == nullptr) throw OutOfMemory("cannot reserve " + std::to_string(grown) + " bytes");
  if (!small) madvise(fresh, grown, MADV_HUGEPAGE);
  // Each piece is moved by a call of its own: before Linux 6.17 a call can move the pages of one mapping only.
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
  promised_ = std::min(promised_, begin);  // check available memory again before these pages are touched
}

}  // namespace recstore
