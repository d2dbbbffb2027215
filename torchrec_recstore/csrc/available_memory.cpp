#include "available_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>

namespace recstore {
namespace {

// The names of one version's files, and of the lines of memory.stat that count pages of files, which the kernel gives up
// first. Version 1 counts those of groups below in lines of their own.
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
  if (!(std::ifstream(folder + files.limit) >> limit)) return SIZE_MAX;  // "max", or no such group in this container
  if (!(std::ifstream(folder + files.usage) >> usage)) return SIZE_MAX;
  std::ifstream stat(folder + "/memory.stat");
  for (std::string line; std::getline(stat, line);) {
    unsigned long long cached = 0;
    if (std::sscanf(line.c_str(), files.inactive, &cached) == 1) usage -= std::min<size_t>(usage, cached);
    if (std::sscanf(line.c_str(), files.active, &cached) == 1) usage -= std::min<size_t>(usage, cached);
  }
  return limit > usage ? limit - usage : 0;
}

// A group is bound by those above it too. In a container the path may be the host's: then the mount is the container's.
size_t left_in_groups(const std::string& mount, std::string path, const Files& files) {
  size_t left = SIZE_MAX;
  while (!path.empty() && path != "/") {
    left = std::min(left, left_in_group(mount + path, files));
    path.resize(path.rfind('/'));
  }
  return std::min(left, left_in_group(mount, files));
}

bool has_memory(const std::string& controllers) { return ("," + controllers + ",").find(",memory,") != std::string::npos; }

}  // namespace

size_t available_memory(const std::string& root) {
  size_t available = SIZE_MAX;
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) available = size_t{kib} * 1024;
  }
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // number:controllers:path
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

}  // namespace recstore
