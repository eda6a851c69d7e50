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
  const Recorder& recorder = control.recorder();
  for (u32 flow = 0; flow < recorder.flow_count(); ++flow)
    for (u32 engine = 0; engine < kEngines; ++engine)
      for (u32 kind = 0; kind < static_cast<u32>(Kind::count_); ++kind) {
        const Totals t = recorder.totals(flow, engine, static_cast<Kind>(kind));
        if (t.calls == 0) continue;
        out.append(nb::make_tuple(text_at(block, recorder.flow_text(flow)), engine,
                                  name(static_cast<Kind>(kind)), t.calls, t.bytes, t.time_ns,
                                  t.wait_ns));
      }
  return out;
}

}  // namespace

void bind_record(nb::module_& m) {
  m.def(
      "flow", [](Control& c, const std::string& label) { return c.recorder().flow(label); },
      nb::arg("control"), nb::arg("label"));
  m.def(
      "here", [](Control& c) { return text_at(c.block(c.rank()), call_site(c.recorder())); },
      nb::arg("control"));
  m.def("calls", &calls_of, nb::arg("control"), nb::arg("rank"), nb::arg("last"));
  m.def("totals", &totals_of, nb::arg("control"));
}

}  // namespace bireme
