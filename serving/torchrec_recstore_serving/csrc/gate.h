#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace recstore {

// Lets the calls of a served model run together, and a change of the model alone, so that each call is of one version.
//
// A call holds the gate. A change is prepared while calls run. Then it waits for the calls that have begun, and calls
// that begin now wait for it. A thread that holds the gate holds it again without waiting.
class Gate : public std::enable_shared_from_this<Gate> {
 public:
  // A call. It may be destroyed by another thread than the one that has made it.
  class Hold {
   public:
    explicit Hold(std::shared_ptr<Gate> gate);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

   private:
    std::shared_ptr<Gate> gate_;
  };

  // A change. Another change of the same gate waits until this one is destroyed.
  class Change {
   public:
    explicit Change(std::shared_ptr<Gate> gate);
    ~Change();
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;
    // Waits for the calls. Throws InvalidArgument if the calling thread holds the gate, because it would wait for
    // itself.
    void commit();

   private:
    std::shared_ptr<Gate> gate_;
  };

  // The hold of the calling thread.
  std::shared_ptr<Hold> hold();

 private:
  std::shared_ptr<Hold> held() const;

  std::mutex mutex_;
  std::condition_variable calls_may_begin_, calls_have_ended_, changes_may_begin_;
  int64_t holds_ = 0;
  bool changing_ = false;    // a change is being prepared or made
  bool committing_ = false;  // a change waits for calls or is being made
};

}  // namespace recstore
