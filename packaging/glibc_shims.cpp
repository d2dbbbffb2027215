// The functions of glibc that GCC's code uses and that systems of manylinux_2_28 do not have: build_wheels.py links
// them into the libraries of the wheels. They are hidden, so that no other library gets them.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

extern "C" {

// glibc 2.32: whether the process has one thread. Counts of references are then not atomic, so "no" is always right.
char __libc_single_threaded = 0;

// glibc 2.33. Before, the headers called these functions with the version of the struct.
#ifdef __x86_64__
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif
[[gnu::visibility("default")]] int __xstat(int version, const char* path, struct stat* status);
[[gnu::visibility("default")]] int __lxstat(int version, const char* path, struct stat* status);
[[gnu::visibility("default")]] int __fxstat(int version, int file, struct stat* status);
[[gnu::visibility("default")]] int __fxstatat(int version, int folder, const char* path, struct stat* status,
                                              int flags);
int stat(const char* path, struct stat* status) noexcept { return __xstat(kStatVersion, path, status); }
int lstat(const char* path, struct stat* status) noexcept { return __lxstat(kStatVersion, path, status); }
int fstat(int file, struct stat* status) noexcept { return __fxstat(kStatVersion, file, status); }
int fstatat(int folder, const char* path, struct stat* status, int flags) noexcept {
  return __fxstatat(kStatVersion, folder, path, status, flags);
}

// glibc 2.30. Without it, a wait ends at a time of the wall clock, which somebody may set meanwhile.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  using Wait = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const Wait wait = reinterpret_cast<Wait>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (wait != nullptr) return wait(condition, mutex, clock, until);
  timespec now, wall;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &wall);
  wall.tv_sec += until->tv_sec - now.tv_sec;
  wall.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (wall.tv_nsec < 0) --wall.tv_sec, wall.tv_nsec += 1000000000;
  if (wall.tv_nsec >= 1000000000) ++wall.tv_sec, wall.tv_nsec -= 1000000000;
  return pthread_cond_timedwait(condition, mutex, &wall);
}
}
