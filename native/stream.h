// A progress thread that runs queued work in order, without Python.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "control.h"

namespace bireme {

// The outcome of queued work.
class Work {
 public:
  explicit Work(std::shared_ptr<Control> control) : control_(std::move(control)) {}
  // Returns true when done, false when `timeout_s` passed first (negative: no limit). Throws what
  // the work threw.
  bool wait(double timeout_s);
  // As wait, but an error of the work stays with the work.
  bool wait_done(double timeout_s);
  bool done() const;
  std::exception_ptr error() const;

 private:
  friend class Stream;
  void complete(std::exception_ptr error);
  std::shared_ptr<Control> control_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

class Stream {
 public:
  explicit Stream(std::shared_ptr<Control> control);
  ~Stream();
  Stream(const Stream&) = delete;

  std::shared_ptr<Work> submit(std::function<void()> task);
  // Work submitted and not yet finished.
  size_t pending() const;
  // The last work submitted, or null: waiting for it drains the stream.
  std::shared_ptr<Work> last() const;
  // Finishes the queue and ends the thread.
  void stop();

 private:
  struct Item {
    std::function<void()> task;
    std::shared_ptr<Work> work;
  };
  struct State {  // apart, so that a forked child can leave it be: its thread is in the parent
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<Item> queue;
    std::shared_ptr<Work> last;
    size_t pending = 0;
    bool stopping = false;
    std::thread thread;
  };
  void loop();
  std::shared_ptr<Control> control_;
  std::unique_ptr<State> state_;
};

}  // namespace bireme
