#include "bounds/wall_clock.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <utility>

#include "base/error.h"

namespace recstore {
namespace {

int64_t system_time() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(since).count();
}

}  // namespace

int64_t WallClock::read() const { return of_events_ || follows_ ? now_ : std::max(now_, system_time()); }

std::optional<WallClock::Tick> WallClock::due(int64_t step) const {
  const int64_t now = read();
  if (now == kUnknown) return std::nullopt;
  if (entries_ > 0 && now - ticks_[entries_ - 1].time < std::max<int64_t>(1, expiry_ / kTicks)) return std::nullopt;
  int64_t expired_before = expired_before_;
  for (size_t i = 0; i < entries_ && now - ticks_[i].time > expiry_; ++i) {
    expired_before = std::max(expired_before, ticks_[i].step);
  }
  return Tick{step, now, expired_before};
}

void WallClock::add(const Tick& tick) noexcept {
  now_ = tick.time;
  expired_before_ = tick.expired_before;
  append({tick.step, tick.time});
  const auto first = std::find_if(ticks_.begin(), ticks_.begin() + entries_,
                                  [&](const Entry& entry) { return entry.step > expired_before_; });
  entries_ = static_cast<size_t>(std::move(first, ticks_.begin() + entries_, ticks_.begin()) - ticks_.begin());
}

// An entry for the step of the last one tells nothing new: its time is later. If the list is full, the rows that only
// its first entry knows to be old expire with the second entry.
void WallClock::append(Entry entry) noexcept {
  if (entries_ > 0 && ticks_[entries_ - 1].step >= entry.step) return;
  if (entries_ == kMostEntries) {
    std::move(ticks_.begin() + 1, ticks_.end(), ticks_.begin());
    --entries_;
  }
  ticks_[entries_++] = entry;
}

std::optional<int64_t> WallClock::set(const std::vector<int64_t>& times) noexcept {
  if (!of_events_) {
    of_events_ = true;
    jump(*std::max_element(times.begin(), times.end()));
    return std::nullopt;
  }
  const int64_t present = event_time();
  const auto distance = [present](int64_t time) { return std::abs(time - present); };
  int64_t latest = kUnknown, nearest = times[0], furthest = times[0];
  for (const int64_t time : times) {
    if (distance(time) <= max_jump_) latest = std::max(latest, time);
    if (distance(time) < distance(nearest) || (distance(time) == distance(nearest) && time > nearest)) nearest = time;
    if (distance(time) > distance(furthest)) furthest = time;
  }
  if (latest == kUnknown) {
    agreeing_ = agreeing_ > 0 && std::abs(nearest - last_refused_) <= max_jump_ ? agreeing_ + 1 : 1;
    last_refused_ = nearest;
    if (agreeing_ == kAgreeing) {
      agreeing_ = 0;
      jump(nearest);
      return std::nullopt;
    }
  } else {
    agreeing_ = 0;
    if (latest > present) {
      now_ += std::min(latest - present, std::numeric_limits<int64_t>::max() - now_);
      ahead_ = now_ - latest;
    }
  }
  if (distance(furthest) <= max_jump_) return std::nullopt;
  ++refused_;
  return furthest;
}

void WallClock::jump(int64_t event_time) noexcept {
  now_ = std::max(now_, event_time);
  ahead_ = now_ - event_time;
}

void WallClock::follow(int64_t time) noexcept {
  follows_ = true;
  if (!of_events_) now_ = std::max(now_, time);
}

void WallClock::set_steps(int64_t steps) noexcept {
  // What a tick tells of later steps would be wrong for the steps that are made next.
  expired_before_ = std::min(expired_before_, steps + 1);
  size_t kept = 0;
  while (kept < entries_ && ticks_[kept].step <= steps) ++kept;
  if (kept == entries_) return;
  ticks_[kept].step = steps + 1;
  entries_ = kept + 1;
}

std::vector<int64_t> WallClock::state() const {
  std::vector<int64_t> state{
      of_events_,   of_events_ ? now_ : std::max(now_, system_time()), expired_before_, ahead_, refused_, agreeing_,
      last_refused_};
  for (size_t i = 0; i < entries_; ++i) state.insert(state.end(), {ticks_[i].step, ticks_[i].time});
  return state;
}

void WallClock::restore(const std::vector<int64_t>& state, int64_t steps) {
  const auto check = [](bool holds) {
    if (!holds) throw InvalidArgument("the times of the table's steps are damaged");
  };
  check(state.size() >= kHeader && state.size() % 2 == 1 && state.size() <= kHeader + 2 * kMostEntries);
  check((state[0] == 0 && state[1] >= kUnknown) || (state[0] == 1 && state[1] >= 0));
  check(state[2] >= 0 && state[3] >= 0 && state[3] <= std::max<int64_t>(0, state[1]) && state[4] >= 0);
  check(state[5] >= 0 && state[5] < kAgreeing && state[6] >= 0);
  for (size_t i = kHeader; i < state.size(); i += 2) {
    check(state[i] >= 0 && state[i + 1] >= 0 && state[i + 1] <= state[1]);
    check(i == kHeader || (state[i] > state[i - 2] && state[i + 1] > state[i - 1]));
  }
  of_events_ = state[0] == 1;
  now_ = state[1];
  expired_before_ = state[2];
  ahead_ = state[3];
  refused_ = state[4];
  agreeing_ = state[5];
  last_refused_ = state[6];
  entries_ = 0;
  for (size_t i = kHeader; i < state.size(); i += 2) append({state[i], state[i + 1]});
  set_steps(steps);
  // The system's clock goes on while the table is away, so that the time of the last steps is noted. The clock of the
  // events stops.
  if (!of_events_ && now_ != kUnknown) append({steps + 1, now_});
}

void WallClock::exchange(WallClock& other) noexcept {
  std::swap(*this, other);
  std::swap(follows_, other.follows_);
}

}  // namespace recstore
