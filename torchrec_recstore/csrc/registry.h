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
    if (found == objects_.end()) throw InvalidArgument("no open " + kind_ + " has the handle " + std::to_string(handle) + why_missing_);
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

 private:
  std::string kind_;
  std::string why_missing_;
  std::mutex mutex_;
  int64_t next_ = 1;
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
};

}  // namespace recstore
