#include "lookup/backward.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>

#include "base/buffer_pool.h"
#include "bounds/row_uses.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

constexpr int64_t kWholeIds = 16384;  // a table with more positions is divided into parts
constexpr int64_t kPartIds = 2048;    // approximate positions of a part; its hash table fits the first-level cache
constexpr int64_t kChunkIds = 4096;   // approximate positions of a run of bags, at most
constexpr int64_t kLeastChunkIds = 256;
constexpr int kManyThreads = 4;  // so few threads seldom wait for each other

// The most gradients that one of several threads sums for a row. Threads share the columns of a longer sum.
int64_t most_summed(int threads) { return threads <= kManyThreads ? 4096 : 1024; }
// The most gradients of a row that is updated with the other rows of its run. The first run of a feature has the first
// positions of most frequent ids, which many threads would wait for: each of these ids is a task of its own.
int64_t most_in_run(int threads) { return threads <= kManyThreads ? most_summed(threads) : 32; }

// Memory that grows without keeping or clearing its contents.
template <class T>
class Scratch {
 public:
  T* get(int64_t count) {
    if (count > capacity_) {
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64)));
      capacity_ = data_ == nullptr ? 0 : count;
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t capacity_ = 0;
};

struct Chunk {
  int64_t table;
  int64_t bag_begin;  // a bag's number in the batch
  int64_t bag_end;
  int64_t place;  // of the first bag within its feature
};

// A position of the batch, and its slot.
struct Place {
  Slot slot;
  int32_t position;
};

// The part of the batch that belongs to one table. It is divided into `parts` by the low bits of the slots, so that
// each id belongs to one part, and the frequent ids, which have low slots, are spread evenly.
struct TableWork {
  int64_t table;
  int64_t n_ids = 0;
  int64_t parts = 1;
  std::vector<Chunk> chunks;        // in the order of the batch
  std::vector<int64_t> begin;       // (chunks, parts): index in `places` for the chunk's positions of a part
  std::vector<int64_t> part_begin;  // (parts + 1,)
  Place* places = nullptr;          // sorted by part, if there are several parts
};

// The memory that is needed to link the positions of up to n ids.
struct LinkerMemory {
  // Number of buckets of the hash table.
  static int64_t buckets(int64_t n) {
    int64_t buckets = 32;
    while (buckets < 2 * n) buckets *= 2;
    return buckets;
  }
  Place* hash;  // (buckets(n),)
};
struct Workspace {
  Scratch<Place> hash;
  Scratch<float> gradient;

  LinkerMemory linker(int64_t n) { return {hash.get(LinkerMemory::buckets(n))}; }
};

Workspace& workspace() {
  thread_local Workspace space;
  return space;
}

// The memory of all workers of a run, allocated beforehand so that a run cannot fail.
class WorkerMemory {
 public:
  static constexpr int64_t kRows = 2 + kStoredTogether;  // rows of scratch memory; further rows are for states

  // ids: number of ids that a worker links at once; columns: number of columns of a row, rounded up to 16.
  WorkerMemory(int workers, int64_t ids, int64_t columns, int64_t states)
      : columns_(columns),
        hash_bytes_(ids == 0 ? 0 : LinkerMemory::buckets(ids) * static_cast<int64_t>(sizeof(Place))),
        bytes_(hash_bytes_ + (kRows + states) * columns * static_cast<int64_t>(sizeof(float))),
        buffer_(BufferPool::instance().take(static_cast<size_t>(workers * bytes_))) {}

  LinkerMemory linker(int worker) const { return {reinterpret_cast<Place*>(begin(worker))}; }
  // A row (columns,) of scratch memory; number: below kRows + states.
  float* row(int worker, int64_t number) const {
    return reinterpret_cast<float*>(begin(worker) + hash_bytes_) + number * columns_;
  }

 private:
  char* begin(int worker) const { return static_cast<char*>(buffer_.data()) + worker * bytes_; }

  int64_t columns_;
  int64_t hash_bytes_;
  int64_t bytes_;
  BufferPool::Buffer buffer_;
};

// Links the positions of a batch that have the same slot, in the order of the batch, and visits every chunk of the
// batch after its table is linked. The constructor does everything that can fail.
class Grouping {
 public:
  // steps: if given, tables whose step is 0 are skipped. columns: columns of the rows of scratch memory, or 0 for none.
  // states: number of further rows of scratch memory.
  Grouping(const ResolvedBatch& resolved, Executor& executor, const Steps* steps = nullptr, int64_t columns = 0,
           int64_t states = 0)
      : r_(resolved),
        executor_(executor),
        links_(BufferPool::instance().take(static_cast<size_t>(resolved.batch.n_ids) * sizeof(Link))),
        bag_of_(BufferPool::instance().take(static_cast<size_t>(resolved.batch.n_ids) * sizeof(uint32_t))),
        distinct_(resolved.group.tables.size()),
        found_(resolved.group.tables.size()) {
    plan(steps);
    sort_into_parts();
    // To wake threads costs more than to link a small table. If there are enough tables to keep all threads busy, each
    // of them is linked and visited in one task.
    const auto is_whole = [](const TableWork& work) { return work.parts == 1; };
    const bool at_once = std::count_if(tables_.begin(), tables_.end(), is_whole) >= 2 * executor.threads();
    int64_t ids = 0;
    for (const TableWork& work : tables_) {
      if (at_once && is_whole(work)) {
        whole_.push_back(&work);
        ids = std::max(ids, work.n_ids);
      } else {
        chunks_.insert(chunks_.end(), work.chunks.begin(), work.chunks.end());
      }
    }
    // The first chunks of the features have the most work.
    const auto is_before = [](const Chunk& a, const Chunk& b) { return a.place < b.place; };
    if (executor.threads() > kManyThreads) std::stable_sort(chunks_.begin(), chunks_.end(), is_before);
    link_others(at_once);
    memory_.emplace(executor.threads(), ids, (columns + 15) / 16 * 16, states);
  }

  Executor& executor() const { return executor_; }
  const Link* links() const { return static_cast<const Link*>(links_.data()); }
  const uint32_t* bag_of() const { return static_cast<const uint32_t*>(bag_of_.data()); }

  template <class Visit>  // visit(chunk, worker), in parallel; it must not throw
  Distinct run(const Visit& visit) noexcept {
    for_each_task(executor_, static_cast<int64_t>(whole_.size()), [&](int64_t t, int worker) {
      link(*whole_[t], memory_->linker(worker));
      for (const Chunk& chunk : whole_[t]->chunks) visit(chunk, worker);
    });
    for_each_task(executor_, static_cast<int64_t>(chunks_.size()),
                  [&](int64_t c, int worker) { visit(chunks_[c], worker); });
    std::copy(distinct_.begin(), distinct_.end(), found_.begin());
    return std::move(found_);  // no copy, which could fail
  }
  const WorkerMemory& memory() const { return *memory_; }
  // The most ids of a table.
  int64_t most_ids() const {
    int64_t most = 0;
    for (const TableWork& work : tables_) most = std::max(most, work.n_ids);
    return most;
  }

 private:
  void plan(const Steps* steps) {
    const Group& group = r_.group;
    const int64_t bags = r_.batch.bags;
    const int64_t chunk_ids = std::clamp(r_.batch.n_ids / (16 * executor_.threads()), kLeastChunkIds, kChunkIds);
    std::vector<TableWork> works(group.tables.size());
    for (int64_t f = 0; f < group.features(); ++f) {
      TableWork& work = works[group.feature_tables[f]];
      work.table = group.feature_tables[f];
      const int64_t n = r_.batch.offset((f + 1) * bags) - r_.batch.offset(f * bags);
      if (n == 0) continue;
      work.n_ids += n;
      const int64_t bags_per_chunk = std::max<int64_t>(1, bags * chunk_ids / n);
      for (int64_t b = 0; b < bags; b += bags_per_chunk) {
        work.chunks.push_back({work.table, f * bags + b, f * bags + std::min(b + bags_per_chunk, bags), b});
      }
    }
    for (TableWork& work : works) {
      if (work.n_ids == 0 || (steps != nullptr && (*steps)[work.table] == 0)) continue;
      if (work.n_ids > kWholeIds) {
        while (work.n_ids / work.parts > 2 * kPartIds) work.parts *= 2;
      }
      tables_.push_back(std::move(work));
    }
  }

  // Writes the bag of every position of a chunk, and calls visit(place) for the positions that have a slot.
  template <class Visit>
  void walk(const Chunk& chunk, const Visit& visit) const {
    auto* bag_of = static_cast<uint32_t*>(bag_of_.data());
    auto* links = static_cast<Link*>(links_.data());
    int64_t p = r_.batch.offset(chunk.bag_begin);
    for (int64_t bag = chunk.bag_begin; bag < chunk.bag_end; ++bag) {
      for (const int64_t end = r_.batch.offset(bag + 1); p < end; ++p) {
        bag_of[p] = static_cast<uint32_t>(bag);
        if (r_.slots[p] == kNoSlot) {
          links[p] = kNotFirst;  // nothing to update
        } else {
          visit(Place{r_.slots[p], static_cast<int32_t>(p)});
        }
      }
    }
  }

  void sort_into_parts() {
    struct Task {
      TableWork* work;
      size_t chunk;
    };
    std::vector<Task> tasks;
    int64_t total = 0;
    for (TableWork& work : tables_) {
      if (work.parts == 1) continue;
      work.begin.assign(work.chunks.size() * static_cast<size_t>(work.parts), 0);
      total += work.n_ids;
      for (size_t c = 0; c < work.chunks.size(); ++c) tasks.push_back({&work, c});
    }
    if (tasks.empty()) return;
    places_ = BufferPool::instance().take(static_cast<size_t>(total) * sizeof(Place));
    const auto of_parts = [](const Task& task) {
      return task.work->begin.data() + task.chunk * static_cast<size_t>(task.work->parts);
    };
    for_each_task(executor_, static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const auto mask = static_cast<Slot>(tasks[t].work->parts - 1);
      int64_t* counts = of_parts(tasks[t]);
      walk(tasks[t].work->chunks[tasks[t].chunk], [=](Place place) { ++counts[place.slot & mask]; });
    });
    auto* next = static_cast<Place*>(places_.data());
    for (TableWork& work : tables_) {
      if (work.parts == 1) continue;
      work.places = next;
      next += prefix_sums(work);
    }
    for_each_task(executor_, static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const TableWork& work = *tasks[t].work;
      const auto mask = static_cast<Slot>(work.parts - 1);
      const Chunk& chunk = work.chunks[tasks[t].chunk];
      const int64_t end = r_.batch.offset(chunk.bag_end);
      int64_t* ends = of_parts(tasks[t]);
      for (int64_t p = r_.batch.offset(chunk.bag_begin); p < end; ++p) {
        const Slot slot = r_.slots[p];
        if (slot != kNoSlot) work.places[ends[slot & mask]++] = {slot, static_cast<int32_t>(p)};
      }
    });
  }
  // Turns the counts in work.begin into first indices, part by part, and within a part chunk by chunk. Returns the sum.
  static int64_t prefix_sums(TableWork& work) {
    int64_t sum = 0;
    work.part_begin.assign(1, 0);
    for (int64_t part = 0; part < work.parts; ++part) {
      for (size_t c = 0; c < work.chunks.size(); ++c) {
        int64_t& entry = work.begin[c * static_cast<size_t>(work.parts) + static_cast<size_t>(part)];
        const int64_t count = entry;
        entry = sum;
        sum += count;
      }
      work.part_begin.push_back(sum);
    }
    return sum;
  }

  // Links the tables that run() does not link.
  void link_others(bool at_once) {
    struct Task {
      const TableWork* work;
      int64_t part;
    };
    std::vector<Task> tasks;
    for (const TableWork& work : tables_) {
      if (at_once && work.parts == 1) continue;
      for (int64_t part = 0; part < work.parts; ++part) tasks.push_back({&work, part});
    }
    for_each_task(executor_, static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const TableWork& work = *tasks[t].work;
      if (work.parts == 1) {
        link(work, workspace().linker(work.n_ids));
      } else {
        const int64_t begin = work.part_begin[tasks[t].part], end = work.part_begin[tasks[t].part + 1];
        Linker linker(static_cast<Link*>(links_.data()), end - begin, workspace().linker(end - begin));
        for (int64_t i = begin; i < end; ++i) linker.add(work.places[i]);
        distinct_[work.table] += linker.distinct();
      }
    });
  }
  void link(const TableWork& work, const LinkerMemory& memory) {
    Linker linker(static_cast<Link*>(links_.data()), work.n_ids, memory);
    for (const Chunk& chunk : work.chunks) walk(chunk, [&](Place place) { linker.add(place); });
    distinct_[work.table] += linker.distinct();
  }

  // Links each position that is added to the last position with the same slot.
  class Linker {
   public:
    Linker(Link* links, int64_t n, const LinkerMemory& memory) : links_(links), hash_(memory.hash) {
      const int64_t buckets = LinkerMemory::buckets(n);
      shift_ = 32 - __builtin_ctzll(static_cast<uint64_t>(buckets));
      mask_ = static_cast<uint32_t>(buckets - 1);
      std::memset(hash_, 0xFF, static_cast<size_t>(buckets) * sizeof(Place));  // kNoSlot: the bucket is empty
    }

    void add(Place place) {
      uint32_t bucket = (place.slot * 0x9E3779B1u) >> shift_;
      while (hash_[bucket].slot != kNoSlot && hash_[bucket].slot != place.slot) bucket = (bucket + 1) & mask_;
      Place& last = hash_[bucket];
      if (last.slot == kNoSlot) {
        ++distinct_;
        links_[place.position] = 0;
      } else {
        links_[last.position] |= static_cast<Link>(place.position) + 1;
        links_[place.position] = kNotFirst;
      }
      last = place;
    }
    int64_t distinct() const { return distinct_; }

   private:
    Link* links_;
    Place* hash_;  // by bucket, a slot and its last position so far
    int shift_;
    uint32_t mask_;
    int64_t distinct_ = 0;
  };

  const ResolvedBatch r_;
  Executor& executor_;
  BufferPool::Buffer links_;
  BufferPool::Buffer bag_of_;
  BufferPool::Buffer places_;
  std::vector<std::atomic<int64_t>> distinct_;
  Distinct found_;
  std::vector<TableWork> tables_;
  std::vector<const TableWork*> whole_;  // each of these is linked and visited in one task
  std::vector<Chunk> chunks_;            // the chunks of all other tables
  std::optional<WorkerMemory> memory_;
};

// Calls before_change() for every row whose bookkeeping a chunk is about to change.
void note_changes(Table& table, const ResolvedBatch& resolved, const Link* links, const Chunk& chunk) {
  const int64_t end = resolved.batch.offset(chunk.bag_end);
  for (int64_t p = resolved.batch.offset(chunk.bag_begin); p < end; ++p) {
    if ((links[p] & kNotFirst) == 0) table.before_change(resolved.slots[p]);
  }
}

// Calls before_write() for every row that a chunk is about to change.
void note_writes(Table& table, const ResolvedBatch& resolved, const Link* links, const Chunk& chunk) {
  const int64_t end = resolved.batch.offset(chunk.bag_end);
  for (int64_t p = resolved.batch.offset(chunk.bag_begin); p < end; ++p) {
    if ((links[p] & kNotFirst) == 0) table.before_write(resolved.slots[p]);
  }
}

// Calls note_use() for every row that a chunk looks up.
void note_uses(const Table& table, const ResolvedBatch& resolved, const Link* links, const Chunk& chunk,
               uint32_t step) {
  const Bounds& bounds = table.config().bounds;
  const int64_t end = resolved.batch.offset(chunk.bag_end);
  for (int64_t p = resolved.batch.offset(chunk.bag_begin); p < end; ++p) {
    if ((links[p] & kNotFirst) != 0) continue;
    uint32_t times = 1;
    if (bounds.eviction == Eviction::kLeastOccurring) {
      for (Link next = links[p]; (next & ~kNotFirst) != 0; next = links[(next & ~kNotFirst) - 1]) ++times;
    }
    note_use(table.rows().meta(resolved.slots[p]), step, times, bounds);
  }
}

}  // namespace

StochasticRounding rounding_of(const Table& table, const Routing& routing) {
  const TableConfig& config = table.config();
  if (!config.stochastic_rounding && config.state_type == StateType::kFloat32) return {};
  const uint64_t key = mix(table.initializer().key() + mix(static_cast<uint64_t>(table.optimizer_steps()) + 1));
  return {config.stochastic_rounding, key, &routing, config.column_begin};
}

struct Update::Work {
  Work(const ResolvedBatch& of, const float* gradient, const Steps& looked_up, Executor& executor)
      : resolved(of),
        grad(gradient),
        steps(looked_up),
        threads(executor.threads()),
        columns_of_sum((most_columns(of.group) + 15) / 16 * 16),
        grouping(of, executor, nullptr, most_columns(of.group), most_widened_states(of.group)) {
    if (threads == 1 || grouping.most_ids() <= later.most) return;  // no id can have more
    const auto of_later = static_cast<size_t>(of.batch.n_ids / later.most);
    const auto of_longest = static_cast<size_t>(of.batch.n_ids / longest.most);
    positions.resize(of_later + of_longest);
    later.positions = positions.data();
    longest.positions = later.positions + of_later;
    if (of_longest > 0) {
      sums = BufferPool::instance().take(of_longest * static_cast<size_t>(columns_of_sum) * sizeof(float));
    }
  }
  static int64_t most_columns(const Group& group) {
    int64_t most = 0;
    for (const auto& table : group.tables) most = std::max(most, table->config().columns());
    return most;
  }
  static int64_t most_widened_states(const Group& group) {
    int64_t most = 0;
    for (const auto& table : group.tables) {
      const TableConfig& config = table->config();
      if (config.state_type == StateType::kFloat16 && config.optimizer.user != nullptr) {
        most = std::max(most, config.optimizer.user->element_states);
      }
    }
    return most;
  }

  UpdateArgs args_of(int64_t t, int64_t bag_begin, int64_t bag_end, int worker) {
    const Table& table = *resolved.group.tables[t];
    UpdateArgs args;
    args.rows = table.rows().view();
    args.batch = &resolved.batch;
    args.slots = resolved.slots;
    args.links = grouping.links();
    args.bag_of = grouping.bag_of();
    args.column_offsets = resolved.group.column_offsets.data();
    args.grad = grad;
    args.grad_stride = resolved.group.columns();
    args.mean = resolved.group.mean;
    args.bag_begin = bag_begin;
    args.bag_end = bag_end;
    args.scratch = grouping.memory().row(worker, 0);
    args.random = reinterpret_cast<uint32_t*>(grouping.memory().row(worker, 1));
    args.weights = grouping.memory().row(worker, 2);
    args.rounding = roundings[t];
    args.states = grouping.memory().row(worker, WorkerMemory::kRows);
    args.optimizer = table.config().optimizer.kind;
    args.user = table.config().optimizer.user;
    args.scalars = scalars[t];
    args.step = table.config().bounds.counts_apart() ? 0 : steps[t];
    args.half_life = static_cast<uint32_t>(table.config().bounds.half_life);
    args.nonfinite = table.config().nonfinite == Nonfinite::kPass ? nullptr : &nonfinite[t];
    args.later = positions.empty() ? nullptr : &later;
    args.longest = &longest;
    args.only = -1;
    args.sum = nullptr;
    return args;
  }
  UpdateArgs args_of_id(int64_t position, int worker) {
    const uint32_t bag = grouping.bag_of()[position];
    UpdateArgs args = args_of(resolved.group.feature_tables[bag / resolved.batch.bags], bag, bag + 1, worker);
    args.later = nullptr;
    args.only = position;
    return args;
  }

  // Updates the rows that the runs have left for later. Each column is summed by one thread, in the order of the batch.
  void update_later() noexcept {
    Executor& executor = grouping.executor();
    const int64_t n = longest.count;
    const int64_t columns = (columns_of_sum + 16 * threads - 1) / (16 * threads) * 16;  // of a task
    const int64_t parts = (columns_of_sum + columns - 1) / columns;
    for_each_task(executor, n * parts + later.count, [&](int64_t task, int worker) {
      if (task >= n * parts) return row_loops().update(args_of_id(later.positions[task - n * parts], worker));
      const UpdateArgs args = args_of_id(longest.positions[task / parts], worker);
      const int64_t begin = task % parts * columns, end = std::min(begin + columns, args.rows.columns);
      row_loops().sum_columns(args, begin, end, sum(task / parts) + begin);
    });
    for_each_task(executor, n, [&](int64_t i, int worker) {
      UpdateArgs args = args_of_id(longest.positions[i], worker);
      args.sum = sum(i);
      row_loops().update(args);
    });
  }
  float* sum(int64_t i) const { return static_cast<float*>(sums.data()) + i * columns_of_sum; }

  ResolvedBatch resolved;
  const float* grad;
  Steps steps;
  int threads;             // of the executor: one of its workers may count another number, for which there is no memory
  int64_t columns_of_sum;  // most_columns(), rounded up to 16
  std::vector<uint32_t> positions;
  LaterIds later{most_in_run(threads)};
  LaterIds longest{most_summed(threads)};
  BufferPool::Buffer sums;  // for each of the longest, (columns_of_sum,)
  std::vector<std::atomic<int64_t>> nonfinite = std::vector<std::atomic<int64_t>>(resolved.group.tables.size());
  std::vector<StepScalars> scalars;
  std::vector<StochasticRounding> roundings;
  Grouping grouping;
};

Update::Update(const ResolvedBatch& resolved, const float* grad, const std::vector<float>& learning_rates,
               const Steps& steps, Executor& executor)
    : work_(std::make_unique<Work>(resolved, grad, steps, executor)) {
  const auto& tables = resolved.group.tables;
  for (size_t t = 0; t < tables.size(); ++t) {
    work_->scalars.push_back(
        step_scalars(tables[t]->config().optimizer, learning_rates[t], tables[t]->optimizer_steps() + 1));
    work_->roundings.push_back(rounding_of(*tables[t], resolved.group.routings[t]));
  }
}

Update::~Update() = default;

Distinct Update::run() noexcept {
  Work& work = *work_;
  const ResolvedBatch& resolved = work.resolved;
  const auto& tables = resolved.group.tables;
  Distinct distinct = work.grouping.run([&](const Chunk& chunk, int worker) {
    Table& table = *tables[chunk.table];
    if (table.notes_writes()) note_writes(table, resolved, work.grouping.links(), chunk);
    row_loops().update(work.args_of(chunk.table, chunk.bag_begin, chunk.bag_end, worker));
    const uint32_t step = work.steps[chunk.table];
    if (step != 0 && table.config().bounds.counts_apart()) {
      note_uses(table, resolved, work.grouping.links(), chunk, step);
    }
  });
  if (work.later.count + work.longest.count > 0) work.update_later();
  for (size_t t = 0; t < tables.size(); ++t) {
    if (work.steps[t] != kForgotten) tables[t]->count_update(distinct[t], work.nonfinite[t]);
  }
  return distinct;
}

Distinct record_step(const ResolvedBatch& resolved, const Steps& steps, Executor& executor) {
  Grouping grouping(resolved, executor, &steps);
  return grouping.run([&](const Chunk& chunk, int) {
    Table& table = *resolved.group.tables[chunk.table];
    if (table.watched()) note_changes(table, resolved, grouping.links(), chunk);
    if (table.config().bounds.counts_apart()) {
      return note_uses(table, resolved, grouping.links(), chunk, steps[chunk.table]);
    }
    const Rows& rows = table.rows();
    const auto half_life = static_cast<uint32_t>(table.config().bounds.half_life);
    const int64_t end = resolved.batch.offset(chunk.bag_end);
    for (int64_t p = resolved.batch.offset(chunk.bag_begin); p < end; ++p) {
      if ((grouping.links()[p] & kNotFirst) != 0) continue;
      count_step(rows.meta(resolved.slots[p]), steps[chunk.table], half_life);
    }
  });
}

void weight_gradients(const ResolvedBatch& resolved, const float* grad, float* grad_weights, Executor& executor) {
  const Group& group = resolved.group;
  const Batch& batch = resolved.batch;
  constexpr int64_t kBags = 256;
  const int64_t runs = (batch.bags + kBags - 1) / kBags;
  for_each_task(executor, runs * group.features(), [&](int64_t task) {
    const int64_t f = task / runs, begin = task % runs * kBags, end = std::min(begin + kBags, batch.bags);
    const Table& table = *group.tables[group.feature_tables[f]];
    const RowsView rows = table.rows().view();
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t first = batch.offset(f * batch.bags + bag), last = batch.offset(f * batch.bags + bag + 1);
      const float scale = group.mean && last - first > 1 ? 1.0f / static_cast<float>(last - first) : 1.0f;
      const float* bag_grad = grad + bag * group.columns() + group.column_offsets[f];
      for (int64_t p = first; p < last; ++p) {
        const Slot slot = resolved.slots[p];
        const float* row = rows.data + slot * rows.stride;
        if (slot == kNoSlot) {
          grad_weights[p] = 0.0f;
          if (table.sightings() == nullptr) continue;
          // Admission has refused the id, so the forward has read its initial row.
          const int64_t floats = rows.weight_floats();
          float* initial = workspace().gradient.get(floats);
          std::fill_n(initial, floats, 0.0f);
          table.initializer().fill(group.routings[group.feature_tables[f]].raw_id(batch.ids[p]), initial);
          row = initial;
        }
        grad_weights[p] = scale * row_loops().dot(rows.type, row, bag_grad, rows.columns);
      }
    }
  });
}

}  // namespace recstore
