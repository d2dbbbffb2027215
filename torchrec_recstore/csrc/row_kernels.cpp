#include "row_kernels.h"

#include <cstdlib>
#include <string>

#include "error.h"

namespace recstore {

namespace baseline {
extern const RowKernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const RowKernels kKernels;
}
namespace avx512 {
extern const RowKernels kKernels;
}
#endif

namespace {

const RowKernels& choose() {
  const char* forced = std::getenv("RECSTORE_ISA");
  const std::string name = forced == nullptr ? "" : forced;
  if (!name.empty() && name != "baseline" && name != "avx2" && name != "avx512") {
    throw InvalidArgument("RECSTORE_ISA must be baseline, avx2 or avx512, got '" + name + "'");
  }
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(__clang__)
  const bool has_f16c = true;  // Clang 14 cannot ask for it, and every processor with AVX2 has it.
#else
  const bool has_f16c = __builtin_cpu_supports("f16c");
#endif
  const bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  if ((name == "avx2" && !has_avx2) || (name == "avx512" && !has_avx512)) {
    throw InvalidArgument("RECSTORE_ISA is " + name + ", which this processor does not support");
  }
  if (has_avx512 && (name.empty() || name == "avx512")) return avx512::kKernels;
  if (has_avx2 && (name.empty() || name == "avx2")) return avx2::kKernels;
#endif
  return baseline::kKernels;
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& kernels = choose();
  return kernels;
}

}  // namespace recstore
