#include "buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "error.h"

namespace recstore {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
// A buffer that this many takes have passed by is given back to the system.
constexpr size_t kIdleTakes = 64;

size_t rounded(size_t bytes) {
  const size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  return (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit;
}

void* allocate(size_t bytes) {
  void* data = std::aligned_alloc(bytes >= kHugePage ? kHugePage : kPage, bytes);
  if (data == nullptr) throw OutOfMemory("cannot allocate a buffer of " + std::to_string(bytes) + " bytes");
  if (bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

}  // namespace

BufferPool& BufferPool::instance() {
  static auto* pool = new BufferPool;
  return *pool;
}

BufferPool::Buffer::~Buffer() {
  if (data_ != nullptr) pool_->give_back(data_, bytes_);
}

void BufferPool::Buffer::swap(Buffer& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

BufferPool::Buffer BufferPool::take(size_t bytes) {
  bytes = rounded(bytes);
  Buffer buffer;
  buffer.pool_ = this;
  std::vector<Free> idle;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++clock_;
    // The tightest fit, but never one that would leave more than half unused.
    auto best = free_.end();
    for (auto f = free_.begin(); f != free_.end(); ++f) {
      if (f->bytes >= bytes && f->bytes <= 2 * bytes && (best == free_.end() || f->bytes < best->bytes)) best = f;
    }
    if (best != free_.end()) {
      buffer.data_ = best->data;
      buffer.bytes_ = best->bytes;
      free_.erase(best);
    }
    idle = remove_idle();
  }
  for (const Free& f : idle) std::free(f.data);
  if (buffer.data_ == nullptr) {
    buffer.data_ = allocate(bytes);
    buffer.bytes_ = bytes;
  }
  return buffer;
}

void BufferPool::give_back(void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back({data, bytes, clock_});
}

std::vector<BufferPool::Free> BufferPool::remove_idle() {
  const auto busy = std::stable_partition(free_.begin(), free_.end(), [&](const Free& f) { return clock_ - f.last_use <= kIdleTakes; });
  std::vector<Free> idle(busy, free_.end());
  free_.erase(busy, free_.end());
  return idle;
}

}  // namespace recstore
