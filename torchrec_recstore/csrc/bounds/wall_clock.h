#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace recstore {

// The wall clock of a table whose rows expire after a time. A row has its last step only, so the clock keeps a short
// list of ticks, each of which tells that all steps before a step were made before a time. Times are microseconds since
// 1970 (Unix time). The clock never goes back.
//
// The clock reads the system's clock, unless its time is given: by set(), which makes it the clock of the events that
// the table is trained on, or by follow(), for the shards of a table, which must all read the same time.
//
// The time of the events may be earlier than the clock, because a time that was set before may have been wrong, or the
// system's clock has timed steps before. The clock is then ahead of the events, and rows age on by the time that passes
// for the events. If the time of the events jumps forward again, the clock stands still until they have caught up. Rows
// therefore never expire too early.
class WallClock {
 public:
  // A new tick, and the step such that a row has expired if its last step is earlier.
  struct Tick {
    int64_t step;
    int64_t time;
    int64_t expired_before;
  };

  // expiry: a row expires if it has been unused for longer, in microseconds; at least 1.
  // max_jump: set() refuses a time of the events that is further away from the present one, in microseconds.
  WallClock(int64_t expiry, int64_t max_jump) : expiry_(expiry), max_jump_(max_jump) {}

  // Returns the tick that is due in step number `step`, which is about to begin, if one is.
  std::optional<Tick> due(int64_t step) const;
  void add(const Tick& tick) noexcept;
  // A row has expired if its last step is earlier than this step.
  int64_t expired_before() const { return expired_before_; }

  // Sets the time of the events to the latest of `times` that is at most max_jump away from the present one. If it is
  // earlier, it changes nothing. If there is none, all are refused, unless kAgreeing calls in a row agree. Of each call
  // the time that is nearest to the present one counts, and it agrees with that of the call before if it is at most
  // max_jump away from it. The first call sets the time to the latest of `times`.
  //
  // Returns the time that is furthest away, if it was refused.
  std::optional<int64_t> set(const std::vector<int64_t>& times) noexcept;
  // The time of the events that set() has set last.
  int64_t event_time() const { return now_ - ahead_; }
  // The number of calls of set() that have refused a time.
  int64_t refused() const { return refused_; }
  // Sets the time of a clock that is not the clock of the events. From the first call on, the system's clock is not
  // read. Until a time is known, no tick is due.
  void follow(int64_t time) noexcept;
  // The table has made this many steps.
  void set_steps(int64_t steps) noexcept;

  // Returns everything but the numbers of the constructor: 1 for the clock of the events or 0, the present time,
  // expired_before(), the time that the clock is ahead of the events, refused(), the number of calls in a row that have
  // refused all times and agree, the time of the last of them, and the step and the time of each tick.
  std::vector<int64_t> state() const;
  // Restores a state of a table that has made this many steps. The time since then counts. Throws InvalidArgument.
  void restore(const std::vector<int64_t>& state, int64_t steps);
  // Exchanges the states of two clocks. Whether a clock follows stays as it is.
  void exchange(WallClock& other) noexcept;

 private:
  struct Entry {
    int64_t step;
    int64_t time;
  };
  static constexpr int64_t kUnknown = -1;
  static constexpr int64_t kAgreeing = 10;    // calls in a row that agree on a time that is far away
  static constexpr size_t kHeader = 7;        // numbers of a state before those of the ticks
  static constexpr int64_t kTicks = 8;        // ticks within the expiry
  static constexpr size_t kMostEntries = 16;  // more ticks are there only after the expiry has become shorter

  int64_t read() const;
  void jump(int64_t event_time) noexcept;
  void append(Entry entry) noexcept;

  int64_t expiry_;
  int64_t max_jump_;
  bool follows_ = false;
  bool of_events_ = false;
  int64_t now_ = kUnknown;
  int64_t expired_before_ = 0;
  int64_t ahead_ = 0;  // the time that now_ is ahead of the events
  int64_t refused_ = 0;
  int64_t agreeing_ = 0;      // less than kAgreeing
  int64_t last_refused_ = 0;  // of the calls that agree
  size_t entries_ = 0;
  std::array<Entry, kMostEntries> ticks_{};  // step and time ascend
};

}  // namespace recstore
