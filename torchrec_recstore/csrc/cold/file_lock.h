#pragma once

#include <string>

namespace recstore {

// The lock of a file, which one object in one process holds at a time. It is an flock of a file descriptor of its own,
// so that it stays when the process opens and closes the file elsewhere, which would end a POSIX lock. The operating
// system releases it when the process ends for any reason.
//
// A forked child gives up its part in all locks, so that a child that outlives its parent holds none.
class FileLock {
 public:
  // Throws StorageError if the file cannot be opened, or if `refusal` describes why another lock of it is a mistake.
  FileLock(const std::string& path, const std::string& refusal);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  // The handlers of pthread_atfork(), see registry.h.
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

 private:
  int file_ = -1;
};

}  // namespace recstore
