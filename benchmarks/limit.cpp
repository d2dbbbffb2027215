// The machine's limit: rows by known slots, with prefetching, no index, no grouping.
// Built by limit.py; the threads share the rows evenly. Rows lie in huge pages and outputs are written
// around the caches, as RecStore's own are.

#include <immintrin.h>
#include <sys/mman.h>

#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kAhead = 16;

template <class Work>
void split(int64_t n, int threads, const Work& work) {
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back([&, t] { work(n * t / threads, n * (t + 1) / threads); });
  work(0, n / threads);
  for (auto& thread : pool) thread.join();
}

inline void prefetch(const float* row, int64_t columns) {
  for (int64_t d = 0; d < columns; d += 16) __builtin_prefetch(row + d, 0, 3);
}

}  // namespace

extern "C" {

// Asks for huge pages in [data, data + bytes), before it is touched.
void use_huge_pages(void* data, int64_t bytes) {
  const auto begin = (reinterpret_cast<uintptr_t>(data) + 4095) & ~uintptr_t{4095};
  madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, MADV_HUGEPAGE);
}

// out[i] = rows[slots[i]]; rows: (*, columns); out: (n, columns)
void gather(const float* rows, const uint32_t* slots, int64_t n, int64_t columns, float* out, int threads) {
  split(n, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch(rows + slots[i + kAhead] * columns, columns);
      const float* row = rows + slots[i] * columns;
      for (int64_t d = 0; d < columns; d += 4) _mm_stream_ps(out + i * columns + d, _mm_loadu_ps(row + d));
    }
  });
}

// rows[slots[i]] -= grad[i], the least that an update can do to a row. Slots must be distinct between threads.
void scatter(float* rows, const uint32_t* slots, int64_t n, int64_t columns, const float* grad, int threads) {
  split(n, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch(rows + slots[i + kAhead] * columns, columns);
      float* row = rows + slots[i] * columns;
      const float* g = grad + i * columns;
      for (int64_t d = 0; d < columns; ++d) row[d] -= g[d];
    }
  });
}
}
