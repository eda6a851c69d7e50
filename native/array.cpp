#include "array.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>

namespace bireme {
namespace {

constexpr DType kUnknown = DType::count_;
int bfloat16_number = -1;  // ml_dtypes registers it at run time

DType dtype_of(int number) {
  switch (number) {
    case NPY_BOOL:
      return DType::b1;
    case NPY_INT8:
      return DType::i8;
    case NPY_INT16:
      return DType::i16;
    case NPY_INT32:
      return DType::i32;
    case NPY_LONG:
      return DType::i64;
    case NPY_LONGLONG:
      return DType::i64;
    case NPY_UINT8:
      return DType::u8;
    case NPY_UINT16:
      return DType::u16;
    case NPY_UINT32:
      return DType::u32;
    case NPY_ULONG:
      return DType::u64;
    case NPY_ULONGLONG:
      return DType::u64;
    case NPY_HALF:
      return DType::f16;
    case NPY_FLOAT:
      return DType::f32;
    case NPY_DOUBLE:
      return DType::f64;
    default:
      return number == bfloat16_number ? DType::bf16 : kUnknown;
  }
}

bool of_numpy(PyObject* object, bool writes, Array& out) {
  auto* x = reinterpret_cast<PyArrayObject*>(object);
  const DType dtype = dtype_of(PyArray_TYPE(x));
  if (dtype == kUnknown || !PyArray_ISNOTSWAPPED(x) || !PyArray_IS_C_CONTIGUOUS(x) ||
      (writes && !PyArray_ISWRITEABLE(x)))
    return false;
  out = {PyArray_DATA(x), static_cast<u64>(PyArray_SIZE(x)), dtype, PyArray_NDIM(x),
         PyArray_DIMS(x)};
  return true;
}

// What is known of torch once the program has imported it. Never freed: tensors may outlive us.
struct Torch {
  PyObject* tensor = nullptr;
  PyObject* increment_version = nullptr;
  std::vector<std::pair<PyObject*, DType>> dtypes;
  PyObject *data_ptr, *numel, *is_contiguous, *is_cpu, *is_neg, *dtype;
};
Torch torch;

class Answer {  // a new reference, or null with the Python error cleared
 public:
  explicit Answer(PyObject* object) : object_(object) {
    if (!object) PyErr_Clear();
  }
  ~Answer() { Py_XDECREF(object_); }
  Answer(const Answer&) = delete;
  explicit operator bool() const { return object_ != nullptr; }
  bool is(PyObject* other) const { return object_ == other; }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

bool of_torch(PyObject* x, bool writes, Array& out) {
  const Answer cpu(PyObject_GetAttr(x, torch.is_cpu));
  const Answer contiguous(PyObject_CallMethodNoArgs(x, torch.is_contiguous));
  const Answer negated(PyObject_CallMethodNoArgs(x, torch.is_neg));
  const Answer dtype(PyObject_GetAttr(x, torch.dtype));
  if (!cpu.is(Py_True) || !contiguous.is(Py_True) || !negated.is(Py_False) || !dtype) return false;
  const auto known = std::find_if(torch.dtypes.begin(), torch.dtypes.end(),
                                  [&](const auto& d) { return dtype.is(d.first); });
  if (known == torch.dtypes.end()) return false;
  const Answer pointer(PyObject_CallMethodNoArgs(x, torch.data_ptr));
  const Answer count(PyObject_CallMethodNoArgs(x, torch.numel));
  if (!pointer || !count) return false;
  if (writes && !Answer(PyObject_CallOneArg(torch.increment_version, x))) return false;
  out = {PyLong_AsVoidPtr(pointer.get()), PyLong_AsUnsignedLongLong(count.get()), known->second, -1,
         nullptr};
  return true;
}

void set_torch(nb::handle tensor, nb::handle increment_version, const nb::list& dtypes) {
  torch.dtypes.clear();
  u32 code = 0;
  for (nb::handle dtype : dtypes) {
    if (!dtype.is_none())
      torch.dtypes.emplace_back(dtype.inc_ref().ptr(), static_cast<DType>(code));
    ++code;
  }
  torch.increment_version = increment_version.inc_ref().ptr();
  torch.data_ptr = PyUnicode_InternFromString("data_ptr");
  torch.numel = PyUnicode_InternFromString("numel");
  torch.is_contiguous = PyUnicode_InternFromString("is_contiguous");
  torch.is_cpu = PyUnicode_InternFromString("is_cpu");
  torch.is_neg = PyUnicode_InternFromString("is_neg");
  torch.dtype = PyUnicode_InternFromString("dtype");
  torch.tensor = tensor.inc_ref().ptr();
}

void import_numpy() {
  if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
}

}  // namespace

bool plain_array(nb::handle x, bool writes, Array& out) {
  if (PyArray_CheckExact(x.ptr())) return of_numpy(x.ptr(), writes, out);
  if (reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) == torch.tensor)
    return of_torch(x.ptr(), writes, out);
  return false;
}

void bind_array(nb::module_& m) {
  import_numpy();
  m.def("set_bfloat16", [](int number) { bfloat16_number = number; }, nb::arg("number"));
  m.def("set_torch", &set_torch, nb::arg("tensor"), nb::arg("increment_version"),
        nb::arg("dtypes"));
}

}  // namespace bireme
