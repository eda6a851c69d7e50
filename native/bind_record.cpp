#include "bind.h"
#include "control.h"

namespace bireme {
namespace {

nb::dict as_dict(const RankBlock& block, const Entry& e) {
  nb::dict d;
  d["seq"] = e.seq;
  d["kind"] = name(static_cast<Kind>(e.kind));
  d["state"] = e.state == 1 ? "running" : e.state == 2 ? "done" : "failed";
  d["engine"] = e.engine;
  d["dtype"] = name(static_cast<DType>(e.dtype));
  d["count"] = e.count;
  d["bytes"] = e.bytes;
  d["group"] = e.group;
  d["group_seq"] = e.group_seq;
  d["peer"] = e.peer;
  d["site"] = text_at(block, e.site);
  d["flow"] = text_at(block, e.flow);
  d["path"] = e.path;
  d["start_ns"] = e.start_ns;
  d["end_ns"] = e.end_ns;
  d["wait_ns"] = e.wait_ns;
  return d;
}

nb::list calls_of(Control& control, u32 rank, u64 last) {
  nb::list out;
  const RankBlock& block = control.block(rank);
  const u64 calls = block.calls.load(std::memory_order_acquire);
  const u64 n = std::min<u64>({calls, last, kRingEntries});
  for (u64 seq = calls - n; seq < calls; ++seq) {
    Entry e;
    if (read_entry(block, seq, e)) out.append(as_dict(block, e));
  }
  return out;
}

nb::list totals_of(Control& control) {
  nb::list out;
  const RankBlock& block = control.block(control.rank());
  for (const auto& [key, t] : control.recorder().totals())
    out.append(nb::make_tuple(text_at(block, key[0]), key[1], name(static_cast<Kind>(key[2])),
                              t.calls, t.bytes, t.time_ns, t.wait_ns));
  return out;
}

}  // namespace

void bind_record(nb::module_& m) {
  m.def(
      "intern", [](Control& c, const std::string& text) { return c.recorder().intern(text); },
      nb::arg("control"), nb::arg("text"));
  m.def("calls", &calls_of, nb::arg("control"), nb::arg("rank"), nb::arg("last"));
  m.def("totals", &totals_of, nb::arg("control"));
}

}  // namespace bireme
