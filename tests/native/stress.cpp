// Ranks as threads over one mapping: every lock-free part of the core under load, with results that
// carry rank and sequence number, so that a stale or torn read shows as a wrong value. Built with
// ThreadSanitizer, AddressSanitizer or UndefinedBehaviorSanitizer by `make sanitize`.
//
//   stress RANKS ROUNDS SEED
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "channel.h"
#include "heap.h"
#include "stream.h"

using namespace bireme;

namespace {

constexpr u64 kHeapBytes = 8 << 20;
std::atomic<int> wrong{0};

void expect(bool good, const char* what, u32 rank, u64 round) {
  if (good) return;
  ++wrong;
  std::fprintf(stderr, "wrong: %s on rank %u in round %lu\n", what, rank, round);
}

struct Rank {
  Rank(int control_fd, const std::vector<int>& heaps, u32 rank, u32 size) : rank(rank), size(size) {
    std::vector<Peer> peers(size, Peer{-1, getpid()});
    control = std::make_shared<Control>(dup(control_fd), rank, size, peers, Limits{60, 30, 50});
    std::vector<int> fds;
    for (int fd : heaps) fds.push_back(dup(fd));
    heap = std::make_shared<Heap>(control, fds, kHeapBytes, Delivery::eager, 0);
    std::vector<u32> members;
    for (u32 r = 0; r < size; ++r) members.push_back(r);
    channel = std::make_shared<Channel>(control, heap, 0, members, rank);
  }

  Collective call(Kind kind, u64 count, const void* src, void* dst) {
    Collective c;
    c.info.kind = kind;
    c.info.dtype = DType::i64;
    c.info.count = count;
    c.src = src;
    c.dst = dst;
    return c;
  }
  void run(const Collective& c) { channel->run(c, channel->take_ticket()); }
  void barrier() { run(call(Kind::barrier, 0, nullptr, nullptr)); }
  i64* words(u32 of, u64 offset) { return reinterpret_cast<i64*>(heap->at(of, offset)); }

  u32 rank, size;
  std::shared_ptr<Control> control;
  std::shared_ptr<Heap> heap;
  std::shared_ptr<Channel> channel;
};

// The value that a rank holds at place i in a round.
i64 value(u32 rank, u64 round, u64 i) {
  return static_cast<i64>(round * 1000003 + rank * 7919 + i);
}

i64 sum_of(const Rank& r, u64 round, u64 i) {
  i64 sum = 0;
  for (u32 p = 0; p < r.size; ++p) sum += value(p, round, i);
  return sum;
}

void all_reduce(Rank& r, u64 round, u64 count, bool in_heap) {
  std::vector<i64> own(count);
  i64* x = in_heap ? r.words(r.rank, 0) : own.data();
  for (u64 i = 0; i < count; ++i) x[i] = value(r.rank, round, i);
  r.run(r.call(Kind::all_reduce, count, x, x));
  for (u64 i = 0; i < count; ++i)
    if (x[i] != sum_of(r, round, i)) return expect(false, "all_reduce", r.rank, round);
  r.barrier();  // the heap is used again in the next round
}

void all_to_all(Rank& r, u64 round, u64 count) {
  std::vector<i64> x(count * r.size), y(count * r.size);
  for (u64 i = 0; i < x.size(); ++i) x[i] = value(r.rank, round, i);
  r.run(r.call(Kind::all_to_all, count, x.data(), y.data()));
  for (u32 p = 0; p < r.size; ++p)
    for (u64 i = 0; i < count; ++i)
      if (y[p * count + i] != value(p, round, r.rank * count + i))
        return expect(false, "all_to_all", r.rank, round);
}

// Every rank puts to its right neighbour with a signal and waits for its left one.
void put_ring(Rank& r, u64 round, u64 count) {
  const u64 data = 4 << 20, signal = 6 << 20;
  const u32 right = (r.rank + 1) % r.size, left = (r.rank + r.size - 1) % r.size;
  std::vector<i64> x(count);
  for (u64 i = 0; i < count; ++i) x[i] = value(r.rank, round, i);
  CallInfo info;
  info.kind = Kind::put;
  info.dtype = DType::i64;
  info.count = count;
  info.bytes = count * 8;
  r.heap->put(info, data, right, x.data(), false, {signal, round + 1, SignalOp::set});
  info.kind = Kind::signal_wait;
  const std::vector<u32> ranks{left};
  r.heap->signal_wait(info, ranks, signal, Compare::ge, round + 1);
  for (u64 i = 0; i < count; ++i)
    if (r.words(r.rank, data)[i] != value(left, round, i))
      return expect(false, "put with signal", r.rank, round);
  r.barrier();
}

void atomics(Rank& r, u64 round) {
  const u64 counter = 7 << 20;
  CallInfo info;
  info.kind = Kind::atomic;
  info.dtype = DType::i64;
  for (u32 k = 0; k < 20; ++k) r.heap->atomic(info, counter, k % r.size, Atomic::add, 1, 0);
  r.barrier();
  u64 total = 0;
  for (u32 p = 0; p < r.size; ++p) total += r.heap->atomic(info, counter, p, Atomic::fetch, 0, 0);
  expect(total == 20 * r.size * (round + 1), "atomics", r.rank, round);
  r.barrier();
}

void send_ring(Rank& r, u64 round, u64 count) {
  if (r.size == 1) return;
  const u32 right = (r.rank + 1) % r.size, left = (r.rank + r.size - 1) % r.size;
  std::vector<i64> x(count, value(r.rank, round, count)), y(count);
  CallInfo info;
  info.kind = Kind::send;
  info.dtype = DType::i64;
  info.count = count;
  info.bytes = count * 8;
  Stream stream(r.control);
  auto sent = stream.submit([&, info] { r.channel->send(info, right, x.data()); });
  info.kind = Kind::recv;
  r.channel->recv(info, left, y.data());
  sent->wait(-1);
  for (i64 v : y)
    if (v != value(left, round, count)) return expect(false, "send", r.rank, round);
}

void queued(Rank& r, u64 round, Stream& stream) {
  constexpr u64 kCalls = 8;
  std::vector<std::vector<i64>> x;
  std::vector<std::shared_ptr<Work>> works;
  for (u64 k = 0; k < kCalls; ++k) x.push_back(std::vector<i64>(300, value(r.rank, round, k)));
  for (u64 k = 0; k < kCalls; ++k) {
    const Collective c = r.call(Kind::all_reduce, 300, x[k].data(), x[k].data());
    const u64 ticket = r.channel->take_ticket();
    works.push_back(stream.submit([&r, c, ticket] { r.channel->run(c, ticket); }));
  }
  for (auto& work : works) work->wait(-1);
  for (u64 k = 0; k < kCalls; ++k)
    if (x[k][299] != sum_of(r, round, k)) return expect(false, "queued call", r.rank, round);
}

// What an observer does: reads the other ranks' records while they write them.
void observe(Rank& r, u64 round) {
  for (u32 p = 0; p < r.size; ++p)
    expect(r.control->where_is(p).find("rank") == 0, "where_is", r.rank, round);
}

void rank_main(Rank& r, u64 rounds, u64 seed) {
  std::mt19937_64 random(seed);  // the same on all ranks: the same calls
  Stream stream(r.control);
  for (u64 round = 0; round < rounds; ++round) {
    const u64 counts[] = {0, 1, 7, 1000, 1025, 40000};
    const u64 count = counts[random() % 6];
    all_reduce(r, round, count, random() & 1);
    all_to_all(r, round, count / r.size);
    put_ring(r, round, count);
    atomics(r, round);
    send_ring(r, round, count);
    queued(r, round, stream);
    observe(r, round);
  }
}

void guarded(Rank& r, u64 rounds, u64 seed) {
  try {
    rank_main(r, rounds, seed);
  } catch (const std::exception& error) {
    ++wrong;
    std::fprintf(stderr, "rank %u: %s\n", r.rank, error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const u32 size = argc > 1 ? static_cast<u32>(std::atoi(argv[1])) : 3;
  const u64 rounds = argc > 2 ? static_cast<u64>(std::atoll(argv[2])) : 50;
  const u64 seed = argc > 3 ? static_cast<u64>(std::atoll(argv[3])) : 1;
  Mapping::one_per_process = true;
  const int control = create_segment("stress-control", segment_bytes(size));
  std::vector<int> heaps;
  for (u32 r = 0; r < size; ++r) heaps.push_back(create_segment("stress-heap", kHeapBytes));
  std::vector<std::unique_ptr<Rank>> ranks;
  for (u32 r = 0; r < size; ++r) ranks.push_back(std::make_unique<Rank>(control, heaps, r, size));
  std::vector<std::thread> threads;
  for (auto& rank : ranks) threads.emplace_back([&] { guarded(*rank, rounds, seed); });
  for (auto& thread : threads) thread.join();
  std::printf("%u ranks, %lu rounds, seed %lu: %d wrong\n", size, rounds, seed, wrong.load());
  return wrong != 0;
}
