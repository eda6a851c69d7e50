#include "bind.h"
#include "channel.h"
#include "heap.h"
#include "stream.h"

namespace bireme {
namespace {

CallInfo info_of(Channel& channel, u32 kind, u32 dtype, u64 count, u32 reduction, i32 peer) {
  CallInfo info;
  info.kind = static_cast<Kind>(kind);
  info.dtype = static_cast<DType>(dtype);
  info.count = count;
  info.bytes = count * item_bytes(info.dtype);
  info.reduction = static_cast<Reduction>(reduction);
  info.group = channel.slot();
  info.peer = peer;
  info.site = call_site(channel.control().recorder());
  info.flow = current_flow();
  return info;
}

// Runs now, or queues on the stream and returns the Work.
template <class Task>
std::shared_ptr<Work> now_or_later(const std::shared_ptr<Stream>& later, u64 bytes, Task task) {
  if (later) return later->submit(std::move(task));
  PythonCall python;
  LongCall released(bytes);
  task();
  return nullptr;
}

std::shared_ptr<Work> run(std::shared_ptr<Channel> channel, u32 kind, u32 dtype, u64 count,
                          u32 reduction, i32 root, u64 src, u64 dst, u64 extra,
                          const std::string& detail, const std::string& refused,
                          std::shared_ptr<Stream> later) {
  Collective call;
  call.info = info_of(*channel, kind, dtype, count, reduction, root);
  call.extra = static_cast<u32>(extra);
  call.root = root;
  call.src = reinterpret_cast<const void*>(src);
  call.dst = reinterpret_cast<void*>(dst);
  call.refused = refused;
  call.detail = detail;
  const u64 ticket = channel->take_ticket();
  return now_or_later(later, call.info.bytes,
                      [channel, call, ticket] { channel->run(call, ticket); });
}

}  // namespace

void bind_channel(nb::module_& m) {
  nb::class_<Channel>(m, "Channel")
      .def(nb::init<std::shared_ptr<Control>, std::shared_ptr<Heap>, u32, std::vector<u32>, u32>(),
           nb::arg("control"), nb::arg("heap"), nb::arg("slot"), nb::arg("members"),
           nb::arg("index"))
      .def_prop_ro("slot", &Channel::slot)
      .def("dropped", &Channel::dropped, nb::arg("by"))
      .def_prop_ro("all_dropped", &Channel::all_dropped)
      .def_prop_ro("staged_bytes", &Channel::staged_bytes)
      .def("run", &run, nb::arg("kind"), nb::arg("dtype"), nb::arg("count"), nb::arg("reduction"),
           nb::arg("root"), nb::arg("src"), nb::arg("dst"), nb::arg("extra"), nb::arg("detail"),
           nb::arg("refused"), nb::arg("later").none())
      .def(
          "send",
          [](std::shared_ptr<Channel> channel, u32 dtype, u64 count, u32 to, u64 src,
             std::shared_ptr<Stream> later) {
            const CallInfo info = info_of(*channel, static_cast<u32>(Kind::send), dtype, count, 0,
                                          static_cast<i32>(to));
            return now_or_later(later, info.bytes, [channel, info, to, src] {
              channel->send(info, to, reinterpret_cast<const void*>(src));
            });
          },
          nb::arg("dtype"), nb::arg("count"), nb::arg("to"), nb::arg("src"),
          nb::arg("later").none())
      .def(
          "recv",
          [](std::shared_ptr<Channel> channel, u32 dtype, u64 count, u32 from, u64 dst,
             std::shared_ptr<Stream> later) {
            const CallInfo info = info_of(*channel, static_cast<u32>(Kind::recv), dtype, count, 0,
                                          static_cast<i32>(from));
            return now_or_later(later, info.bytes, [channel, info, from, dst] {
              channel->recv(info, from, reinterpret_cast<void*>(dst));
            });
          },
          nb::arg("dtype"), nb::arg("count"), nb::arg("from"), nb::arg("dst"),
          nb::arg("later").none())
      .def(
          "close",
          [](Channel& channel, bool keep_slot) {
            const CallInfo info = info_of(channel, static_cast<u32>(Kind::close),
                                          static_cast<u32>(DType::u8), 0, 0, -1);
            const u64 ticket = channel.take_ticket();
            PythonCall python;
            channel.close(info, ticket, keep_slot);
          },
          nb::arg("keep_slot"));
}

}  // namespace bireme
