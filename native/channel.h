// The collectives of one group over shared memory.
//
// A channel moves in numbered steps. In each step a member publishes something (an announcement, a
// chunk), stores the step number, and waits until all members have stored it. What a member
// published at step t may be overwritten at step t + 2: having seen everybody at t + 1 it knows
// that everybody has finished reading step t. Two copies of everything, by parity, are enough.
//
// The first step of every collective is the announcement: the fingerprint of the call, where the
// buffers lie, and the payload itself where it is small. All members see the same n announcements
// and so take the same path, or raise the same error.
#pragma once

#include <condition_variable>
#include <span>

#include "control.h"
#include "kernels.h"

namespace bireme {

class Heap;

struct Collective {
  CallInfo info;  // count is per block: elements of one rank's part
  u32 extra = 0;  // a further number that must agree
  i32 root = -1;  // index in the group
  const void* src = nullptr;
  void* dst = nullptr;
  std::string refused;  // not empty: this member's arguments were wrong
  std::string detail;   // for errors: what `extra` stands for
};

enum class Path : u32 { none, inline_, staged, direct, sliced };

class Channel {
 public:
  // `members` are world ranks in group order; `index` is this rank's place among them.
  Channel(std::shared_ptr<Control> control, std::shared_ptr<Heap> heap, u32 slot,
          std::vector<u32> members, u32 index);

  u32 size() const { return static_cast<u32>(members_.size()); }
  u32 index() const { return index_; }
  u32 slot() const { return slot_; }
  bool closed() const { return closed_; }
  // Arrays of this rank that the program has dropped and that are not freed yet; barriers tell the
  // others. After a barrier, whether every member had some: then all collect.
  void dropped(i64 by) { dropped_.fetch_add(by, std::memory_order_relaxed); }
  bool all_dropped() const { return all_dropped_; }
  Control& control() { return *control_; }

  // Calls of one channel run in the order of their tickets, whichever thread runs them.
  u64 take_ticket() { return next_ticket_++; }
  void run(const Collective& call, u64 ticket);
  void send(const CallInfo& info, u32 to, const void* src);
  void recv(const CallInfo& info, u32 from, void* dst);
  // Leaves the group: a collective. The slot is free for others afterwards.
  void close(const CallInfo& info, u64 ticket, bool keep_slot);

  // Bytes this rank copied into shared staging memory: none where buffers lie in the heap.
  u64 staged_bytes() const { return staged_bytes_; }

 private:
  friend class Turn;
  struct Exchange;
  Member& member(u32 i) const { return members_at_[i]; }
  Pipe& pipe(u32 from, u32 to) const { return pipes_at_[from * control_->size() + to]; }
  void publish_step();
  void wait_step(u64 step, Recorder::Call& record);
  void announce(const Exchange& x, Recorder::Call& record);
  void compare();
  [[noreturn]] void fail_refused(u32 who);
  [[noreturn]] void fail_mismatch();
  std::string described(u32 i) const;
  Path choose(const Exchange& x) const;
  void move(Exchange& x, Recorder::Call& record);
  void staged(Exchange& x, Recorder::Call& record);
  void direct(Exchange& x);
  void sliced(Exchange& x);
  [[noreturn]] void fail_pipe(const PipeSlot& slot, const CallInfo& mine, u32 from);

  std::shared_ptr<Control> control_;
  std::shared_ptr<Heap> heap_;
  u32 slot_, index_;
  std::vector<u32> members_;
  Mapping mapping_;
  Member* members_at_;
  Pipe* pipes_at_;
  u64 step_ = 0;
  bool closed_ = false;
  std::atomic<i64> dropped_{0};
  bool all_dropped_ = false;
  u64 staged_bytes_ = 0;
  std::vector<const void*> sources_;  // of the call that has its turn
  std::vector<void*> targets_;
  std::atomic<u64> next_ticket_{0};
  std::atomic<u64> serving_{0};
  std::atomic<u32> queued_{0};  // threads that sleep until their turn
  std::mutex turn_mutex_;
  std::condition_variable turn_;
  std::vector<std::mutex> send_mutex_, recv_mutex_;
};

}  // namespace bireme
