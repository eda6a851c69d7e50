#include "heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

namespace bireme {
namespace {

constexpr u8 kPoison = 0xff;  // NaN as a float, -1 as an integer: what get_nbi shows before quiet

template <class T>
std::atomic_ref<T> word(u8* at) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(at));
}

template <class T>
T from_bits(u64 bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
u64 to_bits(T value) {
  u64 bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T add_float(std::atomic_ref<T> w, T value) {
  T old = w.load(std::memory_order_relaxed);
  while (!w.compare_exchange_weak(old, old + value, std::memory_order_acq_rel)) {
  }
  return old;
}

template <class T>
u64 apply_atomic(u8* at, Atomic op, u64 value_bits, u64 condition_bits) {
  const auto w = word<T>(at);
  const T value = from_bits<T>(value_bits);
  switch (op) {
    case Atomic::fetch:
      return to_bits(w.load(std::memory_order_acquire));
    case Atomic::set:
      [[fallthrough]];
    case Atomic::swap:
      return to_bits(w.exchange(value, std::memory_order_acq_rel));
    default:
      break;
  }
  if constexpr (std::is_floating_point_v<T>) {
    if (op == Atomic::add) return to_bits(add_float(w, value));
  } else {
    switch (op) {
      case Atomic::add:
        return to_bits(w.fetch_add(value, std::memory_order_acq_rel));
      case Atomic::band:
        return to_bits(w.fetch_and(value, std::memory_order_acq_rel));
      case Atomic::bor:
        return to_bits(w.fetch_or(value, std::memory_order_acq_rel));
      case Atomic::bxor:
        return to_bits(w.fetch_xor(value, std::memory_order_acq_rel));
      case Atomic::compare_swap: {
        T expected = from_bits<T>(condition_bits);
        w.compare_exchange_strong(expected, value, std::memory_order_acq_rel);
        return to_bits(expected);
      }
      default:
        break;
    }
  }
  throw Failure(Code::engine, "this atomic does not exist for this dtype");
}

}  // namespace

bool holds(u64 found, Compare compare, u64 value) {
  switch (compare) {
    case Compare::eq:
      return found == value;
    case Compare::ne:
      return found != value;
    case Compare::gt:
      return found > value;
    case Compare::ge:
      return found >= value;
    case Compare::lt:
      return found < value;
    case Compare::le:
      return found <= value;
  }
  return false;
}

Heap::Heap(std::shared_ptr<Control> control, std::vector<int> fds, u64 bytes, Delivery delivery,
           u64 seed)
    : control_(std::move(control)),
      bytes_(bytes),
      delivery_(delivery),
      random_(seed),
      fds_(std::move(fds)) {
  for (int fd : fds_) maps_.emplace_back(fd, 0, bytes, true);
  if (defers()) control_->on_block = [this] { deliver(); };
}

Heap::~Heap() {
  control_->on_block = nullptr;
  close_descriptors();
}

void Heap::close_descriptors() {
  for (int fd : fds_) ::close(fd);
  fds_.clear();
}

u64 Heap::offset_of(const void* p, u64 bytes) const {
  const u8* base = maps_[control_->rank()].data();
  const u8* at = static_cast<const u8*>(p);
  if (!p || at < base || at + bytes > base + bytes_) return kNone;
  return static_cast<u64>(at - base);
}

void Heap::put(CallInfo info, u64 offset, u32 peer, const void* src, bool nbi, Signal signal) {
  control_->check();
  Recorder::Call record(control_->recorder(), info);
  if (defers()) {
    std::lock_guard lock(mutex_);
    land_some();
    Pending op{peer, offset, info.bytes, src, {}, nullptr, false};
    if (signal.offset != kNone) {
      land_fenced(peer);
      land(op);
      dawdle();
      apply(peer, signal);
    } else {
      if (!nbi) {
        const u8* from = static_cast<const u8*>(src);
        op.copy.assign(from, from + info.bytes);
      }
      pending_.push_back(std::move(op));
    }
  } else {
    if (info.bytes) std::memmove(at(peer, offset), src, info.bytes);
    if (signal.offset != kNone) apply(peer, signal);
  }
  record.finish();
}

void Heap::get(CallInfo info, u64 offset, u32 peer, void* dst, bool nbi) {
  control_->check();
  Recorder::Call record(control_->recorder(), info);
  if (defers() && nbi) {
    std::lock_guard lock(mutex_);
    if (info.bytes) std::memset(dst, kPoison, info.bytes);
    pending_.push_back({peer, offset, info.bytes, nullptr, {}, dst, false});
  } else if (info.bytes) {
    std::memmove(dst, at(peer, offset), info.bytes);
  }
  record.finish();
}

void Heap::apply(u32 peer, const Signal& s) {
  const auto w = word<u64>(at(peer, s.offset));
  if (s.op == SignalOp::set)
    w.store(s.value, std::memory_order_release);
  else
    w.fetch_add(s.value, std::memory_order_acq_rel);
  control_->ring_signal(peer);
}

void Heap::signal(CallInfo info, u32 peer, Signal s) {
  control_->check();
  Recorder::Call record(control_->recorder(), info);
  if (defers()) {
    std::lock_guard lock(mutex_);
    land_fenced(peer);
  }
  apply(peer, s);
  record.finish();
}

u64 Heap::signal_read(u64 offset) const {
  return word<u64>(at(control_->rank(), offset)).load(std::memory_order_acquire);
}

u64 Heap::signal_wait(CallInfo info, const std::vector<u32>& ranks, u64 offset, Compare compare,
                      u64 value) {
  control_->check();
  Recorder::Call record(control_->recorder(), info);
  u64 found = 0;
  control_->wait({&ranks, &record, false}, [&] {
    found = signal_read(offset);
    return holds(found, compare, value);
  });
  record.finish();
  return found;
}

u64 Heap::atomic(CallInfo info, u64 offset, u32 peer, Atomic op, u64 value, u64 condition) {
  control_->check();
  Recorder::Call record(control_->recorder(), info);
  if (defers()) {
    std::lock_guard lock(mutex_);
    land_fenced(peer);
  }
  u8* where = at(peer, offset);
  u64 old = 0;
  switch (info.dtype) {
    case DType::i32:
      old = apply_atomic<i32>(where, op, value, condition);
      break;
    case DType::i64:
      old = apply_atomic<i64>(where, op, value, condition);
      break;
    case DType::u32:
      old = apply_atomic<u32>(where, op, value, condition);
      break;
    case DType::u64:
      old = apply_atomic<u64>(where, op, value, condition);
      break;
    case DType::f32:
      old = apply_atomic<float>(where, op, value, condition);
      break;
    case DType::f64:
      old = apply_atomic<double>(where, op, value, condition);
      break;
    default:
      throw Failure(Code::engine, std::string("no atomics on ") + name(info.dtype));
  }
  control_->ring_signal(peer);
  record.finish();
  return old;
}

void Heap::land(Pending& op) {
  if (op.fence || op.bytes == 0) return;
  if (op.get_into)
    std::memmove(op.get_into, at(op.peer, op.offset), op.bytes);
  else
    std::memmove(at(op.peer, op.offset), op.copy.empty() ? op.src : op.copy.data(), op.bytes);
}

void Heap::land_all() {
  for (Pending& op : pending_) land(op);
  pending_.clear();
}

void Heap::land_fenced(u32 peer) {
  auto last = pending_.end();
  for (auto it = pending_.begin(); it != pending_.end(); ++it)
    if (it->fence) last = it;
  if (last == pending_.end()) return;
  std::deque<Pending> kept;
  for (auto it = pending_.begin(); it != pending_.end(); ++it) {
    if (it < last && !it->fence && !it->get_into && it->peer == peer)
      land(*it);
    else
      kept.push_back(std::move(*it));
  }
  pending_ = std::move(kept);
}

// A random one of what no fence holds back: the operations before the first fence.
void Heap::land_some() {
  if (delivery_ != Delivery::random || random_() % 2) return;
  while (!pending_.empty() && pending_.front().fence) pending_.pop_front();
  size_t free = 0;
  while (free < pending_.size() && !pending_[free].fence) ++free;
  if (free == 0) return;
  const auto chosen = pending_.begin() + static_cast<std::ptrdiff_t>(random_() % free);
  land(*chosen);
  pending_.erase(chosen);
}

void Heap::dawdle() {
  if (delivery_ == Delivery::random) usleep(static_cast<useconds_t>(random_() % 200));
}

void Heap::fence(CallInfo info) {
  control_->check();
  Recorder::Call record(control_->recorder(), info);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (defers()) {
    std::lock_guard lock(mutex_);
    if (!pending_.empty()) pending_.push_back({0, 0, 0, nullptr, {}, nullptr, true});
  }
  record.finish();
}

void Heap::quiet(CallInfo info) {
  control_->check();
  Recorder::Call record(control_->recorder(), info);
  deliver();
  record.finish();
}

void Heap::deliver() {
  if (defers()) {
    std::lock_guard lock(mutex_);
    land_all();
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

bool Heap::commit(u64 offset, u64 bytes) {
  const int fd = fds_[control_->rank()];
  struct stat info;
  if (fstat(fd, &info) != 0) return false;
  const u64 end = offset + bytes;
  if (static_cast<u64>(info.st_size) < end && ftruncate(fd, static_cast<off_t>(end)) != 0)
    return false;
  return bytes == 0 || fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0;
}

void Heap::zero(u64 offset, u64 bytes) {
  if (bytes) std::memset(at(control_->rank(), offset), 0, bytes);
}

void Heap::release(u64 offset, u64 bytes) {
  const u64 begin = (offset + kPage - 1) / kPage * kPage, end = (offset + bytes) / kPage * kPage;
  if (begin < end) madvise(at(control_->rank(), begin), end - begin, MADV_REMOVE);
}

}  // namespace bireme
