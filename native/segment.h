// Sealed anonymous memory that is shared by passing its descriptor.
#pragma once

#include <sys/mman.h>

#include "layout.h"

namespace bireme {

// Creates a memfd of the given size that nobody can shrink. The caller owns the descriptor.
int create_segment(const char* name, u64 bytes);

// A mapping that ends with its owner.
class Mapping {
 public:
  Mapping() = default;
  // `reserve` allows addresses past the end of the memory, which may grow.
  Mapping(int fd, u64 offset, u64 bytes, bool reserve = false);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  u8* data() const { return data_; }
  u64 bytes() const { return bytes_; }
  // For ranks that are threads of one process: mappings of the same memory are one mapping, so that
  // ThreadSanitizer sees what they share. Set before the first mapping, never reset.
  static bool one_per_process;

 private:
  u8* data_ = nullptr;
  u64 bytes_ = 0;
};

}  // namespace bireme
