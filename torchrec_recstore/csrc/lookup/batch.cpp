#include "lookup/batch.h"

#include <algorithm>
#include <atomic>
#include <string>

#include "base/error.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

constexpr int64_t kRun = 65536;  // elements of a task

// Calls work(begin, end) for runs of [0, n), in parallel.
template <class Work>
void for_each_run(int64_t n, Executor& executor, const Work& work) {
  for_each_task(executor, (n + kRun - 1) / kRun, [&](int64_t run) { work(run * kRun, std::min((run + 1) * kRun, n)); });
}

}  // namespace

int64_t count_bags(int64_t offsets, int64_t features) {
  const int64_t bags = features == 0 ? 0 : (offsets - 1) / features;
  if (offsets < 1 || offsets != bags * features + 1) {
    throw InvalidArgument("offsets must have features * batch + 1 entries, got " + std::to_string(offsets) + " for " +
                          std::to_string(features) + " features");
  }
  return bags;
}

template <class T>
bool each_its_own(const T* offsets, int64_t n, Executor& executor) {
  if (offsets[n - 1] != n - 1) return false;  // most other batches end here
  std::atomic<bool> all{true};
  for_each_run(n, executor, [&](int64_t begin, int64_t end) {
    constexpr int64_t kBlock = 512;
    for (int64_t i = begin; i < end && all.load(std::memory_order_relaxed);) {
      bool equal = true;
      for (const int64_t stop = std::min(i + kBlock, end); i < stop; ++i) equal &= offsets[i] == static_cast<T>(i);
      if (!equal) all.store(false, std::memory_order_relaxed);
    }
  });
  return all;
}
template bool each_its_own(const int32_t* offsets, int64_t n, Executor& executor);
template bool each_its_own(const int64_t* offsets, int64_t n, Executor& executor);

template <class T>
BufferPool::Buffer copy_offsets(const T* offsets, int64_t n, Executor& executor) {
  auto buffer = BufferPool::instance().take(static_cast<size_t>(n) * sizeof(int64_t));
  auto* out = static_cast<int64_t*>(buffer.data());
  for_each_run(n, executor,
               [&](int64_t begin, int64_t end) { std::copy(offsets + begin, offsets + end, out + begin); });
  return buffer;
}
template BufferPool::Buffer copy_offsets(const int32_t* offsets, int64_t n, Executor& executor);
template BufferPool::Buffer copy_offsets(const int64_t* offsets, int64_t n, Executor& executor);

void check_offsets(const Batch& batch, int64_t features, Executor& executor) {
  const int64_t all_bags = batch.bags * features;
  if (std::max(batch.n_ids, all_bags) >= int64_t{kNotFirst}) {
    throw InvalidArgument("a batch holds at most 2**31 - 1 ids and bags");
  }
  if (batch.offset(0) != 0 || batch.offset(all_bags) != batch.n_ids) {
    throw InvalidArgument("offsets must begin with 0 and end with the number of ids, " + std::to_string(batch.n_ids));
  }
  if (batch.offsets == nullptr) return;
  for_each_run(all_bags, executor, [&](int64_t begin, int64_t end) {
    bool ascends = true;
    for (int64_t bag = begin; bag < end; ++bag) ascends &= batch.offsets[bag] <= batch.offsets[bag + 1];
    if (!ascends) throw InvalidArgument("offsets must ascend from 0 to the number of ids");
  });
}

void mix_ids(const int64_t* ids, int64_t n, bool inverse, int64_t* out, Executor& executor) {
  const auto map = [&](auto mixed) {
    for_each_run(n, executor, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = static_cast<int64_t>(mixed(static_cast<uint64_t>(ids[i])));
    });
  };
  inverse ? map([](uint64_t id) { return unmix(id); }) : map([](uint64_t id) { return mix(id); });
}

}  // namespace recstore
