// The exceptions of the core. bind_module.cpp turns them into those of bireme.errors.
#pragma once

#include <stdexcept>
#include <string>

#include "layout.h"

namespace bireme {

struct Failure : std::runtime_error {
  Failure(Code code, const std::string& text) : std::runtime_error(text), code(code) {}
  Code code;
};

// A Python signal handler raised: the Python error is already set.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

}  // namespace bireme
