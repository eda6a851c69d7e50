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

std::shared_ptr<Work> Stream::submit(std::function<void()> task) {
  auto work = std::make_shared<Work>(control_);
  std::lock_guard lock(mutex_);
  if (stopping_) throw Failure(Code::usage, "the stream has ended");
  queue_.push_back({std::move(task), work});
  last_ = work;
  ++pending_;
  control_->work_queued(1);
  if (!thread_.joinable()) thread_ = std::thread(&Stream::loop, this);
  wake_.notify_one();
  return work;
}

size_t Stream::pending() const {
  std::lock_guard lock(mutex_);
  return pending_;
}

std::shared_ptr<Work> Stream::last() const {
  std::lock_guard lock(mutex_);
  return last_;
}

void Stream::loop() {
  for (;;) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr error;
    try {
      item.task();
    } catch (...) {
      error = std::current_exception();
    }
    item.task = nullptr;
    {
      std::lock_guard lock(mutex_);
      --pending_;
      control_->work_queued(-1);
      if (last_ == item.work) last_ = nullptr;
    }
    item.work->complete(std::move(error));
  }
}

void Stream::stop() {
  if (control_->is_forked()) {  // the thread stayed in the parent
    if (thread_.joinable()) thread_.detach();
    return;
  }
  std::thread ended;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    ended = std::move(thread_);
    wake_.notify_all();
  }
  if (ended.joinable()) ended.join();
}

}  // namespace bireme
