#include "backward.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "row_kernels.h"

namespace recstore {
namespace {

constexpr int64_t kTaskIds = 8192;      // occurrences of a task, about: its chains stay in the second-level cache
constexpr int64_t kChunkIds = 16384;    // positions of a chunk when a table's occurrences are split
constexpr uint32_t kEmpty = 0xFFFFFFFFu;

// Grows without keeping or clearing what it held.
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

// An occurrence on its way into a chain.
struct Record {
  const float* grad;
  float scale;
  Slot slot;
};
static_assert(sizeof(Record) == sizeof(Occurrence), "a record becomes an occurrence in place");

struct Chunk {
  int64_t feature;
  int64_t bag_begin;  // within the feature
  int64_t bag_end;
};

// One table's part of the batch, in `partitions` parts by the low bits of the slot, so that each row
// belongs to one part and the hot rows, which have low slots, are dealt out evenly.
struct TableWork {
  int64_t table;
  int64_t n_ids;
  int64_t partitions;
  std::vector<Chunk> chunks;           // in the order of the batch
  std::vector<int64_t> begin;          // (chunks, partitions): where a chunk's records of a part go
  std::vector<int64_t> part_begin;     // (partitions + 1,)
  Record* records = nullptr;           // where partitions > 1
};

struct Workspace {
  Scratch<Occurrence> occurrences;
  Scratch<Chain> chains;
  Scratch<int32_t> lasts;
  Scratch<uint32_t> hash;
  Scratch<float> gradient;
};

Workspace& workspace() {
  thread_local Workspace space;
  return space;
}

class Scatter {
 public:
  Scatter(const ResolvedBatch& resolved, const float* grad) : r_(resolved), grad_(grad) { plan(); }

  // update(table, chains, count, occurrences) for disjoint sets of a table's rows.
  template <class Update>
  Distinct run(Executor& executor, const Update& update) {
    partition(executor);
    std::vector<std::pair<TableWork*, int64_t>> tasks;
    for (TableWork& work : tables_) {
      for (int64_t p = 0; p < work.partitions; ++p) tasks.push_back({&work, p});
    }
    std::vector<std::atomic<int64_t>> distinct(r_.group.tables.size());
    for_each_task(executor, static_cast<int64_t>(tasks.size()), [&](int64_t t) {
      const TableWork& work = *tasks[t].first;
      distinct[work.table] += run_part(work, tasks[t].second, update);
    });
    return Distinct(distinct.begin(), distinct.end());
  }

 private:
  void plan() {
    const Group& group = r_.group;
    std::vector<TableWork> works(group.tables.size());
    for (int64_t f = 0; f < group.features(); ++f) {
      TableWork& work = works[group.feature_tables[f]];
      work.table = group.feature_tables[f];
      const int64_t n = r_.batch.offset((f + 1) * r_.batch.bags) - r_.batch.offset(f * r_.batch.bags);
      work.n_ids += n;
      const int64_t bags_per_chunk = std::max<int64_t>(1, r_.batch.bags * kChunkIds / std::max<int64_t>(n, 1));
      for (int64_t b = 0; b < r_.batch.bags; b += bags_per_chunk) {
        work.chunks.push_back({f, b, std::min(b + bags_per_chunk, r_.batch.bags)});
      }
    }
    for (TableWork& work : works) {
      if (work.n_ids == 0) continue;
      work.partitions = 1;
      while (work.n_ids / work.partitions > 2 * kTaskIds) work.partitions *= 2;
      tables_.push_back(std::move(work));
    }
  }

  template <class Emit>  // emit(record), in the order of the batch
  void expand(const Chunk& chunk, const Emit& emit) const {
    const Batch& batch = r_.batch;
    const int64_t first = chunk.feature * batch.bags;
    const int64_t column = r_.group.column_offsets[chunk.feature], stride = r_.group.columns();
    for (int64_t bag = chunk.bag_begin; bag < chunk.bag_end; ++bag) {
      const int64_t begin = batch.offset(first + bag), end = batch.offset(first + bag + 1);
      const float* grad = grad_ == nullptr ? nullptr : grad_ + bag * stride + column;
      const float scale = r_.group.mean && end - begin > 1 ? 1.0f / static_cast<float>(end - begin) : 1.0f;
      for (int64_t p = begin; p < end; ++p) {
        if (r_.slots[p] == kNoSlot) continue;
        emit(Record{grad, batch.weights == nullptr ? scale : scale * batch.weights[p], r_.slots[p]});
      }
    }
  }

  void partition(Executor& executor) {
    std::vector<std::pair<TableWork*, int64_t>> chunks;
    int64_t total = 0;
    for (TableWork& work : tables_) {
      if (work.partitions == 1) continue;
      work.begin.assign(work.chunks.size() * static_cast<size_t>(work.partitions), 0);
      total += work.n_ids;
      for (size_t c = 0; c < work.chunks.size(); ++c) chunks.push_back({&work, static_cast<int64_t>(c)});
    }
    if (chunks.empty()) return;
    thread_local Scratch<Record> records;
    Record* next_records = records.get(total);
    for_each_task(executor, static_cast<int64_t>(chunks.size()), [&](int64_t t) {
      TableWork& work = *chunks[t].first;
      int64_t* counts = work.begin.data() + chunks[t].second * work.partitions;
      const auto mask = static_cast<Slot>(work.partitions - 1);
      expand(work.chunks[chunks[t].second], [&](const Record& record) { ++counts[record.slot & mask]; });
    });
    for (TableWork& work : tables_) {
      if (work.partitions == 1) continue;
      work.records = next_records;
      next_records += prefix_sums(work);
    }
    for_each_task(executor, static_cast<int64_t>(chunks.size()), [&](int64_t t) {
      TableWork& work = *chunks[t].first;
      int64_t* next = work.begin.data() + chunks[t].second * work.partitions;
      const auto mask = static_cast<Slot>(work.partitions - 1);
      expand(work.chunks[chunks[t].second], [&](const Record& record) { work.records[next[record.slot & mask]++] = record; });
    });
  }
  // Counts become beginnings, part by part and chunk by chunk within a part. Returns the sum.
  static int64_t prefix_sums(TableWork& work) {
    int64_t sum = 0;
    work.part_begin.assign(1, 0);
    for (int64_t p = 0; p < work.partitions; ++p) {
      for (size_t c = 0; c < work.chunks.size(); ++c) {
        int64_t& entry = work.begin[c * static_cast<size_t>(work.partitions) + static_cast<size_t>(p)];
        const int64_t count = entry;
        entry = sum;
        sum += count;
      }
      work.part_begin.push_back(sum);
    }
    return sum;
  }

  template <class Update>
  int64_t run_part(const TableWork& work, int64_t part, const Update& update) const {
    Workspace& space = workspace();
    int64_t n = 0;
    Record* records;
    if (work.partitions == 1) {
      records = reinterpret_cast<Record*>(space.occurrences.get(work.n_ids));
      for (const Chunk& chunk : work.chunks) expand(chunk, [&](const Record& record) { records[n++] = record; });
    } else {
      records = work.records + work.part_begin[part];
      n = work.part_begin[part + 1] - work.part_begin[part];
    }
    Chain* chains = space.chains.get(n);
    const int64_t count = chain(records, n, chains, space);
    update(work.table, chains, count, reinterpret_cast<const Occurrence*>(records));
    return count;
  }

  // Links the records of each slot in their order, turning them into occurrences. Returns the number of slots.
  static int64_t chain(Record* records, int64_t n, Chain* chains, Workspace& space) {
    int shift = 32 - 5;
    while ((int64_t{1} << (32 - shift)) < 2 * n) --shift;
    const int64_t buckets = int64_t{1} << (32 - shift);
    const auto mask = static_cast<uint32_t>(buckets - 1);
    uint32_t* hash = space.hash.get(buckets);
    std::memset(hash, 0xFF, static_cast<size_t>(buckets) * sizeof(uint32_t));
    int32_t* lasts = space.lasts.get(n);
    int64_t count = 0;
    for (int32_t i = 0; i < n; ++i) {
      const Record record = records[i];
      const Occurrence occurrence{record.grad, record.scale, -1};
      std::memcpy(static_cast<void*>(records + i), &occurrence, sizeof(occurrence));
      uint32_t bucket = (record.slot * 0x9E3779B1u) >> shift;
      while (hash[bucket] != kEmpty && chains[hash[bucket]].slot != record.slot) bucket = (bucket + 1) & mask;
      if (hash[bucket] == kEmpty) {
        hash[bucket] = static_cast<uint32_t>(count);
        chains[count] = {record.slot, i};
        lasts[count++] = i;
      } else {
        int32_t& last = lasts[hash[bucket]];
        reinterpret_cast<Occurrence*>(records)[last].next = i;
        last = i;
      }
    }
    return count;
  }

  const ResolvedBatch& r_;
  const float* grad_;
  std::vector<TableWork> tables_;
};

}  // namespace

Distinct apply_gradients(const ResolvedBatch& resolved, const float* grad, const std::vector<float>& learning_rates,
                         const Steps& steps, Executor& executor) {
  return Scatter(resolved, grad).run(executor, [&](int64_t t, const Chain* chains, int64_t count, const Occurrence* occurrences) {
    const Table& table = *resolved.group.tables[t];
    UpdateArgs args;
    args.rows = table.rows().view();
    args.chains = chains;
    args.count = count;
    args.occurrences = occurrences;
    args.scratch = workspace().gradient.get((args.rows.columns + 15) / 16 * 16);
    args.optimizer = table.config().optimizer;
    args.learning_rate = learning_rates[t];
    args.step = steps[t];
    row_kernels().update(args);
  });
}

Distinct record_step(const ResolvedBatch& resolved, const Steps& steps, Executor& executor) {
  return Scatter(resolved, nullptr).run(executor, [&](int64_t t, const Chain* chains, int64_t count, const Occurrence*) {
    RowMeta* meta = resolved.group.tables[t]->rows().view().meta;
    for (int64_t c = 0; c < count; ++c) {
      meta[chains[c].slot].last_step = steps[t];
      ++meta[chains[c].slot].frequency;
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
    for (int64_t bag = begin; bag < end; ++bag) {
      const int64_t first = batch.offset(f * batch.bags + bag), last = batch.offset(f * batch.bags + bag + 1);
      const float scale = group.mean && last - first > 1 ? 1.0f / static_cast<float>(last - first) : 1.0f;
      const float* bag_grad = grad + bag * group.columns() + group.column_offsets[f];
      for (int64_t p = first; p < last; ++p) {
        const Slot slot = resolved.slots[p];
        grad_weights[p] =
            slot == kNoSlot ? 0.0f : scale * row_kernels().dot(table.rows().weights(slot), bag_grad, table.config().columns());
      }
    }
  });
}

}  // namespace recstore
