#include "gate.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace recstore {
namespace {

struct Held {
  const Gate* gate;  // it exists while the hold does
  std::weak_ptr<Gate::Hold> hold;
};
thread_local std::vector<Held> held_by_this_thread;

// Waits until `done`. The threads that are waited for need a few microseconds; a sleeping thread would wake up later.
template <class Done>
void wait_for(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, const Done& done) {
  for (int tries = 0; tries < 200 && !done(); ++tries) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  changed.wait(lock, done);
}

}  // namespace

Gate::Hold::Hold(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {
  std::unique_lock<std::mutex> lock(gate_->mutex_);
  wait_for(gate_->calls_may_begin_, lock, [&] { return !gate_->committing_; });
  ++gate_->holds_;
}

Gate::Hold::~Hold() {
  const std::lock_guard<std::mutex> lock(gate_->mutex_);
  if (--gate_->holds_ == 0 && gate_->committing_) gate_->calls_have_ended_.notify_all();
}

Gate::Change::Change(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {
  std::unique_lock<std::mutex> lock(gate_->mutex_);
  gate_->changes_may_begin_.wait(lock, [&] { return !gate_->changing_; });
  gate_->changing_ = true;
}

void Gate::Change::commit() {
  if (gate_->held() != nullptr) {
    throw InvalidArgument("this thread holds the model: release it before a delta is applied");
  }
  std::unique_lock<std::mutex> lock(gate_->mutex_);
  gate_->committing_ = true;
  wait_for(gate_->calls_have_ended_, lock, [&] { return gate_->holds_ == 0; });
}

Gate::Change::~Change() {
  const std::lock_guard<std::mutex> lock(gate_->mutex_);
  gate_->changing_ = gate_->committing_ = false;
  gate_->calls_may_begin_.notify_all();
  gate_->changes_may_begin_.notify_one();
}

std::shared_ptr<Gate::Hold> Gate::held() const {
  for (const Held& each : held_by_this_thread) {
    if (each.gate != this) continue;
    if (auto hold = each.hold.lock()) return hold;
  }
  return nullptr;
}

std::shared_ptr<Gate::Hold> Gate::hold() {
  if (auto hold = held()) return hold;
  auto hold = std::make_shared<Hold>(shared_from_this());
  auto& all = held_by_this_thread;
  all.erase(std::remove_if(all.begin(), all.end(), [](const Held& each) { return each.hold.expired(); }), all.end());
  all.push_back({this, hold});
  return hold;
}

}  // namespace recstore
