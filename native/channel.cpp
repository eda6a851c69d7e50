#include "channel.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "heap.h"

namespace bireme {
namespace {

// What each kind of collective does, as the three questions a data path asks.
struct Shape {
  bool blocks;       // the source holds a block for each rank (else one whole part)
  bool all_publish;  // every rank's source is read (else only the root's)
  bool all_consume;  // every rank gets a result (else only the root)
  enum { fold, concat, copy } how;
};

Shape shape_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return {false, true, true, Shape::fold};
    case Kind::reduce:
      return {false, true, false, Shape::fold};
    case Kind::broadcast:
      return {false, false, true, Shape::copy};
    case Kind::agree:
    case Kind::all_gather:
      return {false, true, true, Shape::concat};
    case Kind::gather:
      return {false, true, false, Shape::concat};
    case Kind::reduce_scatter:
      return {true, true, true, Shape::fold};
    case Kind::scatter:
      return {true, false, true, Shape::copy};
    case Kind::all_to_all:
      return {true, true, true, Shape::concat};
    default:
      return {false, false, false, Shape::copy};
  }
}

bool moves_nothing(Kind kind) { return kind >= Kind::barrier && kind != Kind::agree; }

u8* plus(const void* p, u64 bytes) { return const_cast<u8*>(static_cast<const u8*>(p)) + bytes; }

}  // namespace

// A call's turn in its channel. It costs no lock where nobody else is in line.
class Turn {
 public:
  Turn(Channel& channel, u64 ticket) : channel_(channel) {
    if (channel.serving_.load(std::memory_order_acquire) != ticket) queue(ticket);
  }
  ~Turn() {
    channel_.serving_.fetch_add(1, std::memory_order_seq_cst);
    if (channel_.queued_.load(std::memory_order_seq_cst) == 0) return;
    std::lock_guard lock(channel_.turn_mutex_);
    channel_.turn_.notify_all();
  }

 private:
  void queue(u64 ticket) {
    Control& control = *channel_.control_;
    Control::Blocking released(control);
    struct Queued {
      explicit Queued(std::atomic<u32>& n) : n(n) { n.fetch_add(1, std::memory_order_seq_cst); }
      ~Queued() { n.fetch_sub(1, std::memory_order_relaxed); }
      std::atomic<u32>& n;
    } queued(channel_.queued_);
    std::unique_lock lock(channel_.turn_mutex_);
    while (!channel_.turn_.wait_for(lock, std::chrono::milliseconds(50), [&] {
      return channel_.serving_.load(std::memory_order_seq_cst) == ticket;
    })) {
      control.check();
      if (control.interrupted && control.interrupted()) {
        control.abort(Code::aborted, "rank " + std::to_string(control.rank()) +
                                         " was interrupted before its turn in a group");
        throw Interrupted();
      }
    }
  }
  Channel& channel_;
};

// One collective under way: its shape and its sizes in bytes.
struct Channel::Exchange {
  Exchange(const Collective& call, u32 size, std::vector<const void*>& pointers)
      : call(call),
        shape(shape_of(call.info.kind)),
        item(item_bytes(call.info.dtype)),
        count(call.info.count),
        part(count * item),
        source(shape.blocks ? part * size : part),
        pointers(pointers) {
    if (shape.how == Shape::fold && count) fold = fold_for(call.info.dtype, call.info.reduction);
  }

  bool publishes(u32 i) const { return shape.all_publish || static_cast<u32>(call.root) == i; }
  bool consumes(u32 i) const {
    const bool root = static_cast<u32>(call.root) == i;
    if (call.info.kind == Kind::broadcast && root)
      return false;  // it has the data, maybe read-only
    return shape.all_consume || root;
  }

  // Gives `n` elements at `at` of this rank's result what the sources hold.
  void consume(u64 at, u64 n, u32 size) {
    u8* dst = plus(call.dst, at * item);
    if (shape.how == Shape::fold) {
      void* out = dst;
      fold(&out, 1, pointers.data(), size, n, false);
    } else if (shape.how == Shape::copy) {
      const void* from = pointers[static_cast<u32>(call.root)];
      if (from != dst) std::memcpy(dst, from, n * item);
    } else {
      for (u32 r = 0; r < size; ++r)
        if (u8* to = dst + r * part; to != pointers[r]) std::memcpy(to, pointers[r], n * item);
    }
  }

  const Collective& call;
  Shape shape;
  u64 item, count, part, source;
  std::vector<const void*>& pointers;  // where each rank's data for this rank lies
  Fold fold = nullptr;
};

Channel::Channel(std::shared_ptr<Control> control, std::shared_ptr<Heap> heap, u32 slot,
                 std::vector<u32> members, u32 index)
    : control_(std::move(control)),
      heap_(std::move(heap)),
      slot_(slot),
      index_(index),
      members_(std::move(members)),
      mapping_(control_->fd(),
               control_bytes(control_->size()) + slot * group_bytes(control_->size()),
               group_bytes(control_->size())),
      members_at_(reinterpret_cast<Member*>(mapping_.data())),
      pipes_at_(reinterpret_cast<Pipe*>(mapping_.data() + control_->size() * sizeof(Member))),
      sources_(members_.size()),
      send_mutex_(members_.size()),
      recv_mutex_(members_.size()) {}

void Channel::publish_step() {
  ++step_;
  member(index_).said[step_ & 1].step.store(step_, std::memory_order_release);
  control_->fence_before_ring();
  for (u32 r : members_)
    if (r != control_->rank()) control_->ring_fenced(r);
}

void Channel::wait_step(u64 step, Recorder::Call& record) {
  const Wait what{&members_, &record, true};
  for (u32 i = 0; i < size(); ++i) {
    if (i == index_) continue;
    auto& theirs = member(i).said[step & 1].step;
    control_->wait(what, [&] { return theirs.load(std::memory_order_acquire) >= step; });
  }
}

void Channel::announce(const Exchange& x, Recorder::Call& record) {
  wait_step(step_, record);  // a refused call did not wait for the others
  const u64 step = step_ + 1;
  Announcement& said = member(index_).said[step & 1];
  const Collective& call = x.call;
  const CallInfo& info = call.info;
  said.kind = static_cast<u8>(info.kind);
  said.dtype = static_cast<u8>(info.dtype);
  said.count = info.count;
  said.reduction = static_cast<u8>(info.reduction);
  said.root = call.root;
  said.extra = call.extra;
  said.site = info.site;
  said.refused = !call.refused.empty();
  if (const std::string& text = said.refused ? call.refused : call.detail; !text.empty()) {
    const size_t n = std::min(text.size(), sizeof said.text - 1);
    std::memcpy(said.text, text.data(), n);
    said.text[n] = 0;
  }
  const bool mine = x.publishes(index_);
  said.src_offset = mine ? heap_->offset_of(call.src, x.source) : kNone;
  const u64 result = x.shape.how == Shape::concat ? x.part * size() : x.part;
  said.dst_offset = x.consumes(index_) ? heap_->offset_of(call.dst, result) : kNone;
  if (info.kind == Kind::barrier)
    said.src_offset = static_cast<u64>(dropped_.load(std::memory_order_relaxed));
  // In place, an exchange of blocks would overwrite what others still read.
  if (info.kind == Kind::all_to_all && call.src == call.dst) said.src_offset = kNone;
  if (mine && x.source && x.source <= kInlineBytes && call.refused.empty()) {
    std::memcpy(said.payload(x.source), call.src, x.source);
  }
  publish_step();
}

void Channel::compare() {
  const Announcement& mine = member(index_).said[step_ & 1];
  bool same = true, dropped = mine.kind == static_cast<u32>(Kind::barrier);
  for (u32 i = 0; i < size(); ++i) {
    const Announcement& a = member(i).said[step_ & 1];
    if (a.refused) fail_refused(i);
    dropped &= a.src_offset != 0;
    same &= a.kind == mine.kind && a.dtype == mine.dtype && a.count == mine.count &&
            a.reduction == mine.reduction && a.root == mine.root && a.extra == mine.extra;
  }
  if (!same) fail_mismatch();
  all_dropped_ = dropped;
}

std::string Channel::described(u32 i) const {
  const Announcement& a = member(i).said[step_ & 1];
  const RankBlock& block = control_->block(members_[i]);
  Entry e{};
  e.kind = a.kind;
  e.dtype = a.refused ? static_cast<u32>(DType::count_) : a.dtype;  // refused: unknown
  e.count = a.count;
  e.reduction = a.reduction;
  e.peer = a.root >= 0 && a.root < static_cast<i32>(size())
               ? static_cast<i32>(members_[static_cast<u32>(a.root)])
               : -1;
  e.site = a.site;
  std::string text = describe(block, e);
  if (a.extra && !a.refused) text += std::string(" [") + a.text + "]";
  return text;
}

void Channel::fail_refused(u32 who) {
  const Announcement& a = member(who).said[step_ & 1];
  throw Failure(Code::mismatch, "rank " + std::to_string(members_[who]) + " refused " +
                                    described(who) + ": " + a.text + "; this rank called " +
                                    described(index_) +
                                    "; no data moved and the world stays usable");
}

void Channel::fail_mismatch() {
  std::string text = "the ranks made different calls as call " + std::to_string(step_) +
                     " of their group; expected the same call on all, found:";
  for (u32 i = 0; i < size(); ++i)
    text += "\n  rank " + std::to_string(members_[i]) + ": " + described(i);
  control_->abort(Code::mismatch, text);
  throw Failure(Code::mismatch, text);
}

// Decided from what all members have published, so all decide alike.
Path Channel::choose(const Exchange& x) const {
  if (x.count == 0 || moves_nothing(x.call.info.kind)) return Path::none;
  if (size() == 1) return Path::direct;
  if (x.source <= kInlineBytes) return Path::inline_;
  bool sources = true, targets = true, no_targets = true;
  for (u32 i = 0; i < size(); ++i) {
    const Announcement& a = member(i).said[step_ & 1];
    if (x.publishes(i)) sources &= a.src_offset != kNone;
    if (x.consumes(i)) {
      targets &= a.dst_offset != kNone;
      no_targets &= a.dst_offset == kNone;
    }
  }
  if (!sources) return Path::staged;
  const bool whole_fold = x.shape.how == Shape::fold && !x.shape.blocks;
  if (whole_fold && targets) return Path::sliced;
  // Folding into a source that others still read would be wrong.
  if (x.call.info.kind == Kind::all_reduce && !no_targets) return Path::staged;
  return Path::direct;
}

void Channel::move(Exchange& x, Recorder::Call& record) {
  const Path path = choose(x);
  record.path(static_cast<u32>(path));
  switch (path) {
    case Path::none:
      return;
    case Path::inline_:
      for (u32 i = 0; i < size(); ++i)
        x.pointers[i] =
            member(i).said[step_ & 1].payload(x.source) + (x.shape.blocks ? index_ * x.part : 0);
      if (x.consumes(index_)) x.consume(0, x.count, size());
      return;
    case Path::staged:
      return staged(x, record);
    case Path::direct:
      direct(x);
      break;
    case Path::sliced:
      sliced(x);
      break;
  }
  publish_step();  // nobody may touch the buffers before all have finished
  wait_step(step_, record);
}

void Channel::staged(Exchange& x, Recorder::Call& record) {
  const bool mine = x.publishes(index_);
  const bool wanted = x.consumes(index_);
  const u32 blocks = x.shape.blocks ? size() : 1;
  const u64 room = kChunkBytes / blocks / 64 * 64;  // bytes of one block in one chunk
  const u64 piece = room / x.item;
  for (u64 at = 0; at < x.count; at += piece) {
    const u64 n = std::min(piece, x.count - at);
    const u64 next = step_ + 1;
    if (mine) {
      u8* stage = member(index_).stage[next & 1];
      for (u32 b = 0; b < blocks; ++b)
        std::memcpy(stage + b * room, plus(x.call.src, b * x.part + at * x.item), n * x.item);
      staged_bytes_ += blocks * n * x.item;
    }
    publish_step();
    wait_step(step_, record);
    if (!wanted) continue;
    for (u32 i = 0; i < size(); ++i)
      x.pointers[i] = member(i).stage[step_ & 1] + (x.shape.blocks ? index_ * room : 0);
    x.consume(at, n, size());
  }
}

void Channel::direct(Exchange& x) {
  if (!x.consumes(index_)) return;
  for (u32 i = 0; i < size(); ++i) {
    if (!x.publishes(i)) continue;
    const u64 offset = member(i).said[step_ & 1].src_offset;
    const u8* from = i == index_ ? plus(x.call.src, 0) : heap_->at(members_[i], offset);
    x.pointers[i] = from + (x.shape.blocks ? index_ * x.part : 0);
  }
  x.consume(0, x.count, size());
}

// Every rank folds its slice of all sources and writes it to all targets.
void Channel::sliced(Exchange& x) {
  const u64 lines = (x.part + 63) / 64;
  const u64 begin = std::min(lines * index_ / size() * 64 / x.item, x.count);
  const u64 end = std::min(lines * (index_ + 1) / size() * 64 / x.item, x.count);
  if (begin == end) return;
  targets_.clear();
  for (u32 i = 0; i < size(); ++i) {
    const Announcement& a = member(i).said[step_ & 1];
    x.pointers[i] = heap_->at(members_[i], a.src_offset) + begin * x.item;
    if (x.consumes(i)) targets_.push_back(heap_->at(members_[i], a.dst_offset) + begin * x.item);
  }
  x.fold(targets_.data(), static_cast<u32>(targets_.size()), x.pointers.data(), size(), end - begin,
         x.part >= kStreamBytes);
}

void Channel::run(const Collective& call, u64 ticket) {
  Turn turn(*this, ticket);
  control_->check();
  if (closed_) throw Failure(Code::usage, "the group is closed");
  CallInfo info = call.info;
  info.bytes = info.count * item_bytes(info.dtype);
  Recorder::Call record(control_->recorder(), info);
  Exchange x(call, size(), sources_);
  announce(x, record);
  record.group_seq(step_);
  if (!call.refused.empty()) return;
  wait_step(step_, record);
  compare();
  move(x, record);
  record.finish();
}

void Channel::close(const CallInfo& info, u64 ticket, bool keep_slot) {
  Turn turn(*this, ticket);
  if (closed_) return;
  control_->check();
  Recorder::Call record(control_->recorder(), info);
  Collective call;
  call.info = info;
  announce(Exchange(call, size(), sources_), record);
  wait_step(step_, record);
  compare();
  closed_ = true;
  publish_step();
  record.finish();
  if (keep_slot || index_ != 0) return;
  wait_step(step_, record);  // nobody reads the block any more: hand it back as zeros
  madvise(mapping_.data(), mapping_.bytes(), MADV_REMOVE);
  control_->return_group_slot(slot_);
}

}  // namespace bireme
