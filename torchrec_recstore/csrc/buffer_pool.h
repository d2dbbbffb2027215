#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace recstore {

// Memory for outputs, used again step after step: memory that malloc maps afresh costs more in page
// faults than the lookup that fills it. A buffer is back in the pool once nothing refers to it.
class BufferPool {
 public:
  BufferPool() = default;
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // The one of this process. Never destroyed: tensors may outlive every static object.
  static BufferPool& instance();

  // Owns a buffer until it ends.
  class Buffer {
   public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
      swap(other);
      return *this;
    }
    ~Buffer();

    void* data() const { return data_; }

   private:
    friend class BufferPool;
    void swap(Buffer& other) noexcept;

    BufferPool* pool_ = nullptr;
    void* data_ = nullptr;
    size_t bytes_ = 0;
  };

  // The lock is held across a fork, so that the child finds it free and the pool whole.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

  // At least `bytes` uninitialised bytes, aligned to 64. Throws OutOfMemory.
  Buffer take(size_t bytes);

 private:
  struct Free {
    void* data;
    size_t bytes;
    size_t last_use;
  };
  void give_back(void* data, size_t bytes);
  std::vector<Free> remove_idle();

  std::mutex mutex_;
  std::vector<Free> free_;
  size_t clock_ = 0;  // counts the takes
};

}  // namespace recstore
