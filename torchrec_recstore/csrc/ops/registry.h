#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"

namespace recstore {

// Gives native objects integer handles, because an op cannot take a pointer. Thread-safe.
template <class T>
class Registry {
 public:
  // kind: the name of such an object in an error. why_missing: the end of the error for an unknown handle.
  explicit Registry(std::string kind, std::string why_missing = "")
      : kind_(std::move(kind)), why_missing_(std::move(why_missing)) {}

  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> lock(mutex_);
    objects_.emplace(next_, std::move(object));
    return next_++;
  }
  // Throws InvalidArgument if the handle is unknown.
  std::shared_ptr<T> get(int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) throw_unknown(handle);
    return found->second;
  }
  // Forgets the handle. Returns its object, which lives on as long as somebody holds it; null for an unknown handle.
  std::shared_ptr<T> remove(int64_t handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    auto object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  // The lock is held during a fork, so that the child finds it free and the registry complete. The child refuses the
  // parent's objects and never destroys them: threads that do not exist in the child may have held their locks, and may
  // have been changing them.
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
        "the " + kind_ +
        " was made before this process was forked, and a forked process cannot use it: start processes with "
        "multiprocessing's start method 'spawn' or 'forkserver' (DataLoader: multiprocessing_context='spawn') and make "
        "the "
        "table there");
  }

  std::string kind_;
  std::string why_missing_;
  std::mutex mutex_;
  int64_t next_ = 1;
  int64_t first_ = 1;  // the first handle of this process; lower handles belong to the processes it was forked from
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
};

// Registers objects, and removes their handles when it is destroyed. The objects' handles can be lent to a tensor:
// data() is a copy, because a compiled graph may overwrite the memory of a tensor after its last use.
template <class T>
class OwnedHandles {
 public:
  // The registry must outlive this object.
  OwnedHandles(Registry<T>& registry, std::vector<std::shared_ptr<T>> objects) : registry_(registry) {
    handles_.reserve(objects.size());
    for (auto& object : objects) handles_.push_back(registry_.add(std::move(object)));
    data_ = handles_;
  }
  OwnedHandles(const OwnedHandles&) = delete;
  OwnedHandles& operator=(const OwnedHandles&) = delete;
  ~OwnedHandles() {
    for (const int64_t handle : handles_) registry_.remove(handle);
  }

  int64_t* data() { return data_.data(); }
  int64_t size() const { return static_cast<int64_t>(handles_.size()); }

 private:
  Registry<T>& registry_;
  std::vector<int64_t> handles_;
  std::vector<int64_t> data_;
};

class Table;
struct Group;
class Pass;
class Snapshot;
class SsdScan;
class SsdStore;

// The registries of this process. They are never destroyed, because Python objects and tensors may outlive all static
// objects.
Registry<Table>& tables();
Registry<const Group>& groups();
Registry<Pass>& passes();
Registry<Snapshot>& snapshots();
Registry<SsdStore>& ssd_stores();
Registry<SsdScan>& ssd_scans();

// The handlers that pthread_atfork() takes, for the registries, the buffer pool and the locks of files. Tables belong
// to the process that made them. Without the handlers, a process that is forked while another thread uses a table would
// wait forever for the locks that this thread held, at the latest when it frees a tensor.
void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

}  // namespace recstore
