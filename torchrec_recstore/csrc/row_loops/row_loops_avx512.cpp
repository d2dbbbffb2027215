// Headers are included before the pragma: the compiler could merge their functions with those of other files, and must
// not compile them for an instruction set that the processor may lack.
#if defined(__x86_64__)

#include <immintrin.h>

#include "row_loops/row_loops.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")
#endif

#include "rows/philox.h"

#define RECSTORE_ISA_NAMESPACE avx512
#define RECSTORE_ISA_NAME "avx512"
#define RECSTORE_WIDTH 16
#define RECSTORE_BLOCK 64
#define RECSTORE_STREAM(dst, value) _mm512_stream_ps((dst), (value))
#define RECSTORE_MATCH(line, id) \
  static_cast<unsigned>(_mm512_cmpeq_epi64_mask(_mm512_load_si512(&(line)), _mm512_set1_epi64(id)))

// These are the masked intrinsics, because GCC 12 warns about the plain ones (GCC bug 105593).
#define RECSTORE_HALF_TO_FLOAT(half) _mm512_maskz_cvtph_ps(0xFFFF, (__m256i)(half))
#define RECSTORE_FLOAT_TO_HALF(value) _mm512_maskz_cvtps_ph(0xFFFF, (value), _MM_FROUND_TO_NEAREST_INT)

#define RECSTORE_MULTIPLY(a, b) _mm512_maskz_mul_epu32(0xFF, (__m512i)(a), (__m512i)(b))
#define RECSTORE_UNPACK_LOW(a, b) _mm512_maskz_unpacklo_epi64(0xFF, (__m512i)(a), (__m512i)(b))
#define RECSTORE_UNPACK_HIGH(a, b) _mm512_maskz_unpackhi_epi64(0xFF, (__m512i)(a), (__m512i)(b))
#define RECSTORE_BYTES_TO_INTS(bytes) _mm512_maskz_cvtepu8_epi32(0xFFFF, (__m128i)(bytes))
#define RECSTORE_INTS_TO_BYTES(ints) _mm512_maskz_cvtusepi32_epi8(0xFFFF, (__m512i)(ints))

#include "row_loops/row_loops.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
