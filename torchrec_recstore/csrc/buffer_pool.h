#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#include "error.h"

namespace recstore {

// Memory for outputs, used again step after step: memory that malloc maps afresh costs more in page
// faults than the lookup that fills it. A buffer is back in the pool once nothing refers to it.
//
// The pool keeps what takes of late have shown to be of use: it begins with a small bound, and raises that where a take
// has to allocate what the bound had made it free shortly before. What lies idle for many takes is freed, and lowers it.
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
  // Frees every buffer that is not in use; returns their bytes. For whoever is about to fail for want of memory.
  size_t free_idle() noexcept;

  struct Bytes {
    size_t used;
    size_t idle;
    size_t most_idle;  // the bound
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
  std::vector<Free> free_;  // in the order in which they came back
  size_t in_use_ = 0;       // buffers, for each of which free_ has room
  size_t clock_ = 0;        // counts the takes
  Bytes bytes_{0, 0, kLeastIdle};
  size_t freed_ = 0;        // bytes that the bound has cost of late
  size_t last_freed_ = 0;   // when
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
