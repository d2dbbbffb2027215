#pragma once

#include <mutex>
#include <shared_mutex>

namespace recstore {

// The lock of a table: many readers share it, or one writer has it alone. It is not recursive: a thread that shares it
// and asks for it again may wait for a writer that waits for this thread.
//
// Readers and writers pass one turnstile. Whoever has to wait for the table waits in the turnstile, and holds up those
// that come later. A writer therefore waits for the readers that are inside, and not for later ones, so that a stream
// of readers does not starve it. A reader waits for the writer that is inside and for those before it in the turnstile,
// so that a writer that returns at once does not overtake it. Neither std::shared_mutex alone (glibc prefers readers)
// nor PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP (a stream of writers starves readers) has both properties.
class TableMutex {
 public:
  void lock() {
    const std::lock_guard<std::mutex> turn(turnstile_);
    inside_.lock();
  }
  bool try_lock() {
    const std::unique_lock<std::mutex> turn(turnstile_, std::try_to_lock);
    return turn.owns_lock() && inside_.try_lock();
  }
  void unlock() { inside_.unlock(); }

  void lock_shared() {
    const std::lock_guard<std::mutex> turn(turnstile_);
    inside_.lock_shared();
  }
  bool try_lock_shared() {
    const std::unique_lock<std::mutex> turn(turnstile_, std::try_to_lock);
    return turn.owns_lock() && inside_.try_lock_shared();
  }
  void unlock_shared() { inside_.unlock_shared(); }

  // Calls work() with the lock held alone, and then shares it. No other writer has it in between.
  template <class Work>
  void lock_shared_after(const Work& work) {
    const std::lock_guard<std::mutex> turn(turnstile_);
    {
      const std::lock_guard<std::shared_mutex> alone(inside_);
      work();
    }
    inside_.lock_shared();
  }

 private:
  std::mutex turnstile_;
  std::shared_mutex inside_;
};

}  // namespace recstore
