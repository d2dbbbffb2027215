#include "forward.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "error.h"
#include "row_kernels.h"

namespace recstore {
namespace {

constexpr int64_t kBlock = 16;         // ids that go through a stage of the pipeline together
constexpr int64_t kTaskIds = 1024;     // ids of a task, about
constexpr int64_t kLargeInsertion = 16384;  // misses from which one table's rows are made in parallel
constexpr int64_t kMostSteps = 0xFFFFFFFE;  // a row's last step has 32 bits, of which one value has another meaning
constexpr int64_t kStreamBytes = 16 << 20;  // outputs from here on are written around the caches

// Resolves a run of ids to slots in blocks, so that memory is always being fetched for the blocks
// ahead: two ahead the home line of the index, one ahead the row. The few ids that are not in their
// home line are late by a block, in which the next line arrives.
// kLines: cache lines of a row, 0 where the compiler cannot know.
template <int64_t kLines>
class Resolver {
 public:
  Resolver(const Table& table, const Routing& routing, const int64_t* ids, int64_t begin, int64_t end, Slot* slots)
      : index_(table.index()), rows_(table.rows().view()), routing_(routing), ids_(ids), end_(end), slots_(slots),
        hashed_(begin), probed_(begin), resolved_(begin) {
    hash_block();
    hash_block();
    probe_block();
  }

  int64_t resolved() const { return resolved_; }

  void advance() {
    finish_late();
    hash_block();
    probe_block();
  }

  std::vector<Miss> misses;

 private:
  struct Hashed {
    int64_t id;
    uint64_t hash;
    const Index::Entry* line;
  };
  struct Late {
    int64_t position;
    const Index::Entry* line;  // to go on with, null where there is none
  };

  void hash_block() {
    const int64_t stop = std::min(hashed_ + kBlock, end_);
    for (; hashed_ < stop; ++hashed_) {
      const int64_t id = routing_.raw_id(ids_[hashed_]);
      const uint64_t hash = index_.hash(id);
      const Index::Entry* line = index_.home_line(hash);
      ring_[hashed_ % kRing] = {id, hash, line};
      __builtin_prefetch(line, 0, 3);
    }
  }
  void probe_block() {
    const int64_t stop = std::min(probed_ + kBlock, end_);
    for (; probed_ < stop; ++probed_) {
      const Hashed& hashed = ring_[probed_ % kRing];
      const Index::Entry* entry = Index::find_in_line(hashed.line, hashed.id);
      if (entry != nullptr) {
        found(probed_, entry->slot);
      } else {
        const Index::Entry* next = index_.next_line(hashed.line);
        __builtin_prefetch(next, 0, 3);
        late_[late_count_++] = {probed_, next};
      }
    }
  }
  void finish_late() {
    for (int i = 0; i < late_count_; ++i) {
      const Hashed& hashed = ring_[late_[i].position % kRing];
      const Index::Entry* entry = index_.find_from(late_[i].line, hashed.id);
      if (entry != nullptr) {
        found(late_[i].position, entry->slot);
      } else {
        slots_[late_[i].position] = kNoSlot;
        misses.push_back({hashed.id, hashed.hash, late_[i].position});
      }
    }
    late_count_ = 0;
    resolved_ = probed_;
  }
  void found(int64_t position, Slot slot) {
    slots_[position] = slot;
    const float* row = rows_.data + slot * rows_.stride;
    const int64_t floats = kLines == 0 ? rows_.weight_floats() : kLines * 16;
    for (int64_t d = 0; d < floats; d += 16) __builtin_prefetch(row + d, 0, 3);
  }

  static constexpr int64_t kRing = 4 * kBlock;

  const Index& index_;
  RowsView rows_;
  const Routing& routing_;
  const int64_t* ids_;
  int64_t end_;
  Slot* slots_;
  int64_t hashed_;    // positions up to which each stage has come
  int64_t probed_;
  int64_t resolved_;
  int late_count_ = 0;
  std::array<Late, kBlock> late_;
  std::array<Hashed, kRing> ring_;
};

// Calls work(lines) with the cache lines of a row's weights, which the compiler knows for the dims that most tables have.
template <class Work>
void with_lines(const Table& table, const Work& work) {
  switch (table.rows().view().weight_floats()) {
    case 16: return work(std::integral_constant<int64_t, 1>{});
    case 32: return work(std::integral_constant<int64_t, 2>{});
    case 64: return work(std::integral_constant<int64_t, 4>{});
    case 128: return work(std::integral_constant<int64_t, 8>{});
    default: return work(std::integral_constant<int64_t, 0>{});
  }
}

// A run of one feature's bags, and what it could not resolve.
struct Task {
  int64_t feature;
  int64_t bag_begin;  // within the feature
  int64_t bag_end;
  std::vector<Miss> misses;
  std::vector<int64_t> bags_with_misses;
};

}  // namespace

class Lookup {
 public:
  Lookup(const Group& group, const Batch& batch, Slot* slots, float* out, Executor& executor,
         const std::vector<RowsElsewhere>& elsewhere)
      : group_(group), batch_(batch), slots_(slots), out_(out), executor_(executor), elsewhere_(elsewhere) {
    check_offsets(batch, group.features(), executor);
    const int64_t stride_bytes = group.columns() * static_cast<int64_t>(sizeof(float));
    streams_ = stride_bytes * batch.bags >= kStreamBytes && stride_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    offsets_ = batch.offsets;
    if (offsets_ == nullptr) {
      each_its_own_.resize(static_cast<size_t>(batch.bags + 1));
      std::iota(each_its_own_.begin(), each_its_own_.end(), int64_t{0});
      offsets_ = each_its_own_.data();
    }
    split();
  }

  void evaluate() {
    for_each_task(executor_, static_cast<int64_t>(tasks_.size()), [&](int64_t t) {
      resolve_and_pool(tasks_[t]);
      const bool others = !elsewhere_.empty() && elsewhere_[table_number(tasks_[t])].n > 0;
      if (tasks_[t].misses.empty() || !(others || table_of(tasks_[t]).config().missing_reads_init)) return;
      for (const int64_t bag : tasks_[t].bags_with_misses) pool_with_missing_rows(tasks_[t], bag);
    });
  }

  // All of a training lookup that can fail; the tables are as they were until commit(), or again after undo().
  //
  // Waking threads and waiting for the last of them costs more than a small batch's work, above all on
  // busy cores: so whoever resolves a table's last task goes on to complete the table, in the same go.
  void prepare() {
    const size_t n = group_.tables.size();
    std::vector<std::atomic<int64_t>> unresolved(n);
    for (const Task& task : tasks_) ++unresolved[table_number(task)];
    insertions_.resize(n);
    arrivals_.resize(n);
    expired_.resize(n);
    for_each_task(executor_, static_cast<int64_t>(tasks_.size()), [&](int64_t t) {
      resolve_and_pool(tasks_[t]);
      const int64_t table = table_number(tasks_[t]);
      if (--unresolved[table] == 0) complete(table);
    });
    plan_leavers();
    prepare_rest();
  }

  void commit() noexcept {
    for (size_t t = 0; t < arrivals_.size(); ++t) {
      if (arrivals_[t].has_value()) arrivals_[t]->make_room(insertions_[t]->reused());
    }
    if (rest_.has_value()) {
      rest_->run(executor_, [](Insertion& insertion, int64_t task) {
        insertion.resolve(task);
        insertion.fill(task);
      });
      for_each_task(executor_, static_cast<int64_t>(incomplete_.size()), [&](int64_t t) { pool_bags_with_misses(*incomplete_[t]); });
    }
    for (size_t t = 0; t < insertions_.size(); ++t) {
      Table& table = *group_.tables[t];
      const int64_t made = insertions_[t].has_value() ? insertions_[t]->rows_made() : 0;
      if (arrivals_[t].has_value()) {
        arrivals_[t]->finish(made);
      } else {
        table.counters().misses += made;
        table.counters().inserts += made;
      }
      table.leave(expired_[t]);
      table.counters().expired += static_cast<int64_t>(expired_[t].size());
    }
  }

  void undo() noexcept {
    for (auto& insertion : insertions_) {
      if (insertion.has_value()) insertion->undo();
    }
  }

 private:
  int64_t table_number(const Task& task) const { return group_.feature_tables[task.feature]; }
  Table& table_of(const Task& task) const { return *group_.tables[table_number(task)]; }

  // Makes one table's missing rows, unless they are so many that threads had better share them, or need room.
  void complete(int64_t table) {
    std::vector<Miss> misses = misses_of(table);
    if (misses.empty()) return;
    if (group_.tables[table]->config().bounds.limit_new_rows()) {
      arrivals_[table].emplace(*group_.tables[table], std::move(misses), Arrival::kLookup);
      return;
    }
    const bool large = static_cast<int64_t>(misses.size()) > kLargeInsertion;
    Insertion& insertion = insertions_[table].emplace(*group_.tables[table], std::move(misses), slots_);
    if (large) return;
    for (int64_t step = 0; step < insertion.tasks(); ++step) insertion.place(step);
    insertion.take_slots();
    for (int64_t step = 0; step < insertion.tasks(); ++step) {
      insertion.resolve(step);
      insertion.fill(step);
    }
    for (const Task& task : tasks_) {
      if (table_number(task) == table) pool_bags_with_misses(task);
    }
  }
  std::vector<Miss> misses_of(int64_t table) const {
    std::vector<Miss> misses;
    for (const Task& task : tasks_) {
      if (table_number(task) == table) misses.insert(misses.end(), task.misses.begin(), task.misses.end());
    }
    return misses;
  }
  // Decides which ids get rows, and which rows leave, by need or for their age; what each table does is decided before
  // any of them changes.
  void plan_leavers() {
    for (size_t t = 0; t < arrivals_.size(); ++t) {
      const Table& table = *group_.tables[t];
      if (arrivals_[t].has_value()) {
        arrivals_[t]->plan([&](SlotSet& pinned) { pin(static_cast<int64_t>(t), pinned); }, executor_);
      }
      const int64_t step = table.clock() + 1;
      if (!is_expiry_step(table, step) || table.config().bounds.cold_store) continue;  // those of a cold store go by whoever keeps it
      SlotSet kept = pinned_slots(table);
      pin(static_cast<int64_t>(t), kept);
      if (arrivals_[t].has_value()) {
        for (const Leaver& row : arrivals_[t]->leavers()) kept.add(row.slot);
      }
      expired_[t] = expired_rows(table, step, kept, executor_);
    }
  }
  void prepare_rest() {
    std::vector<size_t> rest;  // tables
    std::vector<Insertion*> insertions;
    std::vector<const Task*> with_refused;
    for (size_t t = 0; t < insertions_.size(); ++t) {
      const bool bounded = arrivals_[t].has_value(), refused = bounded && arrivals_[t]->refused() > 0;
      if (!bounded && (!insertions_[t].has_value() || insertions_[t]->misses() <= kLargeInsertion)) continue;
      for (const Task& task : tasks_) {
        if (table_number(task) == static_cast<int64_t>(t)) (refused ? with_refused : incomplete_).push_back(&task);
      }
      if (bounded) insertions_[t].emplace(*group_.tables[t], arrivals_[t]->take_admitted(), slots_);
      rest.push_back(t);
      insertions.push_back(&*insertions_[t]);
    }
    // A new row reads as its initial row, as one that is held back does: these bags need not wait for the rows.
    for_each_task(executor_, static_cast<int64_t>(with_refused.size()), [&](int64_t t) {
      for (const int64_t bag : with_refused[t]->bags_with_misses) pool_with_missing_rows(*with_refused[t], bag);
    });
    if (!rest.empty()) {
      rest_.emplace(insertions);
      rest_->run(executor_, [](Insertion& insertion, int64_t task) { insertion.place(task); });
    }
    for (const size_t t : rest) {
      const bool reuse = arrivals_[t].has_value() && group_.tables[t]->slots_are_free_at_once();
      insertions_[t]->take_slots(reuse ? arrivals_[t]->leavers() : std::vector<Leaver>{});
    }
    for (size_t t = 0; t < arrivals_.size(); ++t) {
      const size_t leaving = expired_[t].size() + (arrivals_[t].has_value() ? arrivals_[t]->leavers().size() : 0);
      if (leaving > 0) group_.tables[t]->reserve_leave(static_cast<int64_t>(leaving));
    }
  }

  // Adds the slots that the batch has found in a table.
  void pin(int64_t table, SlotSet& pinned) const {
    for (int64_t f = 0; f < group_.features(); ++f) {
      if (group_.feature_tables[f] != table) continue;
      const int64_t begin = offsets_[f * batch_.bags];
      pinned.add(slots_ + begin, offsets_[(f + 1) * batch_.bags] - begin);
    }
  }

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

  // Where a feature's bags begin, from `bag` on.
  const int64_t* bounds(const Task& task, int64_t bag) const { return offsets_ + task.feature * batch_.bags + bag; }
  PoolArgs pool_args(const Task& task, const int64_t* bounds, int64_t bag) const {
    const Table& table = table_of(task);
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
  // Pools the bags again that had ids without rows, run by run.
  void pool_bags_with_misses(const Task& task) const noexcept {
    const auto& bags = task.bags_with_misses;
    for (size_t first = 0, next; first < bags.size(); first = next) {
      next = first + 1;
      while (next < bags.size() && bags[next] == bags[next - 1] + 1) ++next;
      PoolArgs args = pool_args(task, bounds(task, bags[first]), bags[first]);
      args.bags = static_cast<int64_t>(next - first);
      row_kernels().pool(args);
    }
  }

  void resolve_and_pool(Task& task) {
    with_lines(table_of(task), [&](auto lines) { resolve_and_pool<lines>(task); });
  }
  template <int64_t kLines>
  void resolve_and_pool(Task& task) {
    const int64_t* task_bounds = bounds(task, task.bag_begin);
    Resolver<kLines> resolver(table_of(task), group_.routings[table_number(task)], batch_.ids, task_bounds[0],
                      task_bounds[task.bag_end - task.bag_begin], slots_);
    PoolArgs args = pool_args(task, task_bounds, task.bag_begin);
    const int64_t bags = task.bag_end - task.bag_begin;
    for (int64_t bag = 0; bag < bags;) {
      resolver.advance();  // its fetches overlap with the pooling below
      int64_t end = bag;
      while (end < bags && task_bounds[end + 1] <= resolver.resolved()) ++end;
      if (end == bag) continue;
      args.bounds = task_bounds + bag;
      args.bags = end - bag;
      row_kernels().pool(args);
      args.out += args.bags * args.out_stride;
      bag = end;
    }
    task.misses = std::move(resolver.misses);
    if (!task.misses.empty()) find_bags_with_misses(task, task_bounds);
  }
  static void find_bags_with_misses(Task& task, const int64_t* task_bounds) {
    size_t bag = 0;
    for (const Miss& miss : task.misses) {
      while (task_bounds[bag + 1] <= miss.position) ++bag;
      const int64_t number = task.bag_begin + static_cast<int64_t>(bag);
      if (task.bags_with_misses.empty() || task.bags_with_misses.back() != number) task.bags_with_misses.push_back(number);
    }
  }
  // Pools a bag with ids that have no row in the table: what they read as and the rows of the others, laid out one
  // behind the other, are pooled like any others.
  void pool_with_missing_rows(const Task& task, int64_t bag) const {
    const int64_t number = table_number(task);
    const Table& table = *group_.tables[number];
    const int64_t floats = table.rows().view().weight_floats();
    const int64_t* run_bounds = bounds(task, bag);
    const int64_t begin = run_bounds[0], n = run_bounds[1] - run_bounds[0];
    thread_local std::vector<float> rows;
    thread_local std::vector<Slot> slots;
    rows.assign(static_cast<size_t>(n * floats), 0.0f);
    slots.resize(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      slots[i] = static_cast<Slot>(i);
      const Slot slot = slots_[begin + i];
      float* row = rows.data() + i * floats;
      if (slot != kNoSlot) {
        std::copy_n(table.rows().row(slot), floats, row);
      } else {
        read_missing_row(number, group_.routings[number].raw_id(batch_.ids[begin + i]), row);
      }
    }
    const int64_t local_bounds[2] = {0, n};
    PoolArgs args = pool_args(task, local_bounds, bag);
    args.rows.data = rows.data();
    args.rows.stride = floats;
    args.slots = slots.data();
    if (args.weights != nullptr) args.weights += begin;
    args.bags = 1;
    row_kernels().pool(args);
  }
  // row: zeros.
  void read_missing_row(int64_t number, int64_t id, float* row) const {
    const Table& table = *group_.tables[number];
    const char* elsewhere = elsewhere_.empty() ? nullptr : elsewhere_[number].find(id);
    if (elsewhere != nullptr) {
      std::memcpy(row, elsewhere, static_cast<size_t>(table.rows().view().weight_floats()) * sizeof(float));
    } else if (!arrivals_.empty() || table.config().missing_reads_init) {  // in training the initial row is read
      table.initializer().fill(id, row);
    }
  }

  const Group& group_;
  const Batch& batch_;
  Slot* slots_;
  float* out_;
  Executor& executor_;
  bool streams_;
  std::vector<int64_t> each_its_own_;  // the offsets of a batch without offsets
  const int64_t* offsets_;
  std::vector<Task> tasks_;
  const std::vector<RowsElsewhere>& elsewhere_;       // by table, or none
  std::vector<std::optional<Insertion>> insertions_;  // by table, in training
  std::vector<std::optional<Arrivals>> arrivals_;     // of tables with bounds
  std::vector<std::vector<Leaver>> expired_;          // by table
  std::optional<InsertionTasks> rest_;                // of those that complete() has left
  std::vector<const Task*> incomplete_;               // that are to be pooled again once they have run
};

void check_offsets(const Batch& batch, int64_t features, Executor& executor) {
  const int64_t all_bags = batch.bags * features;
  if (std::max(batch.n_ids, all_bags) >= int64_t{kNotFirst}) {
    throw InvalidArgument("a batch holds at most 2**31 - 1 ids and bags");
  }
  if (batch.offset(0) != 0 || batch.offset(all_bags) != batch.n_ids) {
    throw InvalidArgument("offsets must begin with 0 and end with the number of ids, " + std::to_string(batch.n_ids));
  }
  if (batch.offsets == nullptr) return;
  constexpr int64_t kRun = 65536;
  for_each_task(executor, (all_bags + kRun - 1) / kRun, [&](int64_t run) {
    bool ascends = true;
    for (int64_t bag = run * kRun; bag < std::min((run + 1) * kRun, all_bags); ++bag) {
      ascends &= batch.offsets[bag] <= batch.offsets[bag + 1];
    }
    if (!ascends) throw InvalidArgument("offsets must ascend from 0 to the number of ids");
  });
}

const char* RowsElsewhere::find(int64_t id) const {
  const int64_t* found = std::lower_bound(ids, ids + n, id);
  return found == ids + n || *found != id ? nullptr : rows + (found - ids) * stride;
}

void read(const Group& group, const Batch& batch, Slot* slots, float* out, Executor& executor,
          const std::vector<RowsElsewhere>& elsewhere) {
  Lookup(group, batch, slots, out, executor, elsewhere).evaluate();
}

TrainingLookup::TrainingLookup(const Group& group, const Batch& batch, Slot* slots, float* out, Executor& executor) {
  for (const auto& table : group.tables) {
    if (table->clock() >= kMostSteps) throw InvalidArgument("table '" + table->config().name + "' has done all of its 2**32 - 2 steps");
  }
  static const std::vector<RowsElsewhere> nowhere;
  lookup_ = std::make_unique<Lookup>(group, batch, slots, out, executor, nowhere);
  try {
    lookup_->prepare();
  } catch (...) {
    lookup_->undo();
    throw;
  }
}

TrainingLookup::TrainingLookup(TrainingLookup&& other) noexcept = default;

TrainingLookup::~TrainingLookup() {
  if (lookup_ != nullptr) lookup_->undo();
}

void TrainingLookup::commit() noexcept {
  lookup_->commit();
  lookup_ = nullptr;
}

namespace {

std::vector<Miss> resolve_all(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor) {
  if (n >= int64_t{kNotFirst}) throw InvalidArgument("a call takes at most 2**31 - 1 ids");
  const int64_t tasks = (n + kTaskIds - 1) / kTaskIds;
  std::vector<std::vector<Miss>> misses(static_cast<size_t>(tasks));
  const Routing as_they_are;
  for_each_task(executor, tasks, [&](int64_t t) {
    const int64_t end = std::min((t + 1) * kTaskIds, n);
    with_lines(table, [&](auto lines) {
      Resolver<lines> resolver(table, as_they_are, ids, t * kTaskIds, end, slots);
      while (resolver.resolved() < end) resolver.advance();
      misses[t] = std::move(resolver.misses);
    });
  });
  std::vector<Miss> all;
  for (const auto& some : misses) all.insert(all.end(), some.begin(), some.end());
  return all;
}

}  // namespace

void find(const Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor) {
  resolve_all(table, ids, n, slots, executor);
}

std::vector<Miss> find_missing(const Table& table, const int64_t* ids, int64_t n, Executor& executor) {
  std::vector<Slot> slots(static_cast<size_t>(n));
  return resolve_all(table, ids, n, slots.data(), executor);
}

Upsert::Upsert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival)
    : table_(table), slots_(slots), executor_(executor) {
  std::vector<Miss> misses = resolve_all(table, ids, n, slots, executor);
  if (misses.empty()) return;
  try {
    insert(std::move(misses), n, arrival);
  } catch (...) {
    if (insertion_.has_value()) insertion_->undo();
    throw;
  }
}

void Upsert::insert(std::vector<Miss> misses, int64_t n, Arrival arrival) {
  arrivals_.emplace(table_, std::move(misses), arrival);
  arrivals_->plan([&](SlotSet& pinned) { pinned.add(slots_, n); }, executor_);
  insertion_.emplace(table_, arrivals_->take_admitted(), slots_, initialises(arrival));
  tasks_.emplace(std::vector<Insertion*>{&*insertion_});
  tasks_->run(executor_, [](Insertion& insertion, int64_t task) { insertion.place(task); });
  const std::vector<Leaver>& leavers = arrivals_->leavers();
  insertion_->take_slots(table_.slots_are_free_at_once() ? leavers : std::vector<Leaver>{});
  if (!leavers.empty()) table_.reserve_leave(static_cast<int64_t>(leavers.size()));
  tasks_->run(executor_, [](Insertion& insertion, int64_t task) { insertion.resolve(task); });
}

Upsert::~Upsert() {
  if (!committed_ && insertion_.has_value()) insertion_->undo();
}

void Upsert::commit() noexcept {
  committed_ = true;
  if (!insertion_.has_value()) return;
  arrivals_->make_room(insertion_->reused());
  tasks_->run(executor_, [](Insertion& insertion, int64_t task) { insertion.fill(task); });
  arrivals_->finish(insertion_->rows_made());
}

void find_or_insert(Table& table, const int64_t* ids, int64_t n, Slot* slots, Executor& executor, Arrival arrival) {
  Upsert(table, ids, n, slots, executor, arrival).commit();
}

}  // namespace recstore
