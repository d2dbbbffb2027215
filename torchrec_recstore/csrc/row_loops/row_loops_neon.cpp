// Every aarch64 processor has NEON, and GCC uses it in the baseline too. GCC 12 converts between 8, 16 and 32 bits one
// lane at a time there, however, and compares the ids of a line one by one.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "row_loops/row_loops.h"
#include "rows/philox.h"

#define RECSTORE_ISA_NAMESPACE neon
#define RECSTORE_ISA_NAME "neon"
#define RECSTORE_WIDTH 4
#define RECSTORE_BLOCK 64
#define RECSTORE_STREAM(dst, value) store_lanes(dst, value)

namespace {

// The last lanes compare slots with the id, and have no bits.
inline unsigned match(const recstore::IndexLine& line, int64_t id) {
  const int64x2_t wanted = vdupq_n_s64(id);
  const auto equal = [&](const int64_t* ids) { return vreinterpretq_u16_u64(vceqq_s64(vld1q_s64(ids), wanted)); };
  const uint16x8_t four = vreinterpretq_u16_u32(
      vuzp1q_u32(vreinterpretq_u32_u16(equal(line.ids)), vreinterpretq_u32_u16(equal(line.ids + 2))));
  const uint16x8_t bits = {1, 2, 4, 8, 16, 0, 0, 0};
  return vaddvq_u16(vandq_u16(vuzp1q_u16(four, equal(line.ids + 4)), bits));
}

// See Bfloat16Row::truncated().
inline uint16x4_t to_bfloat16(float32x4_t v, uint32x4_t addend) {
  const uint32x4_t f = vreinterpretq_u32_f32(v);
  const uint16x4_t quiet = vorr_u16(vshrn_n_u32(f, 16), vdup_n_u16(0x40));
  return vbsl_u16(vmovn_u32(vceqq_f32(v, v)), vaddhn_u32(f, addend), quiet);
}

}  // namespace

#define RECSTORE_MATCH(line, id) match(line, id)
#define RECSTORE_HALF_TO_FLOAT(half) vcvt_f32_f16((float16x4_t)(half))
#define RECSTORE_FLOAT_TO_HALF(value) vcvt_f16_f32((float32x4_t)(value))
#define RECSTORE_BFLOAT16_TO_FLOAT(half) vshll_n_u16((uint16x4_t)(half), 16)
#define RECSTORE_FLOAT_TO_BFLOAT16(value, addend) to_bfloat16((float32x4_t)(value), (uint32x4_t)(addend))
#define RECSTORE_CODES_TO_INTS(codes)                                                                     \
  [](uint16x8_t low, uint16x8_t high) -> Lanes<int32_t> {                                                 \
    return {{(Register<int32_t>)vmovl_u16(vget_low_u16(low)), (Register<int32_t>)vmovl_high_u16(low)},    \
            {(Register<int32_t>)vmovl_u16(vget_low_u16(high)), (Register<int32_t>)vmovl_high_u16(high)}}; \
  }(vmovl_u8(vget_low_u8((uint8x16_t)(codes))), vmovl_high_u8((uint8x16_t)(codes)))
#define RECSTORE_INTS_TO_HALVES(low, high) vcombine_u16(vmovn_u32((uint32x4_t)(low)), vmovn_u32((uint32x4_t)(high)))
#define RECSTORE_INTS_TO_BYTES(ints)                                                \
  vcombine_u8(vqmovn_u16(RECSTORE_INTS_TO_HALVES((ints).low.low, (ints).low.high)), \
              vqmovn_u16(RECSTORE_INTS_TO_HALVES((ints).high.low, (ints).high.high)))

#include "row_loops/row_loops.inl"

#endif
