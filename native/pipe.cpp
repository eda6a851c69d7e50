// Two-sided send and recv: a small ring of slots from every member to every other. A message that
// fits the ring is buffered, so a small send returns before its recv is called.
#include <algorithm>
#include <cstring>

#include "channel.h"

namespace bireme {

void Channel::send(const CallInfo& info, u32 to, const void* src) {
  std::lock_guard turn(send_mutex_[to]);
  control_->check();
  if (closed_) throw Failure(Code::usage, "the group is closed");
  Recorder::Call record(control_->recorder(), info);
  Pipe& p = pipe(index_, to);
  const std::vector<u32> other{members_[to]};
  const Wait what{&other, &record, true};
  u64 at = 0;
  do {
    const u64 n = std::min(kPipeBytes, info.bytes - at);
    const u64 slot_number = p.produced.load(std::memory_order_relaxed);
    control_->wait(what, [&] {
      return slot_number - p.consumed.load(std::memory_order_acquire) < kPipeSlots;
    });
    PipeSlot& slot = p.slot[slot_number % kPipeSlots];
    slot.dtype = static_cast<u32>(info.dtype);
    slot.site = info.site;
    slot.count = info.count;
    slot.bytes = n;
    slot.first = at == 0;
    if (n) std::memcpy(slot.data, static_cast<const u8*>(src) + at, n);
    at += n;
    p.produced.store(slot_number + 1, std::memory_order_release);
    control_->ring(members_[to]);
  } while (at < info.bytes);
  record.finish();
}

void Channel::recv(const CallInfo& info, u32 from, void* dst) {
  std::lock_guard turn(recv_mutex_[from]);
  control_->check();
  if (closed_) throw Failure(Code::usage, "the group is closed");
  Recorder::Call record(control_->recorder(), info);
  Pipe& p = pipe(from, index_);
  const std::vector<u32> other{members_[from]};
  const Wait what{&other, &record, true};
  u64 at = 0;
  do {
    const u64 slot_number = p.consumed.load(std::memory_order_relaxed);
    control_->wait(what, [&] { return p.produced.load(std::memory_order_acquire) > slot_number; });
    const PipeSlot& slot = p.slot[slot_number % kPipeSlots];
    if (slot.dtype != static_cast<u32>(info.dtype) || slot.count != info.count ||
        slot.first != (at == 0))
      fail_pipe(slot, info, from);
    if (slot.bytes) std::memcpy(static_cast<u8*>(dst) + at, slot.data, slot.bytes);
    at += slot.bytes;
    p.consumed.store(slot_number + 1, std::memory_order_release);
    control_->ring(members_[from]);
  } while (at < info.bytes);
  record.finish();
}

void Channel::fail_pipe(const PipeSlot& slot, const CallInfo& mine, u32 from) {
  Entry theirs{}, ours{};
  theirs.kind = static_cast<u32>(Kind::send);
  theirs.dtype = slot.dtype;
  theirs.count = slot.count;
  theirs.site = slot.site;
  theirs.peer = static_cast<i32>(control_->rank());
  ours.kind = static_cast<u32>(Kind::recv);
  ours.dtype = static_cast<u32>(mine.dtype);
  ours.count = mine.count;
  ours.site = mine.site;
  ours.peer = static_cast<i32>(members_[from]);
  const std::string text =
      "a send and its recv differ; expected the same dtype and count, found:\n  rank " +
      std::to_string(members_[from]) + ": " + describe(control_->block(members_[from]), theirs) +
      "\n  rank " + std::to_string(control_->rank()) + ": " +
      describe(control_->block(control_->rank()), ours);
  control_->abort(Code::mismatch, text);
  throw Failure(Code::mismatch, text);
}

}  // namespace bireme
