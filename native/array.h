// Where a NumPy array or torch tensor lies, read without a Python call where that is possible.
#pragma once

#include "bind.h"

namespace bireme {

struct Array {
  void* data = nullptr;
  u64 count = 0;
  DType dtype = DType::u8;
  int ndim = 0;
  const ssize_t* shape = nullptr;  // null where only the count is known

  u64 nbytes() const { return count * item_bytes(dtype); }
};

// Fills `out` for the plain case: an exact numpy.ndarray, or torch.Tensor in host memory,
// contiguous, of a dtype that bireme moves, writable if `writes`. Anything else returns false, and
// the checks in bireme.arrays say what is wrong or resolve it.
bool plain_array(nb::handle x, bool writes, Array& out);

void bind_array(nb::module_& m);

}  // namespace bireme
