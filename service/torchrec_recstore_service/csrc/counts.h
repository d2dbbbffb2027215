#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace recstore_service {

// The bounds in seconds of the classes in which the times of calls are counted: those of prometheus_client's Histogram.
constexpr std::array<double, 14> kSeconds{.005, .01, .025, .05, .075, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10};

// Counts calls and ids, for Prometheus.
class Counts {
 public:
  struct Times {
    std::array<int64_t, kSeconds.size() + 1> calls{};  // by class of time; the last has no bound
    double seconds = 0;
  };

  void call(const std::string& method, const std::string& outcome, double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Times& times = times_[method];
    size_t bound = 0;
    while (bound < kSeconds.size() && seconds > kSeconds[bound]) ++bound;
    ++times.calls[bound];
    times.seconds += seconds;
    ++outcomes_[{method, outcome}];
  }
  void ids(const std::string& operation, const std::string& table, int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ids_.size() > kMostLabels) ids_.clear();  // of tables that were made and deleted: counters may start again
    ids_[{operation, table}] += n;
  }

  template <class Visit>  // visit(kind, first label, second label, value)
  void for_each(const Visit& visit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [method, times] : times_) {
      for (size_t i = 0; i < times.calls.size(); ++i) {
        visit("time", method, i < kSeconds.size() ? std::to_string(i) : "", static_cast<double>(times.calls[i]));
      }
      visit("seconds", method, "", times.seconds);
    }
    for (const auto& [labels, n] : outcomes_) visit("call", labels.first, labels.second, static_cast<double>(n));
    for (const auto& [labels, n] : ids_) visit("ids", labels.first, labels.second, static_cast<double>(n));
  }

 private:
  static constexpr size_t kMostLabels = 10000;
  std::mutex mutex_;
  std::map<std::string, Times> times_;
  std::map<std::pair<std::string, std::string>, int64_t> outcomes_;
  std::map<std::pair<std::string, std::string>, int64_t> ids_;
};

}  // namespace recstore_service
