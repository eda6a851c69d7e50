// Monotonic time, the same for all processes of one host.
#pragma once

#include <ctime>

#include "layout.h"

namespace bireme {

inline u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<u64>(t.tv_sec) * 1'000'000'000ull + static_cast<u64>(t.tv_nsec);
}

}  // namespace bireme
