#include "row_loops/row_loops.h"

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace recstore {

namespace baseline {
extern const RowLoops kLoops;
}
#if defined(__x86_64__)
namespace avx2 {
extern const RowLoops kLoops;
}
namespace avx512 {
extern const RowLoops kLoops;
}
#elif defined(__aarch64__)
namespace neon {
extern const RowLoops kLoops;
}
#endif

namespace {

struct Version {
  const RowLoops& loops;
  bool supported;
};

const RowLoops& choose() {
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
  const Version versions[] = {{avx512::kLoops, has_avx512}, {avx2::kLoops, has_avx2}, {baseline::kLoops, true}};
#elif defined(__aarch64__)
  const Version versions[] = {{neon::kLoops, true}, {baseline::kLoops, true}};
#else
  const Version versions[] = {{baseline::kLoops, true}};
#endif
  const char* forced = std::getenv("RECSTORE_ISA");
  const std::string name = forced == nullptr ? "" : forced;
  for (const Version& version : versions) {
    if (version.supported && (name.empty() || name == version.loops.name)) return version.loops;
  }
  if (name == "neon" || name == "avx2" || name == "avx512") {
    throw InvalidArgument("RECSTORE_ISA is " + name + ", which this processor does not support");
  }
  throw InvalidArgument("RECSTORE_ISA must be baseline, neon, avx2 or avx512, got '" + name + "'");
}

}  // namespace

const RowLoops& row_loops() {
  static const RowLoops& loops = choose();
  return loops;
}

}  // namespace recstore
