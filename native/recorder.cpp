#include "recorder.h"

#include <atomic>
#include <cstring>

namespace bireme {
namespace {

// An entry crosses ranks word by word, each word atomic; `version` tells whether the copy is whole.
constexpr size_t kWords = (sizeof(Entry) - offsetof(Entry, seq)) / sizeof(u64);

u64* words_of(const Entry& e) {
  return reinterpret_cast<u64*>(const_cast<char*>(reinterpret_cast<const char*>(&e)) +
                                offsetof(Entry, seq));
}

void store(Entry& shared, const Entry& own) {
  const u64* from = words_of(own);
  u64* to = words_of(shared);
  const u64 version = shared.version.load(std::memory_order_relaxed);
  shared.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (size_t i = 0; i < kWords; ++i)
    std::atomic_ref(to[i]).store(from[i], std::memory_order_relaxed);
  shared.version.store(version + 2, std::memory_order_release);
}

bool load(const Entry& shared, Entry& own) {
  const u64 before = shared.version.load(std::memory_order_acquire);
  if (before == 0 || before & 1) return false;
  const u64* from = words_of(shared);
  u64* to = words_of(own);
  for (size_t i = 0; i < kWords; ++i)
    to[i] = std::atomic_ref(const_cast<u64&>(from[i])).load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  return shared.version.load(std::memory_order_relaxed) == before;
}

size_t place(u32 flow, u32 engine, Kind kind) {
  return (flow * kEngines + engine) * static_cast<u32>(Kind::count_) + static_cast<u32>(kind);
}

bool reduces(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::reduce || kind == Kind::reduce_scatter;
}

}  // namespace

Recorder::Call::Call(Recorder& recorder, const CallInfo& info) : recorder_(recorder), info_(info) {
  own_.seq = recorder.block_.calls.fetch_add(1, std::memory_order_relaxed);
  own_.kind = static_cast<u32>(info.kind);
  own_.state = 1;
  own_.engine = info.engine;
  own_.dtype = static_cast<u32>(info.dtype);
  own_.count = info.count;
  own_.bytes = info.bytes;
  own_.group = info.group;
  own_.peer = info.peer;
  own_.site = info.site;
  own_.flow = recorder.flows_[info.flow];
  own_.reduction = static_cast<u32>(info.reduction);
  own_.start_ns = now_ns();
  shared_ = &recorder.block_.ring[own_.seq % kRingEntries];
  store(*shared_, own_);
}

void Recorder::Call::end(u32 state) {
  if (own_.state != 1) return;
  own_.state = state;
  own_.end_ns = now_ns();
  // A call that outlasted a whole ring of others has lost its place to one of them.
  if (recorder_.block_.calls.load(std::memory_order_relaxed) - own_.seq <= kRingEntries)
    store(*shared_, own_);
  Sums& t = recorder_.sums_[place(info_.flow, info_.engine, info_.kind)];
  t.calls.fetch_add(1, std::memory_order_relaxed);
  t.bytes.fetch_add(info_.bytes, std::memory_order_relaxed);
  t.time_ns.fetch_add(own_.end_ns - own_.start_ns, std::memory_order_relaxed);
  if (own_.wait_ns) t.wait_ns.fetch_add(own_.wait_ns, std::memory_order_relaxed);
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
  for (int tries = 0; tries < 100; ++tries)
    if (load(e, out)) return out.seq == seq;
  return false;
}

std::string describe(const RankBlock& block, const Entry& e) {
  const Kind kind = static_cast<Kind>(e.kind);
  std::string text = name(kind);
  if (e.dtype < static_cast<u32>(DType::count_) && kind != Kind::barrier &&
      (kind <= Kind::atomic || kind == Kind::allocate)) {
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
