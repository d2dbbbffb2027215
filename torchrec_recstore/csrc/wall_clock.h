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
class WallClock {
 public:
  // A new tick, and the step such that a row has expired if its last step is earlier.
  struct Tick {
    int64_t step;
    int64_t time;
    int64_t expired_before;
  };

  // expiry: a row expires if it has been unused for longer, in microseconds; at least 1.
  explicit WallClock(int64_t expiry) : expiry_(expiry) {}

  // Returns the tick that is due in step number `step`, which is about to begin, if one is.
  std::optional<Tick> due(int64_t step) const;
  void add(const Tick& tick) noexcept;
  // A row has expired if its last step is earlier than this step.
  int64_t expired_before() const { return expired_before_; }

  // Sets the time of the events. An earlier time than the present one changes nothing. Throws InvalidArgument if the
  // system's clock has timed a step at a later time.
  void set(int64_t time);
  // Sets the time of a clock that is not the clock of the events. From the first call on, the system's clock is not
  // read. Until a time is known, no tick is due.
  void follow(int64_t time) noexcept;
  // The table has made this many steps.
  void set_steps(int64_t steps) noexcept;

  // Returns everything but the expiry: 1 for the clock of the events or 0, the present time, expired_before(), and the
  // step and the time of each tick.
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
  static constexpr int64_t kTicks = 8;        // ticks within the expiry
  static constexpr size_t kMostEntries = 16;  // more ticks are there only after the expiry has become shorter

  int64_t read() const;
  void append(Entry entry) noexcept;

  int64_t expiry_;
  bool follows_ = false;
  bool of_events_ = false;
  int64_t now_ = kUnknown;
  int64_t expired_before_ = 0;
  size_t entries_ = 0;
  std::array<Entry, kMostEntries> ticks_{};  // step and time ascend
};

}  // namespace recstore
