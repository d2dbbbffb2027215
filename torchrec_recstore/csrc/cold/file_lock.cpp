#include "cold/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>

#include "base/error.h"

namespace recstore {
namespace {

// The descriptors of all locks of this process. It is never destroyed, because objects may outlive all static ones.
struct Held {
  std::mutex mutex;
  std::set<int*> files;
};

Held& held() {
  static auto* all = new Held;
  return *all;
}

}  // namespace

FileLock::FileLock(const std::string& path, const std::string& refusal) {
  const std::lock_guard<std::mutex> lock(held().mutex);
  file_ = ::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (file_ < 0) throw StorageError(path + " cannot be opened: " + std::strerror(errno));
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::close(file_);
    if (error == EWOULDBLOCK) throw StorageError(refusal);
    throw StorageError(path + " cannot be locked: " + std::strerror(error));
  }
  held().files.insert(&file_);
}

FileLock::~FileLock() {
  const std::lock_guard<std::mutex> lock(held().mutex);
  held().files.erase(&file_);
  if (file_ >= 0) ::close(file_);
}

void FileLock::before_fork() { held().mutex.lock(); }

void FileLock::after_fork_in_parent() { held().mutex.unlock(); }

void FileLock::after_fork_in_child() {
  for (int* file : held().files) {
    ::close(*file);
    *file = -1;
  }
  held().files.clear();
  held().mutex.unlock();
}

}  // namespace recstore
