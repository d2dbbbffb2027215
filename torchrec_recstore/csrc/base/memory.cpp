#include "base/memory.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/buffer_pool.h"
#include "base/error.h"

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
constexpr Files kVersion1{"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file %llu",
                          "total_active_file %llu"};
constexpr Files kVersion2{"/memory.max", "/memory.current", "inactive_file %llu", "active_file %llu"};

size_t left_in_group(const std::string& folder, const Files& files) {
  size_t limit = 0, usage = 0;
  // "max", or the container does not see the group.
  if (!(std::ifstream(folder + files.limit) >> limit)) return SIZE_MAX;
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

bool has_memory(const std::string& controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmall = size_t{512} << 10;  // regions up to this size use small pages
// To ask the system for its available memory takes tens of microseconds, so a region asks once for this much growth.
constexpr size_t kPromise = size_t{64} << 20;

// A set of NUMA nodes, as the kernel takes it.
struct Nodes {
  static constexpr unsigned long kMost = 1024, kBits = 8 * sizeof(unsigned long);

  void add(unsigned long node) { bits[node / kBits] |= 1ul << node % kBits; }
  bool has(unsigned long node) const { return (bits[node / kBits] >> node % kBits & 1) != 0; }
  int count() const {
    int n = 0;
    for (const unsigned long word : bits) n += __builtin_popcountl(word);
    return n;
  }
  unsigned long bits[kMost / kBits] = {};
};

// Of some nodes, those with a processor that the calling thread may use. All of them if the system does not tell.
Nodes with_own_processors(const Nodes& nodes) {
  cpu_set_t own;
  if (sched_getaffinity(0, sizeof(own), &own) != 0) return nodes;
  Nodes found;
  for (unsigned long node = 0; node < Nodes::kMost; ++node) {
    if (!nodes.has(node)) continue;
    std::ifstream list("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");  // such as 0-15,64-79
    if (!list) return nodes;
    for (std::string range; std::getline(list, range, ',');) {
      int first = 0, last = -1;
      if (std::sscanf(range.c_str(), "%d-%d", &first, &last) == 1) last = first;
      for (int cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) {
        if (CPU_ISSET(cpu, &own)) found.add(node);
      }
    }
  }
  return found;
}

// The nodes over which the pages of regions are spread; empty if a page lies on the node of the thread that uses it
// first.
//
// Any thread reads and updates any row, so that rows have no node of their own. The first use would put the rows that
// one thread makes on one node, such as those that a checkpoint restores, and all threads would then wait for this
// node's memory. A process that numactl has given a policy keeps it, and one that is bound to a node's processors uses
// its memory.
Nodes chosen_nodes() {
  const char* variable = std::getenv("RECSTORE_MEMORY");
  const std::string asked = variable == nullptr ? "" : variable;
  if (asked == "local") return {};
  if (!asked.empty() && asked != "interleave") {
    throw InvalidArgument("RECSTORE_MEMORY must be interleave or local, got '" + asked + "'");
  }
  int policy = MPOL_DEFAULT;
  Nodes nodes;
  const bool known = syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) == 0 &&
                     syscall(SYS_get_mempolicy, nullptr, nodes.bits, Nodes::kMost, nullptr, MPOL_F_MEMS_ALLOWED) == 0;
  if (!asked.empty()) {
    // A container may forbid these calls. Who has not asked for them then has the rows where they are used first.
    void* trial = known ? mmap(nullptr, kHugePage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    const bool works =
        trial != MAP_FAILED && syscall(SYS_mbind, trial, kHugePage, MPOL_INTERLEAVE, nodes.bits, Nodes::kMost, 0) == 0;
    const std::string cause = std::strerror(errno);
    if (trial != MAP_FAILED) munmap(trial, kHugePage);
    if (!works) throw InvalidArgument("RECSTORE_MEMORY is interleave, but the system forbids it: " + cause);
    return nodes;
  }
  if (!known || policy != MPOL_DEFAULT) return {};
  nodes = with_own_processors(nodes);
  return nodes.count() > 1 ? nodes : Nodes{};
}

// Returns a new private mapping of `bytes` that is aligned to a huge page, or null.
char* map_aligned(size_t bytes) {
  void* raw =
      mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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

void check_available(size_t bytes) {
  const bool enough =
      bytes <= available_memory() || (BufferPool::instance().free_idle() > 0 && bytes <= available_memory());
  if (!enough) throw OutOfMemory(std::to_string(bytes) + " more bytes are not available on this machine");
}

Region::~Region() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

void Region::reserve(size_t bytes) {
  if (bytes > kMostBytes) throw OutOfMemory(std::to_string(bytes) + " bytes are more than any machine has");
  if (bytes > promised_) check_available(bytes - promised_);
  if (bytes > bytes_) grow(bytes);
  promised_ = std::max(promised_, (bytes + kPromise - 1) / kPromise * kPromise);
}

void Region::grow(size_t bytes) {
  static const Nodes nodes = chosen_nodes();
  pieces_.reserve(pieces_.size() + 1);  // nothing may fail after pages have been moved
  const bool small = bytes <= kSmall;
  size_t grown = small ? kSmall : std::max(bytes_, kHugePage);
  while (grown < bytes) grown *= 2;
  char* fresh = map_aligned(grown);
  if (fresh == nullptr && BufferPool::instance().free_idle() > 0) fresh = map_aligned(grown);
  if (fresh == nullptr) throw OutOfMemory("cannot reserve " + std::to_string(grown) + " bytes");
  if (nodes.count() > 0) syscall(SYS_mbind, fresh, grown, MPOL_INTERLEAVE, nodes.bits, Nodes::kMost, 0);
  if (!small) madvise(fresh, grown, MADV_HUGEPAGE);
  // Each piece is moved by a call of its own: before Linux 6.17 a call can move the pages of one mapping only.
  size_t begin = 0;
  for (const size_t end : pieces_) {
    char* from = data_ + begin;
    const bool moved =
        bytes_ != kSmall &&  // small pages cannot become part of a huge one
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
