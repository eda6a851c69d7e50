// The symmetric heap and the one-sided operations on it.
//
// Eager delivery: a put is a copy into the peer's mapped heap. Lazy delivery, for tests: plain puts
// wait in a queue until quiet, or until this rank blocks in a wait; a put with signal carries its
// own data only. Random delivery lets queued puts land at random calls in random order, as far as
// fences allow, and signals come late. A right program gives the same results in all three.
#pragma once

#include <deque>
#include <random>

#include "control.h"

namespace bireme {

enum class Delivery : u32 { eager, lazy, random };
enum class Compare : u32 { eq, ne, gt, ge, lt, le };
enum class SignalOp : u32 { set, add };
enum class Atomic : u32 { fetch, set, add, band, bor, bxor, swap, compare_swap };

struct Signal {
  u64 offset = kNone;
  u64 value = 1;
  SignalOp op = SignalOp::set;
};

class Heap {
 public:
  // `bytes` are reserved for each rank; memory is taken by commit.
  Heap(std::shared_ptr<Control> control, std::vector<int> fds, u64 bytes, Delivery delivery,
       u64 seed);
  ~Heap();
  Heap(const Heap&) = delete;

  Control& control() { return *control_; }
  u64 bytes() const { return bytes_; }
  bool defers() const { return delivery_ != Delivery::eager; }
  u8* at(u32 rank, u64 offset) const { return maps_[rank].data() + offset; }
  // The offset of a local address in this rank's heap, or kNone.
  u64 offset_of(const void* p, u64 bytes) const;

  void put(CallInfo info, u64 offset, u32 peer, const void* src, bool nbi, Signal signal);
  void get(CallInfo info, u64 offset, u32 peer, void* dst, bool nbi);
  void signal(CallInfo info, u32 peer, Signal signal);
  // Waits until the word at `offset` of the own heap compares; returns the value that did.
  u64 signal_wait(CallInfo info, const std::vector<u32>& ranks, u64 offset, Compare compare,
                  u64 value);
  u64 signal_read(u64 offset) const;
  // The old value; `value` and the result are the bits of the element.
  u64 atomic(CallInfo info, u64 offset, u32 peer, Atomic op, u64 value, u64 condition);
  void fence(CallInfo info);
  void quiet(CallInfo info);
  void deliver();  // what quiet does, unrecorded
  // Takes memory for a part of the own heap, which grows to hold it. Returns false where the system
  // has no more.
  bool commit(u64 offset, u64 bytes);
  void zero(u64 offset, u64 bytes);
  void release(u64 offset, u64 bytes);  // give the pages of the own part back
  void close_descriptors();             // what is mapped stays mapped

 private:
  struct Pending {
    u32 peer;
    u64 offset;
    u64 bytes;
    const void* src;       // read when it lands (nbi)
    std::vector<u8> copy;  // or the data itself (blocking)
    void* get_into;        // a get_nbi
    bool fence;
  };
  void land(Pending& op);
  void land_all();
  void land_fenced(u32 peer);  // what a fence orders before the next operation to this peer
  void land_some();            // random delivery: maybe one, whichever may land
  void dawdle();               // random delivery: a short delay
  void apply(u32 peer, const Signal& signal);

  std::shared_ptr<Control> control_;
  u64 bytes_;
  Delivery delivery_;
  std::mt19937_64 random_;
  std::vector<Mapping> maps_;
  std::vector<int> fds_;
  std::mutex mutex_;
  std::deque<Pending> pending_;
};

bool holds(u64 found, Compare compare, u64 value);

}  // namespace bireme
