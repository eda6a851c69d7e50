// The control segment of a world: who is alive, who waits for whom, and how every wait ends.
//
// A wait ends when its condition holds, when some rank writes the abort word, when a peer it needs
// has died, when its deadline passes, or when a Python signal handler raises. See wait().
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"
#include "failure.h"
#include "recorder.h"
#include "segment.h"

namespace bireme {

struct Peer {
  int pidfd;  // owned; -1 where the system has none
  i32 pid;
};

struct Limits {
  double timeout_s;
  double warn_s;
  int spin;  // polls before yielding
};

// What a wait is for: the ranks that can end it, and whether leaving it half way breaks a protocol.
struct Wait {
  const std::vector<u32>* ranks;
  Recorder::Call* call;
  bool breaks;  // leaving early leaves the group out of step: the world must end
};

class Control {
 public:
  Control(int fd, u32 rank, u32 size, std::vector<Peer> peers, Limits limits);
  ~Control();
  Control(const Control&) = delete;

  u32 rank() const { return rank_; }
  u32 size() const { return size_; }
  int fd() const { return fd_; }
  RankBlock& block(u32 rank) const { return blocks_[rank]; }
  Header& header() const { return *header_; }
  Recorder& recorder() { return recorder_; }
  const Limits& limits() const { return limits_; }

  // Throws what the abort word says; cheap where it says nothing.
  void check() const {
    if (header_->abort_code.load(std::memory_order_acquire) != 0 || stopped_) fail_from_abort();
  }
  // Ends the world for everybody; the first text wins.
  void abort(Code code, const std::string& text);
  void set_state(RankState state, const std::string& note = "");
  // Lets go of the descriptors; what is mapped stays mapped. Nothing is waited for afterwards.
  void close_descriptors();
  void stop() { stopped_ = true; }  // local: every wait of this process ends
  void forked() { forked_ = stopped_ = true; }
  bool is_forked() const { return forked_; }

  // Lets other Python threads run while this one sleeps. Polling keeps the interpreter: it is
  // short.
  class Blocking {
   public:
    explicit Blocking(Control& control) : control_(control) {
      if (control.release) token_ = control.release();
    }
    ~Blocking() {
      if (token_) control_.reacquire(token_);
    }
    Blocking(const Blocking&) = delete;

   private:
    Control& control_;
    void* token_ = nullptr;
  };

  template <class Done>
  void wait(const Wait& what, Done&& done) {
    // A wait of a few cache misses is not worth two looks at the clock.
    for (int i = limits_.spin ? kPolls : 1; i > 0; --i)
      if (done()) return;
    Recorder::Waiting timed(*what.call);
    for (int i = limits_.spin; i > 0; --i) {
      pause();
      if (done()) return;
    }
    Blocking released(*this);
    for (int i = 0; i < kYields; ++i) {
      yield();
      if (done()) return;
    }
    sleep_until(what, std::function<bool()>(std::ref(done)));
  }

  // Between a store that another rank may sleep for and the look whether it does. Where sleepers
  // interrupt all ranks before they sleep (membarrier), the writer needs no fence of its own.
  void fence_before_ring() {
    if (sleepers_fence_)
      std::atomic_signal_fence(std::memory_order_seq_cst);
    else
      std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void ring_fenced(u32 rank) {
    if (blocks_[rank].waiting.load(std::memory_order_relaxed) != 0) wake(rank);
  }
  // After a write that another rank may wait for.
  void ring(u32 rank) {
    fence_before_ring();
    ring_fenced(rank);
  }
  // After a signal or an atomic: only waits for signals look at those.
  void ring_signal(u32 rank) {
    fence_before_ring();
    if (blocks_[rank].awaits_signal.load(std::memory_order_relaxed) != 0) wake(rank);
  }

  // Takes and returns one of the world's group slots.
  u32 take_group_slot();
  void return_group_slot(u32 slot);

  std::string where_is(u32 rank) const;  // one line about a rank, for error texts
  std::string where_all_are() const;

  // Asynchronous work of this rank that has not finished, on all its streams.
  int queued_work() const { return queued_work_.load(std::memory_order_acquire); }
  void work_queued(int by) { queued_work_.fetch_add(by, std::memory_order_acq_rel); }

  // Run when a wait blocks: lazy puts land then. `soon` is false for collectives, whose waits do
  // not complete puts by themselves; they land after a while so that progress is certain.
  std::function<void()> on_block;
  // Returns true when a Python signal handler raised (the Python error is set then).
  std::function<bool()> interrupted;
  // Release the interpreter where this thread holds it, and take it back.
  void* (*release)() = nullptr;
  void (*reacquire)(void*) = nullptr;

 private:
  static constexpr int kYields = 64;
  static constexpr int kPolls = 2000;
  static void pause();
  static void yield();
  void sleep_until(const Wait& what, const std::function<bool()>& done);
  void wake(u32 rank);
  void watch_peers(const Wait& what, const std::function<bool()>& done);
  bool peer_ended(u32 rank) const;
  std::string fate_of(u32 rank) const;
  void time_out(const Wait& what);
  void warn(const Wait& what, double waited_s) const;
  [[noreturn]] void fail_from_abort() const;

  int fd_;
  u32 rank_, size_;
  std::vector<Peer> peers_;
  Limits limits_;
  Mapping mapping_;
  Header* header_;
  RankBlock* blocks_;
  Recorder recorder_;
  std::atomic<bool> stopped_{false};
  bool forked_ = false;
  bool sleepers_fence_;
  std::atomic<int> queued_work_{0};
};

}  // namespace bireme
