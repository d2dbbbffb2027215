#include "lookup/forward.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "base/buffer_pool.h"
#include "base/error.h"
#include "bounds/arrivals.h"
#include "lookup/find.h"
#include "lookup/insertion.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

constexpr int64_t kTaskIds = 1024;  // approximate number of ids in a task, at most
constexpr int64_t kLeastTaskIds = 256;
constexpr int64_t kLargeInsertion = 16384;  // a table with more misses makes its rows on several threads,
constexpr int64_t kLargeForAll = 131072;    // or than this number over that of the threads,
constexpr int64_t kLeastLarge = 2048;       // but not with fewer, because to wake threads takes time
constexpr int64_t kMostSteps = 0xFFFFFFFE;  // a row's last step has 32 bits, and one value is reserved
constexpr int64_t kStreamBytes = 16 << 20;  // outputs of at least this size are written past the caches

// A run of one feature's bags, and the misses found in it.
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
         const std::vector<RowsElsewhere>& elsewhere, const SlotsAhead* ahead = nullptr)
      : group_(group),
        batch_(batch),
        slots_(slots),
        out_(out),
        executor_(executor),
        ahead_(ahead),
        large_insertion_(std::clamp(kLargeForAll / executor.threads(), kLeastLarge, kLargeInsertion)),
        elsewhere_(elsewhere) {
    check_offsets(batch, group.features(), executor);
    const int64_t stride_bytes = group.columns() * static_cast<int64_t>(sizeof(float));
    streams_ = stride_bytes * batch.bags >= kStreamBytes && stride_bytes % 64 == 0 &&
               reinterpret_cast<uintptr_t>(out) % 64 == 0;
    split();
    if (ahead_ == nullptr) return;
    for (size_t t = 0; t < group.tables.size(); ++t) stale_.emplace_back(group.tables[t]->vacated(), ahead_->stamps[t]);
  }

  // initial: an id without a row reads as its initial row, whatever the table's options say.
  void evaluate(bool initial = false) {
    reads_initial_ = initial;
    for_each_task(executor_, static_cast<int64_t>(tasks_.size()), [&](int64_t t) {
      resolve_and_pool(tasks_[t]);
      const bool others = !elsewhere_.empty() && elsewhere_[table_number(tasks_[t])].n > 0;
      if (tasks_[t].misses.empty() || !(others || initial || table_of(tasks_[t]).config().missing_reads_init)) {
        return;
      }
      for (const int64_t bag : tasks_[t].bags_with_misses) pool_with_missing_rows(tasks_[t], bag);
    });
  }

  // Does everything in a training lookup that can fail. No row changes before commit(), and undo() restores the tables.
  //
  // To wake threads and to wait for the last of them costs more than the work on a small batch, above all on busy
  // cores. Therefore the thread that resolves the last task of a table completes the table in the same parallel run.
  void prepare() {
    const size_t n = group_.tables.size();
    std::vector<std::atomic<int64_t>> unresolved(n);
    for (const Task& task : tasks_) ++unresolved[table_number(task)];
    insertions_.resize(n);
    arrivals_.resize(n);
    expired_.resize(n);
    ticks_.resize(n);
    for_each_task(executor_, static_cast<int64_t>(tasks_.size()), [&](int64_t t) {
      resolve_and_pool(tasks_[t]);
      const int64_t table = table_number(tasks_[t]);
      if (--unresolved[table] == 0) complete(table);
    });
    plan_leavers();
    prepare_rest();
  }

  void commit() noexcept {
    if (rest_.has_value()) {
      for_each_table([&](int64_t t, Executor& executor) {
        if (arrivals_[t].has_value()) arrivals_[t]->make_room(insertions_[t]->reused(), executor);
      });
      rest_->run(executor_, [](Insertion& insertion, int64_t task) {
        insertion.resolve(task);
        insertion.fill(task);
      });
      for_each_task(executor_, static_cast<int64_t>(incomplete_.size()),
                    [&](int64_t t) { pool_bags_with_misses(*incomplete_[t]); });
    }
    for_each_table([&](int64_t t, Executor& executor) {
      if (insertions_[t].has_value() && !insertions_[t]->finished()) insertions_[t]->finish();
      Table& table = *group_.tables[t];
      const int64_t made = insertions_[t].has_value() ? insertions_[t]->rows_made() : 0;
      if (arrivals_[t].has_value()) {
        arrivals_[t]->finish(made, executor);
      } else {
        table.counters().misses += made;
        table.counters().inserts += made;
      }
      if (ticks_[t].has_value()) table.wall_clock()->add(*ticks_[t]);
      table.leave(expired_[t], 0, executor);
      table.counters().expired += static_cast<int64_t>(expired_[t].size());
    });
  }

  void undo() noexcept {
    for (auto& insertion : insertions_) {
      if (insertion.has_value()) insertion->undo();
    }
  }

 private:
  int64_t table_number(const Task& task) const { return group_.feature_tables[task.feature]; }
  Table& table_of(const Task& task) const { return *group_.tables[table_number(task)]; }

  // Makes the missing rows of one table, unless the table limits new rows or has so many that threads should share
  // them.
  void complete(int64_t table) {
    std::vector<Miss> misses = misses_of(table);
    if (misses.empty()) return;
    if (group_.tables[table]->config().bounds.limit_new_rows()) {
      arrivals_[table].emplace(*group_.tables[table], std::move(misses), Arrival::kLookup);
      return;
    }
    const bool large = static_cast<int64_t>(misses.size()) > large_insertion_;
    Insertion& insertion = insertions_[table].emplace(*group_.tables[table], DistinctMisses(std::move(misses)), slots_);
    if (large) return;
    for (int64_t step = 0; step < insertion.tasks(); ++step) insertion.group(step);
    insertion.take_slots();
    for (int64_t step = 0; step < insertion.tasks(); ++step) {
      insertion.resolve(step);
      insertion.fill(step);
    }
    insertion.finish();
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
  // Decides which ids get rows, and which rows are evicted or expire. This is decided for all tables before any table
  // changes.
  void plan_leavers() {
    for_each_table([&](int64_t t, Executor& executor) {
      const Table& table = *group_.tables[t];
      if (arrivals_[t].has_value()) arrivals_[t]->plan([&](SlotSet& pinned) { pin(t, pinned); }, executor);
      const int64_t step = table.clock() + 1;
      if (table.wall_clock() != nullptr) ticks_[t] = table.wall_clock()->due(step);
      const int64_t before = ticks_[t].has_value() ? ticks_[t]->expired_before : expired_before(table, step);
      if (before == 0 || table.config().bounds.cold_store) return;  // the owner of the cold store expires its rows
      SlotSet kept = pinned_slots(table);
      pin(t, kept);
      if (arrivals_[t].has_value()) {
        for (const Leaver& row : arrivals_[t]->leavers()) kept.add(row.slot);
      }
      expired_[t] = expired_rows(table, before, kept, executor);
    });
  }
  // Calls work(table, executor) for each table. If there are many tables and misses, each table has a thread, because
  // some of its work cannot be shared. To wake threads for few misses costs more than the work.
  template <class Work>
  void for_each_table(const Work& work) {
    constexpr int64_t kManyTables = 8;
    const auto n = static_cast<int64_t>(insertions_.size());
    size_t misses = 0;
    for (const Task& task : tasks_) misses += task.misses.size();
    const bool many =
        n >= std::min<int64_t>(executor_.threads(), kManyTables) && static_cast<int64_t>(misses) >= large_insertion_;
    for_each_part(executor_, n, many, work);
  }
  void prepare_rest() {
    std::vector<size_t> rest;  // tables
    std::vector<const Task*> with_refused;
    for (size_t t = 0; t < insertions_.size(); ++t) {
      const bool bounded = arrivals_[t].has_value(), refused = bounded && arrivals_[t]->refused() > 0;
      if (!bounded && (!insertions_[t].has_value() || insertions_[t]->misses() <= large_insertion_)) continue;
      for (const Task& task : tasks_) {
        if (table_number(task) == static_cast<int64_t>(t)) (refused ? with_refused : incomplete_).push_back(&task);
      }
      rest.push_back(t);
    }
    // A new row and a refused one both read as the initial row, so these bags do not have to wait for the rows.
    for_each_task(executor_, static_cast<int64_t>(with_refused.size()), [&](int64_t t) {
      for (const int64_t bag : with_refused[t]->bags_with_misses) pool_with_missing_rows(*with_refused[t], bag);
    });
    std::vector<Insertion*> insertions, not_grouped;
    for (const size_t t : rest) {
      if (arrivals_[t].has_value()) {
        insertions.push_back(&insertions_[t].emplace(*group_.tables[t], arrivals_[t]->take_admitted(), slots_));
      } else {
        insertions.push_back(&*insertions_[t]);
        not_grouped.push_back(insertions.back());
      }
    }
    if (!rest.empty()) rest_.emplace(insertions);
    InsertionTasks(not_grouped).run(executor_, [](Insertion& insertion, int64_t task) { insertion.group(task); });
    // The index of a table makes room by moving entries, which takes as long as a fifth of an insertion.
    for_each_task(executor_, static_cast<int64_t>(rest.size()), [&](int64_t i) {
      const size_t t = rest[static_cast<size_t>(i)];
      const bool reuse = arrivals_[t].has_value() && group_.tables[t]->slots_are_free_at_once();
      insertions_[t]->take_slots(reuse ? arrivals_[t]->leavers() : std::vector<Leaver>{});
    });
    for (size_t t = 0; t < arrivals_.size(); ++t) {
      const size_t leaving = expired_[t].size() + (arrivals_[t].has_value() ? arrivals_[t]->leavers().size() : 0);
      if (leaving > 0) group_.tables[t]->reserve_leave(static_cast<int64_t>(leaving));
    }
  }

  // Adds the slots that the batch has found in one table.
  void pin(int64_t table, SlotSet& pinned) const {
    for (int64_t f = 0; f < group_.features(); ++f) {
      if (group_.feature_tables[f] != table) continue;
      const int64_t begin = batch_.offset(f * batch_.bags);
      pinned.add(slots_ + begin, batch_.offset((f + 1) * batch_.bags) - begin);
    }
  }

  void split() {
    const int64_t all_bags = batch_.bags * group_.features();
    const int64_t ids_per_bag = std::max<int64_t>(1, batch_.n_ids / std::max<int64_t>(1, all_bags));
    const int64_t task_ids = std::clamp(batch_.n_ids / (8 * executor_.threads()), kLeastTaskIds, kTaskIds);
    const int64_t bags_per_task = std::max<int64_t>(1, task_ids / ids_per_bag);
    // Neighbouring tasks write the same rows of the output, each task its own columns.
    for (int64_t begin = 0; begin < batch_.bags; begin += bags_per_task) {
      for (int64_t f = 0; f < group_.features(); ++f) {
        tasks_.push_back({f, begin, std::min(begin + bags_per_task, batch_.bags), {}, {}});
      }
    }
  }

  // The position at which a bag of the task's feature begins.
  int64_t position(const Task& task, int64_t bag) const { return batch_.offset(task.feature * batch_.bags + bag); }
  // The arguments for `bags` bags, starting with `bag`.
  PoolArgs pool_args(const Task& task, int64_t bag, int64_t bags) const {
    const Table& table = table_of(task);
    const int64_t column = group_.column_offsets[task.feature];
    PoolArgs args;
    args.rows = table.rows().view();
    args.slots = slots_;
    args.bounds = batch_.offsets == nullptr ? nullptr : batch_.offsets + task.feature * batch_.bags + bag;
    args.first = position(task, bag);
    args.bags = bags;
    args.weights = batch_.weights;
    args.out = out_ + bag * group_.columns() + column;
    args.out_stride = group_.columns();
    args.mean = group_.mean;
    args.stream = streams_ && column % 16 == 0 && args.rows.columns % 16 == 0;
    return args;
  }
  // Pools the bags with misses once more, in runs of consecutive bags.
  void pool_bags_with_misses(const Task& task) const noexcept {
    if (out_ == nullptr) return;
    const auto& bags = task.bags_with_misses;
    for (size_t first = 0, next; first < bags.size(); first = next) {
      next = first + 1;
      while (next < bags.size() && bags[next] == bags[next - 1] + 1) ++next;
      row_loops().pool(pool_args(task, bags[first], static_cast<int64_t>(next - first)));
    }
  }

  void resolve_and_pool(Task& task) {
    const int64_t begin = position(task, task.bag_begin), end = position(task, task.bag_end);
    if (ahead_ != nullptr && is_ahead(task, begin, end)) {
      resolve_stale(task, begin, end);
    } else {
      resolve(table_of(task), group_.routings[table_number(task)], batch_.ids, begin, end, slots_, task.misses);
    }
    if (out_ != nullptr) row_loops().pool(pool_args(task, task.bag_begin, task.bag_end - task.bag_begin));
    find_bags_with_misses(task);
  }

  // Whether slots_ has the slots of the ids at the positions [begin, end), except stale ones.
  bool is_ahead(const Task& task, int64_t begin, int64_t end) const {
    return !stale_[table_number(task)].all() && std::memcmp(batch_.ids + begin, ahead_->id_data() + begin,
                                                            static_cast<size_t>(end - begin) * sizeof(int64_t)) == 0;
  }
  // Resolves those of the positions [begin, end) that had no row, and those whose row has left its slot.
  void resolve_stale(Task& task, int64_t begin, int64_t end) {
    const StaleSlots& stale = stale_[table_number(task)];
    if (stale.none() && std::count(slots_ + begin, slots_ + end, kNoSlot) == 0) return;
    std::vector<int64_t> positions, ids;
    for (int64_t p = begin; p < end; ++p) {
      if (slots_[p] != kNoSlot && (stale.none() || !stale.contains(slots_[p]))) continue;
      positions.push_back(p);
      ids.push_back(batch_.ids[p]);
    }
    const auto n = static_cast<int64_t>(positions.size());
    std::vector<Slot> slots(positions.size());
    resolve(table_of(task), group_.routings[table_number(task)], ids.data(), 0, n, slots.data(), task.misses);
    for (int64_t i = 0; i < n; ++i) slots_[positions[i]] = slots[i];
    for (Miss& miss : task.misses) miss.position = positions[miss.position];
  }
  void find_bags_with_misses(Task& task) const {
    int64_t bag = task.bag_begin;
    for (const Miss& miss : task.misses) {
      while (position(task, bag + 1) <= miss.position) ++bag;
      if (task.bags_with_misses.empty() || task.bags_with_misses.back() != bag) task.bags_with_misses.push_back(bag);
    }
  }
  // Pools a bag in which some ids have no row in the table. All rows of the bag are copied into one array first.
  void pool_with_missing_rows(const Task& task, int64_t bag) const {
    if (out_ == nullptr) return;
    const int64_t number = table_number(task);
    const Table& table = *group_.tables[number];
    const int64_t floats = table.rows().view().weight_floats();
    const int64_t begin = position(task, bag), n = position(task, bag + 1) - begin;
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
    PoolArgs args = pool_args(task, bag, 1);
    args.bounds = local_bounds;
    args.first = 0;
    args.rows.data = rows.data();
    args.rows.stride = floats;
    args.slots = slots.data();
    if (args.weights != nullptr) args.weights += begin;
    row_loops().pool(args);
  }
  // row: filled with zeros.
  void read_missing_row(int64_t number, int64_t id, float* row) const {
    const Table& table = *group_.tables[number];
    const char* elsewhere = elsewhere_.empty() ? nullptr : elsewhere_[number].find(id);
    if (elsewhere != nullptr) {
      std::memcpy(row, elsewhere, static_cast<size_t>(table.rows().view().weight_floats()) * sizeof(float));
    } else if (reads_initial_ || !arrivals_.empty() ||
               table.config().missing_reads_init) {  // training always reads the initial row
      table.initializer().fill(id, row);
    }
  }

  const Group& group_;
  const Batch& batch_;
  Slot* slots_;
  float* out_;
  Executor& executor_;
  const SlotsAhead* ahead_;        // null if no slots have been resolved ahead
  std::vector<StaleSlots> stale_;  // by table, if slots have been resolved ahead
  bool reads_initial_ = false;
  bool streams_;
  const int64_t large_insertion_;  // kLargeInsertion, or less if there are many threads
  std::vector<Task> tasks_;
  const std::vector<RowsElsewhere>& elsewhere_;        // by table, or empty
  std::vector<std::optional<Insertion>> insertions_;   // by table, in training
  std::vector<std::optional<Arrivals>> arrivals_;      // by table; only tables whose bounds limit new rows have one
  std::vector<std::vector<Leaver>> expired_;           // by table
  std::vector<std::optional<WallClock::Tick>> ticks_;  // by table
  std::optional<InsertionTasks> rest_;                 // insertions that complete() has not done
  std::vector<const Task*> incomplete_;                // tasks whose bags are pooled again after rest_ has run
};

const char* RowsElsewhere::find(int64_t id) const {
  const int64_t* found = std::lower_bound(ids, ids + n, id);
  return found == ids + n || *found != id ? nullptr : rows + (found - ids) * stride;
}

void read(const Group& group, const Batch& batch, float* out, Executor& executor,
          const std::vector<RowsElsewhere>& elsewhere) {
  const auto slots = BufferPool::instance().take(static_cast<size_t>(batch.n_ids) * sizeof(Slot));
  const auto locks = group.lock_shared();
  Lookup(group, batch, static_cast<Slot*>(slots.data()), out, executor, elsewhere).evaluate();
}

void read_trained(const Group& group, const Batch& batch, float* out, Executor& executor) {
  const auto slots = BufferPool::instance().take(static_cast<size_t>(batch.n_ids) * sizeof(Slot));
  const std::vector<RowsElsewhere> nowhere;
  const SharedTableLocks locks = group.lock_shared();
  Lookup(group, batch, static_cast<Slot*>(slots.data()), out, executor, nowhere).evaluate(true);
}

TrainingLookup::TrainingLookup(const Group& group, const Batch& batch, Slot* slots, float* out, Executor& executor,
                               const SlotsAhead* ahead) {
  for (const auto& table : group.tables) {
    if (table->clock() >= kMostSteps) {
      throw InvalidArgument("table '" + table->config().name + "' cannot do more than 2**32 - 2 steps");
    }
  }
  static const std::vector<RowsElsewhere> nowhere;
  lookup_ = std::make_unique<Lookup>(group, batch, slots, out, executor, nowhere, ahead);
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

}  // namespace recstore
