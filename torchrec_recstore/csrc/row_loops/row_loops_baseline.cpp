// The instruction set that every processor of the family has; on x86-64 this is SSE2.
#include "row_loops/row_loops.h"
#include "rows/philox.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#define RECSTORE_MULTIPLY(a, b) _mm_mul_epu32((__m128i)(a), (__m128i)(b))
#define RECSTORE_UNPACK_LOW(a, b) _mm_unpacklo_epi64((__m128i)(a), (__m128i)(b))
#define RECSTORE_UNPACK_HIGH(a, b) _mm_unpackhi_epi64((__m128i)(a), (__m128i)(b))
#define RECSTORE_BYTES_TO_INTS(bytes) \
  _mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128((int)(bytes)), _mm_setzero_si128()), _mm_setzero_si128())
#define RECSTORE_INTS_TO_BYTES(ints)                                                   \
  _mm_packus_epi16(_mm_packs_epi32((__m128i)(ints).low.low, (__m128i)(ints).low.high), \
                   _mm_packs_epi32((__m128i)(ints).high.low, (__m128i)(ints).high.high))
#endif

#define RECSTORE_ISA_NAMESPACE baseline
#define RECSTORE_ISA_NAME "baseline"
#define RECSTORE_WIDTH 4
#define RECSTORE_BLOCK 32
// Only a processor without AVX2, or without NEON, runs these loops.
#define RECSTORE_ANY_COLUMNS
#define RECSTORE_STREAM(dst, value) store_lanes(dst, value)
#define RECSTORE_MATCH(line, id)                                                                                   \
  (unsigned{(line).ids[0] == (id)} | unsigned{(line).ids[1] == (id)} << 1 | unsigned{(line).ids[2] == (id)} << 2 | \
   unsigned{(line).ids[3] == (id)} << 3 | unsigned{(line).ids[4] == (id)} << 4)

#include "row_loops/row_loops.inl"
