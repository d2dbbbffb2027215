#include "forward.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "error.h"
#include "insertion.h"
#include "row_kernels.h"

namespace recstore {
namespace {

constexpr int64_t kBlock = 32;         // ids that go through a stage of the pipeline together
constexpr int64_t kTaskIds = 1024;     // ids of a task, about
constexpr int64_t kStreamBytes = 16 << 20;  // outputs from here on are written around the caches

// Resolves a run of ids to slots in blocks, so that memory is always being fetched for the blocks
// ahead: two ahead the line of the index, one ahead the row.
class Resolver {
 public:
  Resolver(const Table& table, const Routing& routing, const int64_t* ids, int64_t begin, int64_t end, Slot* slots)
      : index_(table.index()), rows_(table.rows().view()), routing_(routing), ids_(ids), end_(end), slots_(slots),
        hashed_(begin), resolved_(begin) {
    hash_block();
    hash_block();
    resolve_block();
  }

  int64_t resolved() const { return resolved_; }

  void advance() {
    hash_block();
    resolve_block();
  }

  std::vector<Miss> misses;

 private:
  void hash_block() {
    const int64_t stop = std::min(hashed_ + kBlock, end_);
    for (; hashed_ < stop; ++hashed_) {
      const int64_t id = routing_.raw_id(ids_[hashed_]);
      const uint64_t h = index_.hash(id);
      ring_[hashed_ % kRing] = {id, h};
      __builtin_prefetch(index_.home_line(h), 0, 3);
    }
  }
  void resolve_block() {
    const int64_t stop = std::min(resolved_ + kBlock, end_);
    for (; resolved_ < stop; ++resolved_) {
      const Hashed& hashed = ring_[resolved_ % kRing];
      const Slot slot = index_.find(hashed.id, hashed.hash);
      slots_[resolved_] = slot;
      if (slot == kNoSlot) {
        misses.push_back({hashed.id, hashed.hash, resolved_});
        continue;
      }
      const float* row = rows_.data + slot * rows_.stride;
      for (int64_t d = 0; d < rows_.columns; d += 16) __builtin_prefetch(row + d, 0, 3);
    }
  }

  struct Hashed {
    int64_t id;
    uint64_t hash;
  };
  static constexpr int64_t kRing = 4 * kBlock;

  const Index& index_;
  RowsView rows_;
  const Routing& routing_;
  const int64_t* ids_;
  int64_t end_;
  Slot* slots_;
  int64_t hashed_;
  int64_t resolved_;
  std::array<Hashed, kRing> ring_;
};

// A run of one feature's bags, and what it could not resolve.
struct Task {
  int64_t feature;
  int64_t bag_begin;  // within the feature
  int64_t bag_end;
  std::vector<Miss> misses;
  std::vector<int64_t> bags_with_misses;
};

class Lookup {
 public:
  Lookup(const Group& group, const Batch& batch, Slot* slots, float* out)
      : group_(group), batch_(batch), slots_(slots), out_(out) {
    const int64_t stride_bytes = group.columns() * static_cast<int64_t>(sizeof(float));
    streams_ = stride_bytes * batch.bags >= kStreamBytes && stride_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    split();
  }

  void resolve_and_pool(Executor& executor, bool train) {
    for_each_task(executor, static_cast<int64_t>(tasks_.size()), [&](int64_t t) { run(tasks_[t], train); });
  }
  // Makes the missing rows and pools the bags again that lacked them. Returns how many, table by table.
  std::vector<int64_t> insert_missing(Executor& executor) {
    std::vector<std::vector<Miss>> misses(group_.tables.size());
    std::vector<const Task*> incomplete;
    for (const Task& task : tasks_) {
      if (task.misses.empty()) continue;
      auto& all = misses[group_.feature_tables[task.feature]];
      all.insert(all.end(), task.misses.begin(), task.misses.end());
      incomplete.push_back(&task);
    }
    std::vector<int64_t> made(group_.tables.size(), 0);
    if (incomplete.empty()) return made;
    std::vector<Insertion> insertions;
    std::vector<size_t> tables;
    for (size_t t = 0; t < misses.size(); ++t) {
      if (misses[t].empty()) continue;
      insertions.emplace_back(*group_.tables[t], std::move(misses[t]), slots_);
      tables.push_back(t);
    }
    recstore::insert_missing(insertions, executor);
    for (size_t i = 0; i < tables.size(); ++i) made[tables[i]] = insertions[i].rows_made();
    for_each_task(executor, static_cast<int64_t>(incomplete.size()), [&](int64_t t) {
      for (const int64_t bag : incomplete[t]->bags_with_misses) pool_run(*incomplete[t], bag, bag + 1);
    });
    return made;
  }
  // Evaluation: bags with missing ids, whose initial rows count as if they were there.
  void pool_initial_rows(Executor& executor) {
    const auto complete = [](const Task& task) { return task.bags_with_misses.empty(); };
    if (std::all_of(tasks_.begin(), tasks_.end(), complete)) return;
    for_each_task(executor, static_cast<int64_t>(tasks_.size()), [&](int64_t t) { add_initial_rows(tasks_[t]); });
  }

 private:
  void split() {
    const int64_t all_bags = batch_.bags * group_.features();
    const int64_t ids_per_bag = std::max<int64_t>(1, batch_.n_ids / std::max<int64_t>(1, all_bags));
    const int64_t bags_per_task = std::max<int64_t>(1, kTaskIds / ids_per_bag);
    // Neighbouring tasks write the same rows of the output, each its own columns.
    for (int64_t begin = 0; begin < batch_.bags; begin += bags_per_task) {
      for (int64_t f = 0; f < group_.features(); ++f) {
        tasks_.push_back({f, begin, std::min(begin + bags_per_task, batch_.bags), {}, {}});
      }
    }
  }

  std::vector<int64_t> bounds(const Task& task, int64_t bag_begin, int64_t bag_end) const {
    std::vector<int64_t> bounds(static_cast<size_t>(bag_end - bag_begin + 1));
    const int64_t first = task.feature * batch_.bags + bag_begin;
    for (size_t i = 0; i < bounds.size(); ++i) bounds[i] = batch_.offset(first + static_cast<int64_t>(i));
    return bounds;
  }
  void check(const std::vector<int64_t>& bounds) const {
    bool ascends = bounds.front() >= 0 && bounds.back() <= batch_.n_ids;
    for (size_t i = 1; i < bounds.size(); ++i) ascends &= bounds[i - 1] <= bounds[i];
    if (!ascends) throw InvalidArgument("offsets must ascend from 0 to the number of ids");
  }

  PoolArgs pool_args(const Task& task, const int64_t* bounds, int64_t bag) const {
    const Table& table = *group_.tables[group_.feature_tables[task.feature]];
    const int64_t column = group_.column_offsets[task.feature];
    PoolArgs args;
    args.rows = table.rows().view();
    args.slots = slots_;
    args.bounds = bounds;
    args.weights = batch_.weights;
    args.out = out_ + bag * group_.columns() + column;
    args.out_stride = group_.columns();
    args.mean = group_.mean;
    args.stream = streams_ && column % 16 == 0 && args.rows.columns % 16 == 0;
    args.bags = 0;
    return args;
  }
  void pool_run(const Task& task, int64_t bag_begin, int64_t bag_end) const {
    const auto run_bounds = bounds(task, bag_begin, bag_end);
    PoolArgs args = pool_args(task, run_bounds.data(), bag_begin);
    args.bags = bag_end - bag_begin;
    row_kernels().pool(args);
  }

  void run(Task& task, bool train) {
    const auto task_bounds = bounds(task, task.bag_begin, task.bag_end);
    check(task_bounds);
    const int64_t table = group_.feature_tables[task.feature];
    Resolver resolver(*group_.tables[table], group_.routings[table], batch_.ids, task_bounds.front(), task_bounds.back(), slots_);
    PoolArgs args = pool_args(task, task_bounds.data(), task.bag_begin);
    const int64_t bags = task.bag_end - task.bag_begin;
    for (int64_t bag = 0; bag < bags;) {
      int64_t ready = resolver.resolved();
      if (task_bounds[bag + 1] > ready) {
        resolver.advance();
        continue;
      }
      resolver.advance();  // its fetches overlap with the pooling below
      int64_t end = bag + 1;
      while (end < bags && task_bounds[end + 1] <= ready) ++end;
      args.bounds = task_bounds.data() + bag;
      args.bags = end - bag;
      row_kernels().pool(args);
      args.out += args.bags * args.out_stride;
      bag = end;
    }
    task.misses = std::move(resolver.misses);
    if (!task.misses.empty()) find_bags_with_misses(task, task_bounds);
    if (!train && !group_.tables[table]->config().missing_reads_init) task.bags_with_misses.clear();
  }
  static void find_bags_with_misses(Task& task, const std::vector<int64_t>& task_bounds) {
    size_t bag = 0;
    for (const Miss& miss : task.misses) {
      while (task_bounds[bag + 1] <= miss.position) ++bag;
      const int64_t number = task.bag_begin + static_cast<int64_t>(bag);
      if (task.bags_with_misses.empty() || task.bags_with_misses.back() != number) task.bags_with_misses.push_back(number);
    }
  }
  void add_initial_rows(const Task& task) const {
    if (task.bags_with_misses.empty()) return;
    const Table& table = *group_.tables[group_.feature_tables[task.feature]];
    const int64_t columns = table.config().columns();
    // A bag's rows, resident and initial ones alike, laid out one behind the other, are pooled like any others.
    std::vector<float> rows;
    std::vector<Slot> slots;
    for (const int64_t bag : task.bags_with_misses) {
      auto run_bounds = bounds(task, bag, bag + 1);
      const int64_t begin = run_bounds[0], n = run_bounds[1] - run_bounds[0];
      rows.assign(static_cast<size_t>(n * columns), 0.0f);
      slots.resize(static_cast<size_t>(n));
      const Routing& routing = group_.routings[group_.feature_tables[task.feature]];
      for (int64_t i = 0; i < n; ++i) {
        slots[i] = static_cast<Slot>(i);
        float* row = rows.data() + i * columns;
        const Slot slot = slots_[begin + i];
        if (slot == kNoSlot) {
          table.initializer().fill(routing.raw_id(batch_.ids[begin + i]), row);
        } else {
          std::copy_n(table.rows().weights(slot), columns, row);
        }
      }
      const int64_t local_bounds[2] = {0, n};
      PoolArgs args = pool_args(task, local_bounds, bag);
      args.rows.data = rows.data();
      args.rows.stride = columns;
      args.slots = slots.data();
      if (args.weights != nullptr) args.weights += begin;
      args.bags = 1;
      row_kernels().pool(args);
    }
  }

  const Group& group_;
  const Batch& batch_;
  Slot* slots_;
  float* out_;
  bool streams_;
  std::vector<Task> tasks_;
};

}  // namespace

StepResult lookup(const Group& group, const Batch& batch, bool train, Slot* slots, float* out, Executor& executor) {
  if (batch.offset(0) != 0 || batch.offset(batch.bags * group.features()) != batch.n_ids) {
    throw InvalidArgument("offsets must begin with 0 and end with the number of ids, " + std::to_string(batch.n_ids));
  }
  Lookup work(group, batch, slots, out);
  work.resolve_and_pool(executor, train);
  StepResult result;
  if (!train) {
    work.pool_initial_rows(executor);
    return result;
  }
  const std::vector<int64_t> made = work.insert_missing(executor);
  for (size_t t = 0; t < group.tables.size(); ++t) {
    group.tables[t]->counters().misses += made[t];
    group.tables[t]->counters().inserts += made[t];
    result.steps.push_back(group.tables[t]->begin_step());
  }
  return result;
}

namespace {

std::vector<Miss> resolve_all(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor) {
  const int64_t tasks = (n + kTaskIds - 1) / kTaskIds;
  std::vector<std::vector<Miss>> misses(static_cast<size_t>(tasks));
  const Routing as_they_are;
  for_each_task(executor, tasks, [&](int64_t t) {
    const int64_t end = std::min((t + 1) * kTaskIds, n);
    Resolver resolver(table, as_they_are, ids, t * kTaskIds, end, slots);
    while (resolver.resolved() < end) resolver.advance();
    misses[t] = std::move(resolver.misses);
  });
  std::vector<Miss> all;
  for (const auto& some : misses) all.insert(all.end(), some.begin(), some.end());
  return all;
}

}  // namespace

void find(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor) {
  resolve_all(table, ids, n, slots, executor);
}

void find_or_insert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor) {
  std::vector<Insertion> insertion;
  insertion.emplace_back(table, resolve_all(table, ids, n, slots, executor), slots);
  insert_missing(insertion, executor);
  table.counters().inserts += insertion[0].rows_made();
}

}  // namespace recstore
