#include "control.h"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bireme {
namespace {

constexpr u64 kMs = 1'000'000;
constexpr u64 kSleepNs = 1 * kMs;      // longest sleep: a lost wake-up costs no more
constexpr u64 kPeerCheckNs = 5 * kMs;  // between looks at the peers' pidfds
constexpr u64 kSignalNs = 100 * kMs;   // between looks for Python signals
constexpr u64 kLazyNs = 10 * kMs;      // after which a blocked collective lets lazy puts land
constexpr u64 kFateNs = 200 * kMs;     // how long to wait for the launcher's word on a dead rank

long futex(std::atomic<u32>* word, int op, u32 value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<u32*>(word), op, value, timeout, nullptr, 0);
}

std::string seconds(u64 ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) * 1e-9);
  return text;
}

long membarrier(int command) { return syscall(SYS_membarrier, command, 0, 0); }

// Whether this system lets a sleeper fence the other ranks. All ranks run on one kernel, so all
// find the same.
bool register_membarrier() {
  const long can = membarrier(MEMBARRIER_CMD_QUERY);
  return can > 0 && can & MEMBARRIER_CMD_GLOBAL_EXPEDITED &&
         membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0;
}

template <size_t N>
void copy_text(char (&to)[N], const std::string& text) {
  const size_t n = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), n);
  to[n] = 0;
}

}  // namespace

Control::Control(int fd, u32 rank, u32 size, std::vector<Peer> peers, Limits limits)
    : fd_(fd),
      rank_(rank),
      size_(size),
      peers_(std::move(peers)),
      limits_(limits),
      mapping_(fd, 0, control_bytes(size)),
      header_(reinterpret_cast<Header*>(mapping_.data())),
      blocks_(reinterpret_cast<RankBlock*>(mapping_.data() + control_bytes(size) -
                                           size * sizeof(RankBlock))),
      recorder_(blocks_[rank]),
      sleepers_fence_(register_membarrier()) {
  if (rank == 0) {
    header_->magic = kMagic;
    header_->version = kLayoutVersion;
    header_->size = size;
    header_->groups[0].fetch_or(1);  // slot 0 is the world's own
  }
  blocks_[rank].pid = static_cast<u32>(getpid());
  set_state(RankState::running);
}

Control::~Control() { close_descriptors(); }

void Control::close_descriptors() {
  for (Peer& peer : peers_) {
    if (peer.pidfd >= 0) ::close(peer.pidfd);
    peer.pidfd = -1;
  }
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Control::pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

void Control::yield() { sched_yield(); }

void Control::wake(u32 rank) {
  blocks_[rank].doorbell.fetch_add(1, std::memory_order_release);
  futex(&blocks_[rank].doorbell, FUTEX_WAKE, INT32_MAX, nullptr);
}

void Control::sleep_until(const Wait& what, const std::function<bool()>& done) {
  RankBlock& me = blocks_[rank_];
  const u64 start = now_ns();
  u64 peers_at = start, signals_at = start + kSignalNs;
  bool delivered = false, warned = false;
  struct Marked {
    Marked(RankBlock& me, bool signal) : me(me), signal(signal) {
      if (signal) me.awaits_signal.fetch_add(1, std::memory_order_seq_cst);
      me.waiting.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Marked() {
      me.waiting.fetch_sub(1, std::memory_order_relaxed);
      if (signal) me.awaits_signal.fetch_sub(1, std::memory_order_relaxed);
    }
    RankBlock& me;
    bool signal;
  } marked(me, !what.breaks);
  if (sleepers_fence_) membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
  for (;;) {
    const u32 bell = me.doorbell.load(std::memory_order_acquire);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (done()) break;
    check();
    const u64 now = now_ns();
    if (!delivered && on_block && (!what.breaks || now - start > kLazyNs)) {
      delivered = true;
      on_block();
    }
    if (now >= peers_at) {
      watch_peers(what, done);
      peers_at = now + kPeerCheckNs;
    }
    if (interrupted && now >= signals_at) {
      signals_at = now + kSignalNs;
      if (interrupted()) {
        if (what.breaks)
          abort(Code::aborted, "rank " + std::to_string(rank_) + " was interrupted in " +
                                   name(what.call->info().kind));
        throw Interrupted();
      }
    }
    const double waited_s = static_cast<double>(now - start) * 1e-9;
    if (waited_s > limits_.timeout_s) time_out(what);
    if (!warned && waited_s > limits_.warn_s) {
      warned = true;
      warn(what, waited_s);
    }
    const timespec nap{0, static_cast<long>(kSleepNs)};
    futex(&me.doorbell, FUTEX_WAIT, bell, &nap);
  }
}

bool Control::peer_ended(u32 rank) const {
  const Peer& peer = peers_[rank];
  if (peer.pidfd >= 0) {
    pollfd p{peer.pidfd, POLLIN, 0};
    return poll(&p, 1, 0) == 1;
  }
  return kill(peer.pid, 0) != 0 && errno == ESRCH;
}

// A rank that closed its world has done its part. One that finished without closing is missed only
// by those that wait for it; any other end is an accident and ends the world.
void Control::watch_peers(const Wait& what, const std::function<bool()>& done) {
  for (u32 r = 0; r < size_; ++r) {
    if (r == rank_ || !peer_ended(r)) continue;
    const auto state = static_cast<RankState>(blocks_[r].state.load(std::memory_order_acquire));
    if (state == RankState::closed || done()) continue;
    bool needed = false;
    for (u32 member : *what.ranks) needed |= member == r;
    if (state == RankState::finished && !needed) continue;
    const std::string fate = fate_of(r);
    if (done()) continue;
    check();
    abort(Code::peer_lost,
          "rank " + std::to_string(r) + " (pid " + std::to_string(blocks_[r].pid) + ") " + fate);
    check();
  }
}

std::string Control::fate_of(u32 rank) const {
  const RankBlock& b = blocks_[rank];
  const auto state = static_cast<RankState>(b.state.load(std::memory_order_acquire));
  if (state == RankState::failed) return std::string("failed: ") + b.note;
  u64 fate = 0;  // the launcher, where there is one, writes it when it has reaped the rank
  for (const u64 until = now_ns() + kFateNs;
       (fate = b.fate.load(std::memory_order_acquire)) == 0;) {
    if (now_ns() > until) break;
    usleep(1000);
  }
  const u32 value = static_cast<u32>(fate);
  if (fate >> 32 == 2)
    return "was killed by signal " + std::to_string(value) + " (" +
           strsignal(static_cast<int>(value)) + ")";
  const std::string code = fate >> 32 == 1 ? " with exit code " + std::to_string(value) : "";
  if (state == RankState::finished) return "finished" + code + " without closing its world";
  return "ended" + (code.empty() ? std::string(" abruptly") : code);
}

std::string Control::where_is(u32 rank) const {
  const RankBlock& b = blocks_[rank];
  std::string text = "rank " + std::to_string(rank) + ": ";
  switch (static_cast<RankState>(b.state.load(std::memory_order_acquire))) {
    case RankState::joining:
      return text + "has not joined";
    case RankState::closed:
      return text + "closed its world";
    case RankState::finished:
      return text + "finished";
    case RankState::failed:
      return text + "failed: " + b.note;
    case RankState::running:
      break;
  }
  const u64 calls = b.calls.load(std::memory_order_acquire);
  Entry e;
  if (calls == 0 || !read_entry(b, calls - 1, e)) return text + "made no call yet";
  const std::string call = describe(b, e) + ", call " + std::to_string(e.seq);
  if (e.state == 1) return text + "in " + call + ", for " + seconds(now_ns() - e.start_ns);
  return text + "outside any call for " + seconds(now_ns() - e.end_ns) + "; its last: " + call;
}

std::string Control::where_all_are() const {
  std::string text;
  for (u32 r = 0; r < size_; ++r) text += "\n  " + where_is(r);
  return text;
}

void Control::time_out(const Wait& what) {
  char head[160];
  std::snprintf(head, sizeof head, "rank %u: %s did not finish within %.3g s (BIREME_TIMEOUT_S)",
                rank_, name(what.call->info().kind), limits_.timeout_s);
  const std::string text = head + std::string("; where the ranks are:") + where_all_are();
  if (what.breaks) abort(Code::timeout, text);
  throw Failure(Code::timeout, text);
}

void Control::warn(const Wait& what, double waited_s) const {
  std::fprintf(stderr, "bireme: rank %u has waited %.0f s in %s; where the ranks are:%s\n", rank_,
               waited_s, name(what.call->info().kind), where_all_are().c_str());
  std::fflush(stderr);
}

void Control::abort(Code code, const std::string& text) {
  u32 free = 0;
  if (header_->abort_claim.compare_exchange_strong(free, 1)) {
    copy_text(header_->abort_text, text);
    header_->abort_rank = rank_;
    header_->abort_code.store(static_cast<u32>(code), std::memory_order_release);
  } else {
    for (int i = 0; i < 1000 && header_->abort_code.load(std::memory_order_acquire) == 0; ++i)
      usleep(100);
  }
  for (u32 r = 0; r < size_; ++r) ring(r);
}

void Control::fail_from_abort() const {
  if (forked_)
    throw Failure(Code::usage,
                  "this process was forked from rank " + std::to_string(rank_) +
                      "; a forked child cannot communicate, only read what it inherited");
  const auto code = static_cast<Code>(header_->abort_code.load(std::memory_order_acquire));
  if (code != Code::ok) throw Failure(code, header_->abort_text);
  throw Failure(Code::usage, "rank " + std::to_string(rank_) + ": the world is closed");
}

void Control::set_state(RankState state, const std::string& note) {
  RankBlock& me = blocks_[rank_];
  if (!note.empty()) copy_text(me.note, note);
  me.state.store(static_cast<u32>(state), std::memory_order_release);
}

u32 Control::take_group_slot() {
  for (u32 w = 0; w < kMaxGroups / 64; ++w) {
    u64 taken = header_->groups[w].load(std::memory_order_relaxed);
    while (~taken != 0) {
      const u64 bit = ~taken & (taken + 1);
      if (header_->groups[w].compare_exchange_weak(taken, taken | bit))
        return w * 64 + static_cast<u32>(__builtin_ctzll(bit));
    }
  }
  throw Failure(Code::engine, "all " + std::to_string(kMaxGroups) +
                                  " groups of the world are in use; close() those that are done");
}

void Control::return_group_slot(u32 slot) {
  header_->groups[slot / 64].fetch_and(~(u64{1} << (slot % 64)));
}

}  // namespace bireme
