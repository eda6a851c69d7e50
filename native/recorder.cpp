#include "recorder.h"

#include <cstring>

namespace bireme {
namespace {

// Entry is all plain words behind `version`: they are copied as they stand and the version tells
// whether the copy is whole.
constexpr size_t kBody = sizeof(Entry) - offsetof(Entry, seq);

void copy_body(const Entry& from, Entry& to) {
  std::memcpy(reinterpret_cast<char*>(&to) + offsetof(Entry, seq),
              reinterpret_cast<const char*>(&from) + offsetof(Entry, seq), kBody);
}

void open(Entry& e) {
  e.version.fetch_add(1, std::memory_order_acq_rel);
  std::atomic_thread_fence(std::memory_order_release);
}
void close(Entry& e) { e.version.fetch_add(1, std::memory_order_release); }

size_t place(u32 flow, u32 engine, Kind kind) {
  return (flow * kEngines + engine) * static_cast<u32>(Kind::count_) + static_cast<u32>(kind);
}

bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

}  // namespace

Recorder::Call::Call(Recorder& recorder, const CallInfo& info) : recorder_(recorder), info_(info) {
  seq_ = recorder.block_.calls.fetch_add(1, std::memory_order_relaxed);
  entry_ = &recorder.block_.ring[seq_ % kRingEntries];
  start_ns_ = now_ns();
  Entry& e = *entry_;
  open(e);
  e.seq = seq_;
  e.kind = static_cast<u32>(info.kind);
  e.state = 1;
  e.engine = info.engine;
  e.dtype = static_cast<u32>(info.dtype);
  e.count = info.count;
  e.bytes = info.bytes;
  e.group_seq = 0;
  e.group = info.group;
  e.peer = info.peer;
  e.site = info.site;
  e.flow = recorder.flows_[info.flow];
  e.path = 0;
  e.reduction = static_cast<u32>(info.reduction);
  e.start_ns = start_ns_;
  e.end_ns = 0;
  e.wait_ns = 0;
  close(e);
}

void Recorder::Call::path(u32 path) { entry_->path = path; }
void Recorder::Call::group_seq(u64 seq) { entry_->group_seq = seq; }

void Recorder::Call::end(u32 state) {
  if (ended_) return;
  ended_ = true;
  const u64 end_ns = now_ns();
  if (entry_->seq == seq_) {  // not yet overwritten by a later call
    open(*entry_);
    entry_->state = state;
    entry_->end_ns = end_ns;
    entry_->wait_ns = wait_ns_;
    close(*entry_);
  }
  Sums& t = recorder_.sums_[place(info_.flow, info_.engine, info_.kind)];
  t.calls.fetch_add(1, std::memory_order_relaxed);
  t.bytes.fetch_add(info_.bytes, std::memory_order_relaxed);
  t.time_ns.fetch_add(end_ns - start_ns_, std::memory_order_relaxed);
  if (wait_ns_) t.wait_ns.fetch_add(wait_ns_, std::memory_order_relaxed);
}

u32 Recorder::intern(std::string_view text) {
  if (text.empty()) return 0;
  std::lock_guard lock(mutex_);
  auto [at, fresh] = strings_.try_emplace(std::string(text), 0);
  if (!fresh) return at->second;
  u32 used = block_.string_bytes.load(std::memory_order_relaxed);
  if (used == 0) used = 1;  // offset 0 stays the empty text
  if (used + text.size() + 1 > kStringBytes) return 0;
  std::memcpy(block_.strings + used, text.data(), text.size());
  block_.strings[used + text.size()] = 0;
  at->second = used;
  block_.string_bytes.store(used + static_cast<u32>(text.size()) + 1, std::memory_order_release);
  return used;
}

u32 Recorder::flow(std::string_view label) {
  const u32 text = intern(label);
  std::lock_guard lock(mutex_);
  const u32 known = flow_count_.load(std::memory_order_relaxed);
  for (u32 i = 0; i < known; ++i)
    if (flows_[i] == text) return i;
  if (known == kFlows) return 0;
  flows_[known] = text;
  flow_count_.store(known + 1, std::memory_order_release);
  return known;
}

Totals Recorder::totals(u32 flow, u32 engine, Kind kind) const {
  const Sums& s = sums_[place(flow, engine, kind)];
  return {s.calls.load(std::memory_order_relaxed), s.bytes.load(std::memory_order_relaxed),
          s.time_ns.load(std::memory_order_relaxed), s.wait_ns.load(std::memory_order_relaxed)};
}

const char* text_at(const RankBlock& block, u32 offset) {
  return offset < block.string_bytes.load(std::memory_order_acquire) ? block.strings + offset : "";
}

bool read_entry(const RankBlock& block, u64 seq, Entry& out) {
  const Entry& e = block.ring[seq % kRingEntries];
  for (int tries = 0; tries < 100; ++tries) {
    const u64 before = e.version.load(std::memory_order_acquire);
    if (before & 1) continue;
    copy_body(e, out);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (e.version.load(std::memory_order_relaxed) == before) return out.seq == seq && before != 0;
  }
  return false;
}

std::string describe(const RankBlock& block, const Entry& e) {
  const Kind kind = static_cast<Kind>(e.kind);
  std::string text = name(kind);
  if (e.dtype < static_cast<u32>(DType::count_) && kind <= Kind::atomic && kind != Kind::barrier) {
    text += std::string("(") + name(static_cast<DType>(e.dtype)) + ", " + std::to_string(e.count) +
            (e.count == 1 ? " element" : " elements");
    if (reduces(kind)) text += std::string(", ") + name(static_cast<Reduction>(e.reduction));
    if (e.peer >= 0) text += ", rank " + std::to_string(e.peer);
    text += ")";
  }
  if (const char* site = text_at(block, e.site); *site) text += std::string(" at ") + site;
  return text;
}

}  // namespace bireme
