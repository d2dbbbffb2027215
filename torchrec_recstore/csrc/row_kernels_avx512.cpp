// Headers come first: what they define must not be compiled for an instruction set that the processor may lack.
#if defined(__x86_64__)

#include <immintrin.h>

#include "row_kernels.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")

#include "philox.h"

#define RECSTORE_ISA_NAMESPACE avx512
#define RECSTORE_ISA_NAME "avx512"
#define RECSTORE_STREAM16(dst, value) _mm512_stream_ps((dst), (__m512)(value))

#include "row_kernels.inl"

#pragma GCC pop_options

#endif
