// What the bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "dtypes.h"

namespace bireme {

namespace nb = nanobind;

void bind_control(nb::module_& m);
void bind_channel(nb::module_& m);
void bind_heap(nb::module_& m);
void bind_stream(nb::module_& m);
void bind_record(nb::module_& m);
void bind_lane(nb::module_& m);

class Recorder;

// The user's line that led here: the innermost frame outside the package. Needs the GIL.
u32 call_site(Recorder& recorder);
void set_package(const std::string& folder);
void forget_call_sites();

// The flow that the current Python thread is in.
u32 current_flow();
void set_current_flow(u32 flow);

// Marks the thread as one that runs Python, so that its waits look for signals.
class PythonCall {
 public:
  PythonCall();
  ~PythonCall();

 private:
  bool before_;
};
bool python_signal_raised();

// Release the interpreter where a PythonCall of this thread holds it; null where it does not.
void* release_python();
void reacquire_python(void* token);

// A part of a call that takes long whatever others do: other Python threads may run meanwhile.
class LongCall {
 public:
  explicit LongCall(u64 bytes) : token_(bytes > kLongBytes ? release_python() : nullptr) {}
  ~LongCall() {
    if (token_) reacquire_python(token_);
  }

 private:
  static constexpr u64 kLongBytes = 64 << 10;
  void* token_;
};

}  // namespace bireme
