// The instruction set that every processor of the family has; on x86-64 this is SSE2.
#include "row_kernels.h"
#include "philox.h"

#define RECSTORE_ISA_NAMESPACE baseline
#define RECSTORE_ISA_NAME "baseline"
#define RECSTORE_WIDTH 4
#define RECSTORE_STREAM(dst, value) store_lanes(dst, value)

#include "row_kernels.inl"
