// What lies in shared memory: the control segment of one world on one host.
//
//   Header | RankBlock x size | group block x kMaxGroups (each mapped by its members only)
//
// Every field that two ranks touch is a std::atomic; the rest is written by one rank and published
// by a release store of a flag. The segment starts zeroed, so every struct must be valid as zeros.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace bireme {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;
using i64 = std::int64_t;

inline constexpr u64 kNone = ~u64{0};  // "not in the heap"
inline constexpr u64 kMagic = 0x656d65726962;
inline constexpr u32 kLayoutVersion = 1;
inline constexpr u32 kMaxGroups = 1024;
inline constexpr u64 kPage = 4096;

inline constexpr u64 kInlineBytes = 8 << 10;   // payload that travels with the announcement
inline constexpr u64 kChunkBytes = 256 << 10;  // one step of a staged collective
inline constexpr u64 kStreamBytes = 4 << 20;   // larger results are stored past the cache
inline constexpr u64 kPipeBytes = 64 << 10;    // one slot of a send/recv pipe
inline constexpr u32 kPipeSlots = 2;

inline constexpr u32 kRingEntries = 4096;
inline constexpr u32 kStringBytes = 64 << 10;

enum class Code : u32 { ok, usage, mismatch, peer_lost, timeout, aborted, engine };
enum class RankState : u32 { joining, running, closed, finished, failed };

// The kinds of calls, as the recorder and the fingerprints know them.
enum class Kind : u32 {
  none,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  gather,
  scatter,
  all_to_all,
  barrier,
  send,
  recv,
  put,
  get,
  atomic,
  signal,
  signal_wait,
  quiet,
  fence,
  allocate,
  free,
  split,
  agree,  // an all_gather of the library's own, inside allocations and splits
  close,
  refused,
  count_
};

struct Header {
  u64 magic;
  u32 version;
  u32 size;
  alignas(64) std::atomic<u32> abort_claim;  // first writer of the abort text wins
  std::atomic<u32> abort_code;               // a Code, published after the text
  u32 abort_rank;
  char abort_text[4096];
  alignas(64) std::atomic<u64> groups[kMaxGroups / 64];  // slots taken
};

// One call of one rank, as observers see it. Written by its rank only; `version` is odd while it
// is being written.
struct Entry {
  std::atomic<u64> version;
  u64 seq;
  u32 kind;
  u32 state;  // 1 running, 2 done, 3 failed
  u32 engine;
  u32 dtype;
  u64 count;
  u64 bytes;
  u64 group_seq;
  u32 group;
  i32 peer;  // root, or the other side; -1 for none
  u32 site;  // offset of the call site in the rank's strings
  u32 flow;
  u32 path;
  u32 reduction;
  u64 start_ns;
  u64 end_ns;
  u64 wait_ns;
  u64 unused[3];
};
static_assert(sizeof(Entry) == 128);

struct alignas(kPage) RankBlock {
  std::atomic<u32> doorbell;       // futex word: changes whenever a waiting rank should look again
  std::atomic<u32> waiting;        // number of threads of this rank that sleep
  std::atomic<u32> awaits_signal;  // those of them that wait for a signal
  alignas(64) std::atomic<u32> state;
  std::atomic<u64> fate;  // (kind << 32 | value) written by the launcher: 1 exit code, 2 signal
  u32 pid;
  char note[1024];                     // the exception that ended it
  alignas(64) std::atomic<u64> calls;  // entries begun
  std::atomic<u32> string_bytes;
  Entry ring[kRingEntries];
  char strings[kStringBytes];
};

// What one member says about its next call, and the flag that it has said it, in one cache line: a
// call of up to 16 bytes crosses in one. Larger payloads follow in the next lines.
struct alignas(64) Announcement {
  std::atomic<u64> step;  // stored last: the rest of this step is there
  u8 kind;
  u8 dtype;
  u8 reduction;
  u8 refused;  // 1: the member's own arguments were wrong; the text says why
  i32 root;
  u64 count;
  u32 extra;  // what else must agree, such as the shape of an allocation
  // not compared: where the user called, and where the buffers lie
  u32 site;
  u64 src_offset;
  u64 dst_offset;
  u8 tiny[16];
  u8 data[kInlineBytes];
  char text[512];

  const u8* payload(u64 bytes) const { return bytes <= sizeof tiny ? tiny : data; }
  u8* payload(u64 bytes) { return bytes <= sizeof tiny ? tiny : data; }
};
static_assert(offsetof(Announcement, data) == 64);

struct alignas(kPage) Member {
  Announcement said[2];  // by parity of the step
  alignas(kPage) u8 stage[2][kChunkBytes];
};

struct PipeSlot {
  u32 dtype;
  u32 site;
  u64 count;
  u64 bytes;
  u32 first;
  alignas(64) u8 data[kPipeBytes];
};

struct alignas(kPage) Pipe {
  alignas(64) std::atomic<u64> produced;
  alignas(64) std::atomic<u64> consumed;
  PipeSlot slot[kPipeSlots];
};

constexpr u64 control_bytes(u32 size) {
  return (sizeof(Header) + kPage - 1) / kPage * kPage + size * sizeof(RankBlock);
}
// A group block is as large as the world needs, whatever the group's size: offsets stay simple and
// untouched pages cost nothing.
constexpr u64 group_bytes(u32 size) {
  return size * sizeof(Member) + u64{size} * size * sizeof(Pipe);
}
constexpr u64 segment_bytes(u32 size) {
  return control_bytes(size) + kMaxGroups * group_bytes(size);
}

static_assert(std::atomic<u64>::is_always_lock_free && std::atomic<u32>::is_always_lock_free);

}  // namespace bireme
