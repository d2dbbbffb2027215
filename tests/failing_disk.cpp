// Has calls on the files of one folder fail, or kills the process in the middle of one. Preloaded: failing_disk.py.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <string>

// The headers declare the names with and without 64 as the same function, with attributes that differ. So this file
// does not include fcntl.h and sys/stat.h, and declares what it needs.

namespace {

constexpr int kCreate = 0100;          // O_CREAT
constexpr int kTemporary = 020000000;  // the bit of O_TMPFILE
constexpr int kNoError = -1;           // kill instead

struct Plan {
  std::string folder;
  std::string names;  // of the calls, each with a space before and after it
  long first = 0;
  long count = 0;
  int error = 0;
};

Plan plan;
std::atomic<bool> is_armed{false};
std::atomic<long> calls{0};
thread_local bool is_inside = false;

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

bool is_below(const char* path) { return strncmp(path, plan.folder.c_str(), plan.folder.size()) == 0; }

bool is_of_folder(int file) {
  char link[64];
  char target[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t size = ::readlink(link, target, sizeof target - 1);
  if (size <= 0) return false;
  target[size] = 0;
  return is_below(target);
}

// Returns the bytes of about half of a write, up to the end of a page. SIGKILL ends a write between two pages only.
size_t pages_of(size_t n, off_t at) {
  constexpr off_t kPage = 4096;
  const off_t end = (at + static_cast<off_t>(n / 2)) / kPage * kPage;
  return end > at ? static_cast<size_t>(end - at) : 0;
}

enum class Fate { kWorks, kFails, kDies };

Fate fate_of(const char* name) {
  if (plan.names.find(std::string(" ") + name + " ") == std::string::npos) return Fate::kWorks;
  const long number = calls.fetch_add(1);
  if (number < plan.first || number >= plan.first + plan.count) return Fate::kWorks;
  if (plan.error == kNoError) return Fate::kDies;
  return Fate::kFails;
}

Fate fate_of_file(const char* name, int file) {
  if (!is_armed || is_inside) return Fate::kWorks;
  is_inside = true;
  const Fate fate = is_of_folder(file) ? fate_of(name) : Fate::kWorks;
  is_inside = false;
  return fate;
}

Fate fate_of_path(const char* name, const char* path) {
  if (!is_armed || is_inside) return Fate::kWorks;
  is_inside = true;
  const Fate fate = is_below(path) ? fate_of(name) : Fate::kWorks;
  is_inside = false;
  return fate;
}

// Does half of a write before the process dies.
template <class Write>
bool goes_on(Fate fate, const Write& half) {
  if (fate == Fate::kWorks) return true;
  if (fate == Fate::kDies) {
    half();
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  errno = plan.error;
  return false;
}

bool goes_on(Fate fate) {
  return goes_on(fate, [] {});
}

}  // namespace

extern "C" {

// Has the calls `first` to `first + count - 1` fail with an error, or kills the process in the first one (error: -1).
void disk_arm(const char* folder, const char* names, long first, long count, int error) {
  is_armed = false;
  plan = {folder, std::string(" ") + names + " ", first, count, error};
  calls = 0;
  is_armed = true;
}

// Ends the failures. Returns the number of the calls since disk_arm.
long disk_disarm() {
  is_armed = false;
  return calls;
}

long disk_calls() { return calls; }

#define WRITE(name)                                                                         \
  ssize_t name(int file, const void* data, size_t n) {                                      \
    static auto* real = next<ssize_t(int, const void*, size_t)>(#name);                     \
    if (!goes_on(fate_of_file("write", file), [&] { real(file, data, n / 2); })) return -1; \
    return real(file, data, n);                                                             \
  }
WRITE(write)

#define PWRITE(name)                                                                                       \
  ssize_t name(int file, const void* data, size_t n, off_t at) {                                           \
    static auto* real = next<ssize_t(int, const void*, size_t, off_t)>(#name);                             \
    if (!goes_on(fate_of_file("pwrite", file), [&] { real(file, data, pages_of(n, at), at); })) return -1; \
    return real(file, data, n, at);                                                                        \
  }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int file, const iovec* parts, int n) {
  static auto* real = next<ssize_t(int, const iovec*, int)>("writev");
  if (!goes_on(fate_of_file("write", file), [&] { real(file, parts, n / 2); })) return -1;
  return real(file, parts, n);
}

#define PREAD(name)                                                             \
  ssize_t name(int file, void* data, size_t n, off_t at) {                      \
    static auto* real = next<ssize_t(int, void*, size_t, off_t)>(#name);        \
    return goes_on(fate_of_file("pread", file)) ? real(file, data, n, at) : -1; \
  }
PREAD(pread)
PREAD(pread64)

ssize_t read(int file, void* data, size_t n) {
  static auto* real = next<ssize_t(int, void*, size_t)>("read");
  return goes_on(fate_of_file("read", file)) ? real(file, data, n) : -1;
}

#define PREADV(name)                                                              \
  ssize_t name(int file, const iovec* parts, int n, off_t at) {                   \
    static auto* real = next<ssize_t(int, const iovec*, int, off_t)>(#name);      \
    return goes_on(fate_of_file("preadv", file)) ? real(file, parts, n, at) : -1; \
  }
PREADV(preadv)
PREADV(preadv64)

#define PREADV2(name)                                                                    \
  ssize_t name(int file, const iovec* parts, int n, off_t at, int flags) {               \
    static auto* real = next<ssize_t(int, const iovec*, int, off_t, int)>(#name);        \
    return goes_on(fate_of_file("preadv", file)) ? real(file, parts, n, at, flags) : -1; \
  }
PREADV2(preadv2)
PREADV2(preadv64v2)

#define SYNC(name)                                                 \
  int name(int file) {                                             \
    static auto* real = next<int(int)>(#name);                     \
    return goes_on(fate_of_file("fsync", file)) ? real(file) : -1; \
  }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name)                                                       \
  int name(int file, off_t size) {                                           \
    static auto* real = next<int(int, off_t)>(#name);                        \
    return goes_on(fate_of_file("ftruncate", file)) ? real(file, size) : -1; \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ALLOCATE(name)                                                              \
  int name(int file, int mode, off_t at, off_t n) {                                 \
    static auto* real = next<int(int, int, off_t, off_t)>(#name);                   \
    return goes_on(fate_of_file("fallocate", file)) ? real(file, mode, at, n) : -1; \
  }
ALLOCATE(fallocate)
ALLOCATE(fallocate64)

int rename(const char* from, const char* to) noexcept {
  static auto* real = next<int(const char*, const char*)>("rename");
  return goes_on(fate_of_path("rename", to)) ? real(from, to) : -1;
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  static auto* real = next<int(int, const char*, int, const char*, unsigned)>("renameat2");
  return goes_on(fate_of_path("rename", to)) ? real(from_folder, from, to_folder, to, flags) : -1;
}

int mkdir(const char* path, mode_t mode) noexcept {
  static auto* real = next<int(const char*, mode_t)>("mkdir");
  return goes_on(fate_of_path("mkdir", path)) ? real(path, mode) : -1;
}

#define OPEN(name)                                                           \
  int name(const char* path, int flags, ...) {                               \
    static auto* real = next<int(const char*, int, ...)>(#name);             \
    mode_t mode = 0;                                                         \
    if ((flags & (kCreate | kTemporary)) != 0) {                             \
      va_list arguments;                                                     \
      va_start(arguments, flags);                                            \
      mode = va_arg(arguments, mode_t);                                      \
      va_end(arguments);                                                     \
    }                                                                        \
    const char* kind = (flags & kCreate) != 0 ? "create" : "open";           \
    return goes_on(fate_of_path(kind, path)) ? real(path, flags, mode) : -1; \
  }
OPEN(open)
OPEN(open64)

}  // extern "C"
