// The fast lane: a call whose arguments are plain goes from Python to the core in one step.
// Whatever is not plain returns false, and the face checks it in full, explains it or resolves it.
#include <algorithm>
#include <array>

#include "array.h"
#include "channel.h"
#include "heap.h"

namespace bireme {
namespace {

// A reduction's number by its name; the usual names are interned, so their pointers tell.
bool reduction_of(nb::handle op, Reduction& out) {
  static const std::array<PyObject*, 5> names = [] {
    std::array<PyObject*, 5> all{};
    for (size_t i = 0; i < all.size(); ++i) all[i] = PyUnicode_InternFromString(kReductionNames[i]);
    return all;
  }();
  for (u32 i = 0; i < names.size(); ++i)
    if (op.ptr() == names[i]) {
      out = static_cast<Reduction>(i);
      return true;
    }
  return false;
}

bool is_float(DType dtype) { return dtype >= DType::f16; }

bool rank_of(nb::handle rank, u32 size, u32& out) {
  if (!PyLong_CheckExact(rank.ptr())) return false;
  const long value = PyLong_AsLong(rank.ptr());
  if (value < 0 || value >= static_cast<long>(size)) {
    PyErr_Clear();
    return false;
  }
  out = static_cast<u32>(value);
  return true;
}

bool same_shape(const Array& a, const Array& b) {
  return a.shape && b.shape && a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// The shape of `many` is that of `one` with dim 0 taken `times` times.
bool joined_shape(const Array& one, const Array& many, ssize_t times) {
  return one.shape && many.shape && one.ndim > 0 && one.ndim == many.ndim &&
         many.shape[0] == one.shape[0] * times &&
         std::equal(one.shape + 1, one.shape + one.ndim, many.shape + 1);
}

bool apart(const Array& a, const Array& b) {
  const u8 *x = static_cast<u8*>(a.data), *y = static_cast<u8*>(b.data);
  return x + a.nbytes() <= y || y + b.nbytes() <= x;
}

bool fits(Kind kind, const Array& x, const Array& out, u32 size) {
  if (x.dtype != out.dtype || !apart(x, out)) return false;
  switch (kind) {
    case Kind::all_reduce:
      return same_shape(x, out);
    case Kind::all_gather:
      return joined_shape(x, out, size);
    case Kind::reduce_scatter:
      return joined_shape(out, x, size);
    case Kind::all_to_all:
      return same_shape(x, out) && x.ndim > 0 && x.shape[0] % size == 0;
    default:
      return false;
  }
}

// What quiet does, recorded; false while asynchronous work is queued.
bool quiet(Channel& channel, Heap& heap) {
  Control& control = channel.control();
  if (control.queued_work() != 0) return false;
  CallInfo info;
  info.kind = Kind::quiet;
  info.group = channel.slot();
  info.site = call_site(control.recorder());
  info.flow = current_flow();
  heap.quiet(info);
  return true;
}

// Where a symmetric array lies: what a put or get of plain arguments needs.
struct Place {
  std::shared_ptr<Heap> heap;
  std::shared_ptr<Channel> group;
  std::shared_ptr<const std::vector<u32>> ranks;
  u64 offset;
  u64 count;
  DType dtype;
  std::shared_ptr<bool> open;  // shared by all parts of an array; false once it was freed

  bool plain(nb::handle array, nb::handle peer, bool writes, Array& found, CallInfo& info) const {
    u32 index;
    Control& control = heap->control();
    if (!*open || group->closed() || control.queued_work() != 0 ||
        !rank_of(peer, static_cast<u32>(ranks->size()), index))
      return false;
    if (!plain_array(array, writes, found) || found.dtype != dtype || found.count != count)
      return false;
    info.dtype = dtype;
    info.count = count;
    info.bytes = found.nbytes();
    info.group = group->slot();
    info.peer = static_cast<i32>((*ranks)[index]);
    info.site = call_site(control.recorder());
    info.flow = current_flow();
    return true;
  }

  bool put(nb::handle src, nb::handle peer, Place* at, nb::handle value, nb::handle op) const {
    Array found;
    CallInfo info;
    Signal signal;
    if ((at && !at->signal_plain(*this, value, op, signal)) ||
        !plain(src, peer, false, found, info))
      return false;
    info.kind = Kind::put;
    PythonCall python;
    LongCall released(info.bytes);
    heap->put(info, offset, static_cast<u32>(info.peer), found.data, false, signal);
    return true;
  }

  bool signal_plain(const Place& data, nb::handle value, nb::handle op, Signal& out) const {
    static PyObject* const set = PyUnicode_InternFromString("set");
    static PyObject* const add = PyUnicode_InternFromString("add");
    if (!*open || group != data.group || !PyLong_CheckExact(value.ptr())) return false;
    if (op.ptr() != set && op.ptr() != add) return false;
    out = {offset, PyLong_AsUnsignedLongLong(value.ptr()),
           op.ptr() == add ? SignalOp::add : SignalOp::set};
    if (!PyErr_Occurred()) return true;
    PyErr_Clear();  // negative or too large
    return false;
  }

  Place part(u64 at, u64 elements) const {
    Place p = *this;
    p.offset = at;
    p.count = elements;
    return p;
  }

  bool get(nb::handle dst, nb::handle peer) const {
    Array found;
    CallInfo info;
    if (!plain(dst, peer, true, found, info)) return false;
    info.kind = Kind::get;
    PythonCall python;
    LongCall released(info.bytes);
    heap->get(info, offset, static_cast<u32>(info.peer), found.data, false);
    return true;
  }
};

// The Python class of symmetric arrays, whose `place` says where they lie.
PyObject* symmetric_array = nullptr;

bool plain_or_symmetric(nb::handle x, bool writes, Array& out) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(x.ptr())) != symmetric_array)
    return plain_array(x, writes, out);
  static PyObject* const name = PyUnicode_InternFromString("place");
  const nb::object attribute = nb::steal(PyObject_GetAttr(x.ptr(), name));
  Place* place = nullptr;
  if (!attribute.is_valid() || !nb::try_cast(attribute, place) || !place || !*place->open) {
    PyErr_Clear();
    return false;
  }
  Heap& heap = *place->heap;
  out = {heap.at(heap.control().rank(), place->offset), place->count, place->dtype, -1, nullptr};
  return true;
}

// One collective of the group on host arrays; false where the arguments are not plain.
bool collective(Channel& channel, u32 kind_code, nb::handle x, nb::handle out, nb::handle op,
                nb::handle root) {
  Control& control = channel.control();
  const Kind kind = static_cast<Kind>(kind_code);
  const u32 size = channel.size();
  if (control.queued_work() != 0) return false;
  Collective call;
  u32 root_rank = 0;
  if (kind == Kind::broadcast) {
    if (!rank_of(root, size, root_rank)) return false;
    call.root = static_cast<i32>(root_rank);
  } else if (kind != Kind::all_gather && kind != Kind::all_to_all &&
             !reduction_of(op, call.info.reduction)) {
    return false;
  }
  const bool in_place = out.is_none();
  const bool writes = in_place && !(kind == Kind::broadcast && root_rank == channel.index());
  Array source, target;
  if (!plain_or_symmetric(x, writes, source)) return false;
  if (in_place) {
    if (kind != Kind::all_reduce && kind != Kind::broadcast) return false;
    target = source;
  } else if (!plain_or_symmetric(out, true, target) || !fits(kind, source, target, size)) {
    return false;
  }
  if (call.info.reduction == Reduction::avg && !is_float(source.dtype)) return false;
  call.info.kind = kind;
  call.info.dtype = source.dtype;
  call.info.count = kind == Kind::reduce_scatter ? target.count
                    : kind == Kind::all_to_all   ? source.count / size
                                                 : source.count;
  call.info.bytes = call.info.count * item_bytes(source.dtype);
  call.info.group = channel.slot();
  call.info.peer = call.root;
  call.info.site = call_site(control.recorder());
  call.info.flow = current_flow();
  call.src = source.data;
  call.dst = target.data;
  PythonCall python;
  LongCall released(source.nbytes());
  channel.run(call, channel.take_ticket());
  return true;
}

// The barrier of a group with what quiet does before it.
bool barrier(Channel& channel, Heap& heap) {
  Control& control = channel.control();
  if (control.queued_work() != 0) return false;
  Collective call;
  call.info.kind = Kind::barrier;
  call.info.dtype = DType::i64;  // as the face announces it: some ranks may not take the lane
  call.info.group = channel.slot();
  call.info.site = call_site(control.recorder());
  call.info.flow = current_flow();
  PythonCall python;
  heap.deliver();
  channel.run(call, channel.take_ticket());
  return true;
}

Place make_place(std::shared_ptr<Heap> heap, std::shared_ptr<Channel> group, std::vector<u32> ranks,
                 u64 offset, u64 count, u32 dtype) {
  return {std::move(heap),
          std::move(group),
          std::make_shared<const std::vector<u32>>(std::move(ranks)),
          offset,
          count,
          static_cast<DType>(dtype),
          std::make_shared<bool>(true)};
}

}  // namespace

void bind_lane(nb::module_& m) {
  m.def("collective", &collective, nb::arg("channel"), nb::arg("kind"), nb::arg("x").none(),
        nb::arg("out").none(), nb::arg("op").none(), nb::arg("root").none());
  m.def(
      "set_symmetric", [](nb::handle type) { symmetric_array = type.inc_ref().ptr(); },
      nb::arg("type"));
  m.def("quiet", &quiet, nb::arg("channel"), nb::arg("heap"));
  m.def("barrier", &barrier, nb::arg("channel"), nb::arg("heap"));
  nb::class_<Place>(m, "Place")
      .def(nb::new_(&make_place), nb::arg("heap"), nb::arg("group"), nb::arg("ranks"),
           nb::arg("offset"), nb::arg("count"), nb::arg("dtype"))
      .def("close", [](Place& p) { *p.open = false; })
      .def("part", &Place::part, nb::arg("offset"), nb::arg("count"))
      .def("put", &Place::put, nb::arg("src").none(), nb::arg("peer").none(),
           nb::arg("signal").none(), nb::arg("value").none(), nb::arg("op").none())
      .def("get", &Place::get, nb::arg("dst").none(), nb::arg("peer").none());
}

}  // namespace bireme
