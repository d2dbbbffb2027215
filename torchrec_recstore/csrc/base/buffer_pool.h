#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#include "base/error.h"

namespace recstore {

// Reuses the memory of outputs in every step. Memory that malloc maps anew in each step costs more in page faults than
// the lookup that fills it. A buffer returns to the pool when nothing refers to it any more.
//
// A bound limits the idle memory. It is small at first, and it rises when the pool has to allocate memory that the
// bound made it free shortly before. A buffer that stays idle for many takes is freed, and the bound falls by its size.
class BufferPool {
 public:
  BufferPool() = default;
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // The pool of this process. It is never destroyed, because tensors may outlive all static objects.
  static BufferPool& instance();

  // Owns a buffer, and returns it to the pool when it is destroyed.
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

  // The lock is held during a fork, so that the child finds it free and the pool complete.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

  // Returns a buffer of at least `bytes` uninitialised bytes, aligned to 64. Throws OutOfMemory.
  Buffer take(size_t bytes);
  // Frees every idle buffer and returns their total size. Call it before an allocation fails for lack of memory.
  size_t free_idle() noexcept;

  struct Bytes {
    size_t used;
    size_t idle;
    size_t most_idle;  // the bound on idle bytes
  };
  Bytes bytes();

 private:
  struct Free {
    void* data;
    size_t bytes;
    size_t last_use;
  };
  static constexpr size_t kLeastIdle = size_t{64} << 20;

  void give_back(void* data, size_t bytes) noexcept;
  void trim() noexcept;

  std::mutex mutex_;
  std::vector<Free> free_;  // idle buffers, in the order of their return
  size_t in_use_ = 0;       // number of buffers in use; free_ has room for all of them
  size_t clock_ = 0;        // number of takes
  Bytes bytes_{0, 0, kLeastIdle};
  size_t freed_ = 0;       // bytes that were freed recently because of the bound
  size_t last_freed_ = 0;  // the take at which this happened last
};

// Bytes of a tensor of this shape. Throws OutOfMemory if they are more than any machine has.
size_t tensor_bytes(const std::vector<int64_t>& shape, int64_t element_bytes);

// Returns call(). If the call fails because memory cannot be allocated, the idle buffers of the pool are freed and the
// call is repeated once. A call that fails must have changed nothing.
template <class Call>
auto with_idle_memory(BufferPool& pool, const Call& call) {
  try {
    return call();
  } catch (const OutOfMemory&) {
    if (pool.free_idle() == 0) throw;
  } catch (const std::bad_alloc&) {
    if (pool.free_idle() == 0) throw;
  }
  return call();
}

}  // namespace recstore
