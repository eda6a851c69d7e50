// The record of every call of this rank: a ring in shared memory that all ranks can read, and
// totals by flow that only this rank keeps. Always on.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "dtypes.h"

namespace bireme {

struct CallInfo {
  Kind kind = Kind::none;
  DType dtype = DType::u8;
  u64 count = 0;
  u64 bytes = 0;
  i32 peer = -1;
  u32 group = 0;
  u32 site = 0;
  u32 flow = 0;
  u32 engine = 0;
  Reduction reduction = Reduction::sum;
};

struct Totals {
  u64 calls = 0, bytes = 0, time_ns = 0, wait_ns = 0;
};

inline constexpr u32 kFlows = 64;
inline constexpr u32 kEngines = 4;

class Recorder {
 public:
  explicit Recorder(RankBlock& block) : block_(block) {}

  // One call from begin to end. Ends as failed unless finish() was called.
  class Call {
   public:
    Call(Recorder& recorder, const CallInfo& info);
    ~Call() { end(3); }
    Call(const Call&) = delete;
    void finish() { end(2); }
    void path(u32 path) { own_.path = path; }
    void waited(u64 ns) { own_.wait_ns += ns; }
    void group_seq(u64 seq) { own_.group_seq = seq; }
    u64 seq() const { return own_.seq; }
    const CallInfo& info() const { return info_; }

   private:
    void end(u32 state);
    Recorder& recorder_;
    CallInfo info_;
    Entry own_{};
    Entry* shared_;
  };

  // Adds the time of its scope to what the call has waited.
  class Waiting {
   public:
    explicit Waiting(Call& call) : call_(call), start_ns_(now_ns()) {}
    ~Waiting() { call_.waited(now_ns() - start_ns_); }
    Waiting(const Waiting&) = delete;

   private:
    Call& call_;
    u64 start_ns_;
  };

  // The offset of a text in this rank's shared strings; 0 is the empty text.
  u32 intern(std::string_view text);
  // The small number of a flow; 0 is the calls without one, and all that come after the last.
  u32 flow(std::string_view label);
  u32 flow_text(u32 flow) const { return flows_[flow]; }
  u32 flow_count() const { return flow_count_.load(std::memory_order_acquire); }
  Totals totals(u32 flow, u32 engine, Kind kind) const;

 private:
  friend class Call;
  struct Sums {  // several threads of this rank add
    std::atomic<u64> calls{0}, bytes{0}, time_ns{0}, wait_ns{0};
  };
  RankBlock& block_;
  std::mutex mutex_;
  std::unordered_map<std::string, u32> strings_;
  std::array<u32, kFlows> flows_{};
  std::atomic<u32> flow_count_{1};
  std::array<Sums, kFlows * kEngines* static_cast<u32>(Kind::count_)> sums_{};
};

const char* text_at(const RankBlock& block, u32 offset);

// A consistent copy of an entry, or false while it is being written.
bool read_entry(const RankBlock& block, u64 seq, Entry& out);

// "all_reduce(float32, 1024 elements, sum) at train.py:31"
std::string describe(const RankBlock& block, const Entry& entry);

}  // namespace bireme
