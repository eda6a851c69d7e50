#include <cstring>

#include "bind.h"
#include "control.h"

namespace bireme {
namespace {

std::shared_ptr<Control> make_control(int fd, u32 rank, u32 size, std::vector<int> pidfds,
                                      std::vector<i32> pids, double timeout_s, double warn_s,
                                      int spin) {
  std::vector<Peer> peers;
  for (u32 r = 0; r < size; ++r) peers.push_back({pidfds[r], pids[r]});
  auto control =
      std::make_shared<Control>(fd, rank, size, std::move(peers), Limits{timeout_s, warn_s, spin});
  control->interrupted = python_signal_raised;
  control->release = release_python;
  control->reacquire = reacquire_python;
  return control;
}

// Written by the launcher when it has reaped a rank; it has no world of its own.
void note_exit(int fd, u32 rank, u32 kind, u32 value) {
  Mapping map(fd, 0, control_bytes(0));
  const u32 size = reinterpret_cast<Header*>(map.data())->size;
  if (reinterpret_cast<Header*>(map.data())->magic != kMagic || rank >= size)
    throw Failure(Code::usage,
                  "not the control segment of a world with rank " + std::to_string(rank));
  Mapping whole(fd, 0, control_bytes(size));
  auto* blocks = reinterpret_cast<RankBlock*>(whole.data() + control_bytes(0));
  blocks[rank].fate.store(u64{kind} << 32 | value, std::memory_order_release);
}

}  // namespace

void bind_control(nb::module_& m) {
  m.def("create_segment", &create_segment, nb::arg("name"), nb::arg("bytes"));
  m.def("segment_bytes", &segment_bytes, nb::arg("size"));
  m.def("note_exit", &note_exit, nb::arg("fd"), nb::arg("rank"), nb::arg("kind"), nb::arg("value"));
  m.def("set_package", &set_package, nb::arg("folder"));
  m.def("set_flow", &set_current_flow, nb::arg("flow"));
  m.def("current_flow", &current_flow);

  nb::class_<Control>(m, "Control")
      .def(nb::new_(&make_control), nb::arg("fd"), nb::arg("rank"), nb::arg("size"),
           nb::arg("pidfds"), nb::arg("pids"), nb::arg("timeout_s"), nb::arg("warn_s"),
           nb::arg("spin"))
      .def(
          "abort",
          [](Control& c, u32 code, const std::string& text) {
            c.abort(static_cast<Code>(code), text);
          },
          nb::arg("code"), nb::arg("text"))
      .def(
          "set_state",
          [](Control& c, u32 state, const std::string& note) {
            c.set_state(static_cast<RankState>(state), note);
          },
          nb::arg("state"), nb::arg("note") = "")
      .def("close_descriptors", &Control::close_descriptors)
      .def("stop", &Control::stop)
      .def("forked", &Control::forked)
      .def("forget", [](Control&) { forget_call_sites(); })
      .def("aborted", [](Control& c) { return c.header().abort_code.load() != 0; })
      .def("take_group_slot", &Control::take_group_slot)
      .def("where_is", &Control::where_is, nb::arg("rank"));
}

}  // namespace bireme
