// Headers are included before the pragma: the compiler could merge their functions with those of other files, and must
// not compile them for an instruction set that the processor may lack.
#if defined(__x86_64__)

#include <immintrin.h>

#include "row_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")

#include "philox.h"

#define RECSTORE_ISA_NAMESPACE avx2
#define RECSTORE_ISA_NAME "avx2"
#define RECSTORE_STREAM16(dst, value)                       \
  do {                                                      \
    __m256 halves[2];                                       \
    __builtin_memcpy(halves, &(value), sizeof(halves));     \
    _mm256_stream_ps((dst), halves[0]);                     \
    _mm256_stream_ps((dst) + 8, halves[1]);                 \
  } while (0)

#define RECSTORE_HALF_TO_FLOAT16(half)                                       \
  [](__m256i h) {                                                            \
    const __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),    \
                              _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))}; \
    AlignedVec v;                                                            \
    __builtin_memcpy(&v, halves, sizeof(v));                                 \
    return v;                                                                \
  }((__m256i)(half))
#define RECSTORE_FLOAT_TO_HALF16(value)                                      \
  [](AlignedVec v) {                                                         \
    __m256 halves[2];                                                        \
    __builtin_memcpy(halves, &v, sizeof(v));                                 \
    return (AlignedHalfVec)_mm256_set_m128i(_mm256_cvtps_ph(halves[1], _MM_FROUND_TO_NEAREST_INT), \
                                            _mm256_cvtps_ph(halves[0], _MM_FROUND_TO_NEAREST_INT)); \
  }(value)

#include "row_kernels.inl"

#pragma GCC pop_options

#endif
