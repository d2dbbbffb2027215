// Headers come first: what they define must not be compiled for an instruction set that the processor may lack.
#if defined(__x86_64__)

#include <immintrin.h>

#include "row_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx2")

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

#include "row_kernels.inl"

#pragma GCC pop_options

#endif
