// x86-64's own SSE2, or whatever another processor family has as its floor.
#include "row_kernels.h"
#include "philox.h"

#define RECSTORE_ISA_NAMESPACE baseline
#define RECSTORE_ISA_NAME "baseline"
#define RECSTORE_STREAM16(dst, value) store(dst, value)

#include "row_kernels.inl"
