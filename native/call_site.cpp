// Call sites, flows and Python signals: what the core needs to know of the interpreter.
#include <Python.h>
#include <frameobject.h>

#include <string>
#include <unordered_map>

#include "bind.h"
#include "recorder.h"

namespace bireme {
namespace {

std::string package;
std::unordered_map<PyCodeObject*, bool> internal_code;  // keeps a reference to each code object
thread_local u32 flow = 0;
thread_local bool in_python_call = false;

bool is_internal(PyCodeObject* code) {
  if (auto at = internal_code.find(code); at != internal_code.end()) return at->second;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (!file) PyErr_Clear();
  const bool internal = file && std::string_view(file).starts_with(package);
  Py_INCREF(code);
  internal_code.emplace(code, internal);
  return internal;
}

std::string short_name(PyCodeObject* code) {
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (!file) {
    PyErr_Clear();
    return "?";
  }
  const std::string path(file);
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

struct Key {
  PyCodeObject* code;
  int line;
  Recorder* recorder;
  bool operator==(const Key&) const = default;
};
struct Hash {
  size_t operator()(const Key& k) const {
    return reinterpret_cast<size_t>(k.code) * 31 + static_cast<size_t>(k.line) * 17 +
           reinterpret_cast<size_t>(k.recorder);
  }
};
std::unordered_map<Key, u32, Hash> sites;

}  // namespace

void set_package(const std::string& folder) { package = folder; }

void forget_call_sites() { sites.clear(); }

u32 call_site(Recorder& recorder) {
  PyFrameObject* frame = PyEval_GetFrame();
  if (!frame) return 0;
  Py_INCREF(frame);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_internal(code)) {
      const int line = PyFrame_GetLineNumber(frame);
      auto [at, fresh] = sites.try_emplace({code, line, &recorder}, 0);
      if (fresh) at->second = recorder.intern(short_name(code) + ":" + std::to_string(line));
      Py_DECREF(code);
      Py_DECREF(frame);
      return at->second;
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  return 0;
}

u32 current_flow() { return flow; }
void set_current_flow(u32 id) { flow = id; }

PythonCall::PythonCall() : before_(in_python_call) { in_python_call = true; }
PythonCall::~PythonCall() { in_python_call = before_; }

void* release_python() {
  return in_python_call && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
}

void reacquire_python(void* token) { PyEval_RestoreThread(static_cast<PyThreadState*>(token)); }

bool python_signal_raised() {
  if (!in_python_call) return false;
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

}  // namespace bireme
