#include "stream.h"

#include <chrono>

namespace bireme {

bool Work::wait(double timeout_s) {
  if (!wait_done(timeout_s)) return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

bool Work::wait_done(double timeout_s) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::unique_lock lock(mutex_);
  while (!done_) {
    changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return done_; });
    if (done_) break;
    if (timeout_s >= 0 && Clock::now() - start > std::chrono::duration<double>(timeout_s))
      return false;
    lock.unlock();
    if (control_->interrupted && control_->interrupted()) throw Interrupted();
    lock.lock();
  }
  return true;
}

bool Work::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

std::exception_ptr Work::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

void Work::complete(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  error_ = std::move(error);
  done_ = true;
  changed_.notify_all();
}

Stream::Stream(std::shared_ptr<Control> control)
    : control_(std::move(control)), state_(std::make_unique<State>()) {}

Stream::~Stream() {
  if (control_->is_forked())
    static_cast<void>(state_.release());
  else
    stop();
}

std::shared_ptr<Work> Stream::submit(std::function<void()> task) {
  if (control_->is_forked()) control_->check();  // its progress thread is in the parent
  auto work = std::make_shared<Work>(control_);
  State& s = *state_;
  std::lock_guard lock(s.mutex);
  if (s.stopping) throw Failure(Code::usage, "the stream has ended");
  s.queue.push_back({std::move(task), work});
  s.last = work;
  ++s.pending;
  control_->work_queued(1);
  if (!s.thread.joinable()) s.thread = std::thread(&Stream::loop, this);
  s.wake.notify_one();
  return work;
}

size_t Stream::pending() const {
  std::lock_guard lock(state_->mutex);
  return state_->pending;
}

std::shared_ptr<Work> Stream::last() const {
  std::lock_guard lock(state_->mutex);
  return state_->last;
}

void Stream::loop() {
  State& s = *state_;
  for (;;) {
    Item item;
    {
      std::unique_lock lock(s.mutex);
      s.wake.wait(lock, [&] { return s.stopping || !s.queue.empty(); });
      if (s.queue.empty()) return;
      item = std::move(s.queue.front());
      s.queue.pop_front();
    }
    std::exception_ptr error;
    try {
      item.task();
    } catch (...) {
      error = std::current_exception();
    }
    item.task = nullptr;
    {
      std::lock_guard lock(s.mutex);
      --s.pending;
      control_->work_queued(-1);
      if (s.last == item.work) s.last = nullptr;
    }
    item.work->complete(std::move(error));
  }
}

void Stream::stop() {
  if (control_->is_forked()) return;
  std::thread ended;
  {
    std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    ended = std::move(state_->thread);
    state_->wake.notify_all();
  }
  if (ended.joinable()) ended.join();
}

}  // namespace bireme
