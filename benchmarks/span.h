#pragma once

namespace recstore {

// Measures a task of for_each_task() while it exists. benchmarks/span.cpp defines what happens with the time.
class MeasuredTask {
 public:
  MeasuredTask();
  ~MeasuredTask();
};

// Measures a run of for_each_task() while it exists. is_parallel: whether it has threads for more than one task.
class MeasuredRun {
 public:
  explicit MeasuredRun(bool is_parallel);
  ~MeasuredRun();
};

}  // namespace recstore
