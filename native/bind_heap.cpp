#include <nanobind/ndarray.h>

#include <cstring>

#include "bind.h"
#include "heap.h"

namespace bireme {
namespace {

constexpr u32 kBytes = static_cast<u32>(DType::u8);

CallInfo info_of(Control& control, Kind kind, u32 dtype, u64 count, u32 group, i32 peer) {
  CallInfo info;
  info.kind = kind;
  info.dtype = static_cast<DType>(dtype);
  info.count = count;
  info.bytes = count * item_bytes(info.dtype);
  info.group = group;
  info.peer = peer;
  info.site = call_site(control.recorder());
  info.flow = current_flow();
  return info;
}

Signal signal_at(u64 offset, u64 value, u32 op) {
  return {offset, value, static_cast<SignalOp>(op)};
}

u64 bits_of(nb::handle value, DType dtype) {
  u64 bits = 0;
  if (dtype == DType::f64) {
    const double x = nb::cast<double>(value);
    std::memcpy(&bits, &x, sizeof x);
  } else if (dtype == DType::f32) {
    const float x = static_cast<float>(nb::cast<double>(value));
    std::memcpy(&bits, &x, sizeof x);
  } else if (dtype == DType::i32 || dtype == DType::i64) {
    bits = static_cast<u64>(nb::cast<i64>(value));
  } else {
    bits = nb::cast<u64>(value);
  }
  return bits;
}

nb::object value_of(u64 bits, DType dtype) {
  switch (dtype) {
    case DType::f64: {
      double x;
      std::memcpy(&x, &bits, sizeof x);
      return nb::cast(x);
    }
    case DType::f32: {
      float x;
      std::memcpy(&x, &bits, sizeof x);
      return nb::cast(x);
    }
    case DType::i32:
      return nb::cast(static_cast<i32>(bits));
    case DType::i64:
      return nb::cast(static_cast<i64>(bits));
    case DType::u32:
      return nb::cast(static_cast<u32>(bits));
    default:
      return nb::cast(bits);
  }
}

}  // namespace

void bind_heap(nb::module_& m) {
  nb::class_<Heap>(m, "Heap")
      .def(nb::new_([](std::shared_ptr<Control> control, std::vector<int> fds, u64 bytes,
                       u32 delivery, u64 seed) {
             return std::make_shared<Heap>(std::move(control), std::move(fds), bytes,
                                           static_cast<Delivery>(delivery), seed);
           }),
           nb::arg("control"), nb::arg("fds"), nb::arg("bytes"), nb::arg("delivery"),
           nb::arg("seed"))
      .def_prop_ro("bytes", &Heap::bytes)
      .def(
          "address",
          [](Heap& h, u32 rank, u64 offset) { return reinterpret_cast<u64>(h.at(rank, offset)); },
          nb::arg("rank"), nb::arg("offset"))
      .def(
          "view",
          [](Heap& h, u32 rank, u64 offset, u64 bytes, nb::object owner, bool read_only) {
            const size_t shape[1] = {bytes};
            if (read_only)
              return nb::cast(
                  nb::ndarray<nb::numpy, const u8>(h.at(rank, offset), 1, shape, owner));
            return nb::cast(nb::ndarray<nb::numpy, u8>(h.at(rank, offset), 1, shape, owner));
          },
          nb::arg("rank"), nb::arg("offset"), nb::arg("bytes"), nb::arg("owner"),
          nb::arg("read_only") = false)
      .def("commit", &Heap::commit, nb::arg("offset"), nb::arg("bytes"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("zero", &Heap::zero, nb::arg("offset"), nb::arg("bytes"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("release", &Heap::release, nb::arg("offset"), nb::arg("bytes"))
      .def("close_descriptors", &Heap::close_descriptors)
      .def("put",
           [](Heap& h, u32 dtype, u64 count, u32 group, u64 offset, u32 peer, u64 src, bool nbi,
              u64 signal, u64 value, u32 op) {
             const CallInfo info =
                 info_of(h.control(), Kind::put, dtype, count, group, static_cast<i32>(peer));
             PythonCall python;
             LongCall released(info.bytes);
             h.put(info, offset, peer, reinterpret_cast<const void*>(src), nbi,
                   signal_at(signal, value, op));
           })
      .def("get",
           [](Heap& h, u32 dtype, u64 count, u32 group, u64 offset, u32 peer, u64 dst, bool nbi) {
             const CallInfo info =
                 info_of(h.control(), Kind::get, dtype, count, group, static_cast<i32>(peer));
             PythonCall python;
             LongCall released(info.bytes);
             h.get(info, offset, peer, reinterpret_cast<void*>(dst), nbi);
           })
      .def("signal",
           [](Heap& h, u32 group, u64 offset, u32 peer, u64 value, u32 op) {
             h.signal(info_of(h.control(), Kind::signal, static_cast<u32>(DType::u64), 1, group,
                              static_cast<i32>(peer)),
                      peer, signal_at(offset, value, op));
           })
      .def("signal_wait",
           [](Heap& h, u32 group, const std::vector<u32>& ranks, u64 offset, u32 compare,
              u64 value) {
             PythonCall python;
             const CallInfo info = info_of(h.control(), Kind::signal_wait,
                                           static_cast<u32>(DType::u64), 0, group, -1);
             return h.signal_wait(info, ranks, offset, static_cast<Compare>(compare), value);
           })
      .def("signal_read", &Heap::signal_read, nb::arg("offset"))
      .def("atomic",
           [](Heap& h, u32 dtype, u32 group, u64 offset, u32 peer, u32 op, nb::object value,
              nb::object condition) {
             const auto d = static_cast<DType>(dtype);
             const u64 v = bits_of(value, d), c = bits_of(condition, d);
             const u64 old = h.atomic(
                 info_of(h.control(), Kind::atomic, dtype, 1, group, static_cast<i32>(peer)),
                 offset, peer, static_cast<Atomic>(op), v, c);
             return value_of(old, d);
           })
      .def("fence",
           [](Heap& h, u32 group) {
             h.fence(info_of(h.control(), Kind::fence, kBytes, 0, group, -1));
           })
      .def("quiet", [](Heap& h, u32 group) {
        const CallInfo info = info_of(h.control(), Kind::quiet, kBytes, 0, group, -1);
        nb::gil_scoped_release free;
        h.quiet(info);
      });
}

}  // namespace bireme
