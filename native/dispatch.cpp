// Picks the fold kernels of this processor.
#include "failure.h"
#include "kernels.h"

namespace bireme {

namespace baseline {
Fold pick_fold(DType, Reduction);
}
#if defined(__x86_64__) && !defined(BIREME_BASELINE_ONLY)
namespace avx2 {
Fold pick_fold(DType, Reduction);
}
namespace avx512 {
Fold pick_fold(DType, Reduction);
}
#endif

namespace {

struct Isa {
  const char* name;
  Fold (*pick)(DType, Reduction);
};

Isa detect() {
#if defined(__x86_64__) && !defined(BIREME_BASELINE_ONLY)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return {"avx512", avx512::pick_fold};
  if (avx2) return {"avx2", avx2::pick_fold};
#endif
  return {"baseline", baseline::pick_fold};
}

const Isa& isa() {
  static const Isa chosen = detect();
  return chosen;
}

}  // namespace

Fold fold_for(DType dtype, Reduction reduction) {
  Fold fold = isa().pick(dtype, reduction);
  if (!fold)
    throw Failure(Code::engine, std::string("no ") + name(reduction) + " of " + name(dtype));
  return fold;
}

const char* fold_isa() { return isa().name; }

}  // namespace bireme
