#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "error.h"

namespace recstore {

// Gives native objects integer handles, which is what an op can take. Thread safe. Never destroyed:
// Python objects and tensors may outlive every static object.
template <class T>
class Registry {
 public:
  // why_missing: ends the error about a handle that is unknown.
  explicit Registry(std::string kind, std::string why_missing = "") : kind_(std::move(kind)), why_missing_(std::move(why_missing)) {}

  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_.emplace(next_, std::move(object));
    return next_++;
  }
  std::shared_ptr<T> get(int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) throw_unknown(handle);
    return found->second;
  }
  // The object, which lives on where somebody else still holds it; null where there was none.
  std::shared_ptr<T> remove(int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    auto object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  // The lock is held across a fork, so that the child finds it free and the registry whole. Objects of the parent are
  // refused in the child, and never destroyed there: threads that the child does not have may have held their locks and
  // may have been changing them.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child() {
    new auto(std::move(objects_));
    objects_.clear();
    first_ = next_;
    mutex_.unlock();
  }

 private:
  [[noreturn]] void throw_unknown(int64_t handle) const {
    if (handle < 1 || handle >= first_) {
      throw InvalidArgument("no open " + kind_ + " has the handle " + std::to_string(handle) + why_missing_);
    }
    throw InvalidArgument(
        "it belongs to the process that this process was forked from: start processes with multiprocessing's start method "
        "'spawn' or 'forkserver' (DataLoader: multiprocessing_context='spawn') and make the table there");
  }

  std::string kind_;
  std::string why_missing_;
  std::mutex mutex_;
  int64_t next_ = 1;
  int64_t first_ = 1;  // of this process: lower ones are of the processes that it was forked from
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
};

}  // namespace recstore
