#pragma once

// For a function that only prefetches. GCC 12 takes it for one without effect, and drops calls of it that it does not
// inline.
#define RECSTORE_PREFETCHES __attribute__((always_inline))
