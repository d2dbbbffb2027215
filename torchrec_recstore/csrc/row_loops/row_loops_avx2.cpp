// Headers are included before the pragma: the compiler could merge their functions with those of other files, and must
// not compile them for an instruction set that the processor may lack.
#if defined(__x86_64__)

#include <immintrin.h>

#include "row_loops/row_loops.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#include "rows/philox.h"

#define RECSTORE_ISA_NAMESPACE avx2
#define RECSTORE_ISA_NAME "avx2"
#define RECSTORE_WIDTH 8
#define RECSTORE_BLOCK 64
#define RECSTORE_STREAM(dst, value) _mm256_stream_ps((dst), (value))
#define RECSTORE_HALF_TO_FLOAT(half) _mm256_cvtph_ps((__m128i)(half))
#define RECSTORE_FLOAT_TO_HALF(value) _mm256_cvtps_ph((value), _MM_FROUND_TO_NEAREST_INT)
#define RECSTORE_MATCH4(ids, id) \
  static_cast<unsigned>(         \
      _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_load_si256(ids), _mm256_set1_epi64x(id)))))
#define RECSTORE_MATCH(line, id)                                    \
  (RECSTORE_MATCH4(reinterpret_cast<const __m256i*>(&(line)), id) | \
   RECSTORE_MATCH4(reinterpret_cast<const __m256i*>(&(line)) + 1, id) << 4)

#define RECSTORE_MULTIPLY(a, b) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#define RECSTORE_UNPACK_LOW(a, b) _mm256_unpacklo_epi64((__m256i)(a), (__m256i)(b))
#define RECSTORE_UNPACK_HIGH(a, b) _mm256_unpackhi_epi64((__m256i)(a), (__m256i)(b))
#define RECSTORE_BYTES_TO_INTS(bytes) _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)(bytes)))
#define RECSTORE_INTS_TO_BYTES(ints)                                                              \
  [](__m256i halves) {                                                                            \
    return _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)); \
  }(_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(ints).low, (__m256i)(ints).high), 0xD8))

#include "row_loops/row_loops.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
