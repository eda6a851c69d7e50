// Element types and reductions, in the order that bireme.arrays uses.
#pragma once

#include "layout.h"

namespace bireme {

enum class DType : u32 { b1, i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64, count_ };
enum class Reduction : u32 { sum, prod, min, max, avg, count_ };

inline constexpr u32 kItemBytes[] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};
inline constexpr const char* kDTypeNames[] = {"bool",     "int8",    "int16",  "int32",  "int64",
                                              "uint8",    "uint16",  "uint32", "uint64", "float16",
                                              "bfloat16", "float32", "float64"};
inline constexpr const char* kReductionNames[] = {"sum", "prod", "min", "max", "avg"};
inline constexpr const char* kKindNames[] = {
    "none",           "all_reduce",  "reduce",  "broadcast",  "all_gather",
    "reduce_scatter", "gather",      "scatter", "all_to_all", "barrier",
    "send",           "recv",        "put",     "get",        "atomic",
    "signal",         "signal.wait", "quiet",   "fence",      "allocate",
    "free",           "split",       "agree",   "close",      "refused"};

inline u64 item_bytes(DType dtype) { return kItemBytes[static_cast<u32>(dtype)]; }
inline const char* name(DType d) { return kDTypeNames[static_cast<u32>(d)]; }
inline const char* name(Reduction r) { return kReductionNames[static_cast<u32>(r)]; }
inline const char* name(Kind k) { return kKindNames[static_cast<u32>(k)]; }

}  // namespace bireme
