// The machine's limit: rows by known slots, with prefetching, no index, no grouping.
// Built by limit.py; the threads share the rows evenly. Rows lie in huge pages and outputs are written
// around the caches, as RecStore's own are. The threads are torch's (its libgomp is loaded already): others
// would have to push its workers, which spin for a few milliseconds after each use, off their cores.

#include <immintrin.h>
#include <sys/mman.h>

#include <cstdint>
#include <type_traits>

namespace {

constexpr int64_t kAhead = 16;

template <class Work>
void split(int64_t n, int threads, const Work& work) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int t = 0; t < threads; ++t) work(n * t / threads, n * (t + 1) / threads);
}

// A whole cache line: half lines written around the caches would be half as fast.
inline void stream_line(float* out, const float* in) {
#ifdef __AVX512F__
  _mm512_stream_ps(out, _mm512_loadu_ps(in));
#elif defined(__AVX__)
  for (int d = 0; d < 16; d += 8) _mm256_stream_ps(out + d, _mm256_loadu_ps(in + d));
#else
  for (int d = 0; d < 16; d += 4) {
    _mm_stream_ps(out + d, _mm_loadu_ps(in + d));
  }
#endif
}

// Lines: a row's, known to the compiler, so that no loop is left inside a row.
template <int64_t Lines>
inline void prefetch(const float* row) {
  for (int64_t line = 0; line < Lines; ++line) __builtin_prefetch(row + line * 16, 0, 3);
}

template <int64_t Lines>
void gather_rows(const float* rows, const uint32_t* slots, int64_t n, float* out, int threads) {
  constexpr int64_t kColumns = Lines * 16;
  split(n, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch<Lines>(rows + slots[i + kAhead] * kColumns);
      const float* row = rows + slots[i] * kColumns;
      for (int64_t d = 0; d < kColumns; d += 16) stream_line(out + i * kColumns + d, row + d);
    }
  });
}

template <int64_t Lines>
void scatter_rows(float* rows, const uint32_t* slots, int64_t n, const float* grad, int threads) {
  constexpr int64_t kColumns = Lines * 16;
  split(n, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch<Lines>(rows + slots[i + kAhead] * kColumns);
      float* row = rows + slots[i] * kColumns;
      const float* g = grad + i * kColumns;
      for (int64_t d = 0; d < kColumns; ++d) row[d] -= g[d];
    }
  });
}

// Calls work with a row's lines; false where no case of the benchmarks has so many columns.
template <class Work>
bool with_lines(int64_t columns, const Work& work) {
  switch (columns) {
    case 16: return work(std::integral_constant<int64_t, 1>{}), true;
    case 64: return work(std::integral_constant<int64_t, 4>{}), true;
    case 128: return work(std::integral_constant<int64_t, 8>{}), true;
    default: return false;
  }
}

}  // namespace

extern "C" {

// Asks for huge pages in [data, data + bytes), before it is touched.
void use_huge_pages(void* data, int64_t bytes) {
  const auto begin = (reinterpret_cast<uintptr_t>(data) + 4095) & ~uintptr_t{4095};
  madvise(reinterpret_cast<void*>(begin), reinterpret_cast<uintptr_t>(data) + bytes - begin, MADV_HUGEPAGE);
}

// out[i] = rows[slots[i]]; rows: (*, columns); out: (n, columns), aligned to 64 bytes
bool gather(const float* rows, const uint32_t* slots, int64_t n, int64_t columns, float* out, int threads) {
  return with_lines(columns, [&](auto lines) { gather_rows<lines>(rows, slots, n, out, threads); });
}

// rows[slots[i]] -= grad[i], the least that an update can do to a row. Slots must be distinct between threads.
bool scatter(float* rows, const uint32_t* slots, int64_t n, int64_t columns, const float* grad, int threads) {
  return with_lines(columns, [&](auto lines) { scatter_rows<lines>(rows, slots, n, grad, threads); });
}
}
