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
#elif defined(__aarch64__)
namespace neon {
extern const RowKernels kKernels;
}
#endif

namespace {

struct Version {
  const RowKernels& kernels;
  bool supported;
};

const RowKernels& choose() {
  // The fastest version comes first.
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
  const Version versions[] = {{avx512::kKernels, has_avx512}, {avx2::kKernels, has_avx2}, {baseline::kKernels, true}};
#elif defined(__aarch64__)
  const Version versions[] = {{neon::kKernels, true}, {baseline::kKernels, true}};
#else
  const Version versions[] = {{baseline::kKernels, true}};
#endif
  const char* forced = std::getenv("RECSTORE_ISA");
  const std::string name = forced == nullptr ? "" : forced;
  for (const Version& version : versions) {
    if (version.supported && (name.empty() || name == version.kernels.name)) return version.kernels;
  }
  if (name == "neon" || name == "avx2" || name == "avx512") {
    throw InvalidArgument("RECSTORE_ISA is " + name + ", which this processor does not support");
  }
  throw InvalidArgument("RECSTORE_ISA must be baseline, neon, avx2 or avx512, got '" + name + "'");
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& kernels = choose();
  return kernels;
}

}  // namespace recstore
