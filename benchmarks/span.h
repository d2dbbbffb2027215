#pragma once

namespace recstore {

// Measures a task of for_each_task() while it exists. benchmarks/span.cpp defines what happens with the time.
class MeasuredTask {
 public:
  MeasuredTask();
  ~MeasuredTask();
};

}  // namespace recstore
