#include "base/buffer_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "base/memory.h"

namespace recstore {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPage = 4096;
// A buffer that stays idle for this many takes is freed.
constexpr size_t kIdleTakes = 64;

size_t rounded(size_t bytes) {
  const size_t unit = bytes >= kHugePage ? kHugePage : kPage;
  return (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit;
}

// Returns null if there is no memory.
void* allocate(size_t bytes) {
  void* data = std::aligned_alloc(bytes >= kHugePage ? kHugePage : kPage, bytes);
  if (data != nullptr && bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
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
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reserve_more(free_, in_use_ + 1);  // so that the return of a buffer cannot fail
    ++clock_;
    // Take the smallest buffer that fits, unless more than half of it would be unused. Among buffers of one size, take
    // the one that returned last, so that the others are recognised as idle.
    auto best = free_.end();
    for (auto f = free_.begin(); f != free_.end(); ++f) {
      if (f->bytes >= bytes && f->bytes <= 2 * bytes && (best == free_.end() || f->bytes <= best->bytes)) best = f;
    }
    if (best != free_.end()) {
      buffer.data_ = best->data;
      bytes = best->bytes;
      bytes_.idle -= bytes;
      free_.erase(best);
    } else {
      if (clock_ - last_freed_ > kIdleTakes) freed_ = 0;
      const size_t missed = std::min(bytes, freed_);
      bytes_.most_idle += missed;
      freed_ -= missed;
    }
    bytes_.used += bytes;
    ++in_use_;
  }
  buffer.pool_ = this;
  buffer.bytes_ = bytes;
  trim();
  if (buffer.data_ == nullptr) buffer.data_ = allocate(bytes);
  if (buffer.data_ == nullptr && free_idle() > 0) buffer.data_ = allocate(bytes);
  if (buffer.data_ == nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes_.used -= bytes;
    --in_use_;
    throw OutOfMemory("cannot allocate a buffer of " + std::to_string(bytes) + " bytes");
  }
  return buffer;
}

void BufferPool::give_back(void* data, size_t bytes) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back({data, bytes, clock_});
    --in_use_;
    bytes_.used -= bytes;
    bytes_.idle += bytes;
  }
  trim();
}

void BufferPool::trim() noexcept {
  for (;;) {
    void* data = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (free_.empty()) return;
      const Free oldest = free_.front();
      const bool over = bytes_.idle > bytes_.most_idle;
      if (!over && clock_ - oldest.last_use <= kIdleTakes) return;
      if (over) {
        freed_ += oldest.bytes;
        last_freed_ = clock_;
      } else {
        bytes_.most_idle = std::max(kLeastIdle, bytes_.most_idle - std::min(oldest.bytes, bytes_.most_idle));
      }
      bytes_.idle -= oldest.bytes;
      free_.erase(free_.begin());
      data = oldest.data;
    }
    std::free(data);  // slow, so not under the lock
  }
}

size_t BufferPool::free_idle() noexcept {
  size_t freed = 0;
  for (;;) {
    void* data = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (free_.empty()) return freed;
      data = free_.back().data;
      freed += free_.back().bytes;
      bytes_.idle -= free_.back().bytes;
      free_.pop_back();
    }
    std::free(data);
  }
}

BufferPool::Bytes BufferPool::bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

size_t tensor_bytes(const std::vector<int64_t>& shape, int64_t element_bytes) {
  size_t bytes = static_cast<size_t>(element_bytes);
  bool fits = true;
  for (const int64_t size : shape) fits &= !__builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes);
  if (fits && bytes <= kMostBytes) return bytes;
  std::string sizes;
  for (const int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  throw OutOfMemory("cannot allocate a tensor of the shape (" + sizes + ")");
}

}  // namespace recstore
