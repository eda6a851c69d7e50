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
  e.flow = info.flow;
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
  std::lock_guard lock(recorder_.mutex_);
  Totals& t = recorder_.totals_[{info_.flow, info_.engine, static_cast<u32>(info_.kind)}];
  t.calls += 1;
  t.bytes += info_.bytes;
  t.time_ns += end_ns - start_ns_;
  t.wait_ns += wait_ns_;
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

std::map<TotalsKey, Totals> Recorder::totals() const {
  std::lock_guard lock(mutex_);
  return totals_;
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
