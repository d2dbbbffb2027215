#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

namespace recstore_service {

// The run of a server, which calls on tables must name, and a gate that lets many changes of rows in at the same time,
// or one change of the tables alone.
class RunGate {
 public:
  // label: empty if the server answers no call on tables.
  void set_run(std::string label) {
    const std::lock_guard<std::mutex> lock(mutex_);
    label_ = std::move(label);
  }
  // Sets the time in seconds, by steady_clock, from which the server does not answer calls on tables any more, because
  // its lease ends: another server may be the primary then. Default: never.
  void set_end(double seconds) { end_ = seconds; }
  bool has_ended() const { return now() >= end_; }
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  // Whether the server is in a run.
  bool is_in(const std::string& run) {
    if (has_ended()) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    return !run.empty() && run == label_;
  }

  // Lets a change in.
  void enter() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !alone_; });
    ++inside_;
  }
  void leave() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--inside_ == 0) changed_.notify_all();
  }

  class Inside {
   public:
    explicit Inside(RunGate& gate) : gate_(gate) { gate_.enter(); }
    ~Inside() { gate_.leave(); }
    Inside(const Inside&) = delete;

   private:
    RunGate& gate_;
  };

  // Waits until no change is inside, and lets none in until open() is called, also by another thread.
  void close() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !alone_; });
    alone_ = true;
    changed_.wait(lock, [&] { return inside_ == 0; });
  }
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    alone_ = false;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string label_;
  std::atomic<double> end_{std::numeric_limits<double>::infinity()};
  int64_t inside_ = 0;
  bool alone_ = false;
};

}  // namespace recstore_service
