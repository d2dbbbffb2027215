#include "snapshot/snapshot.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"

namespace recstore {
namespace {

// Rows that one scan of the index finds. They take 64 MiB with scratch memory, and 36 MiB more while several threads
// sort them.
constexpr size_t kFound = size_t{1} << 21;
constexpr int64_t kSliceEntries = 16384;  // entries of the index that are scanned under one lock: about 256 KiB
constexpr size_t kSliceRows = 2048;       // rows whose ids are found by their slots under one lock
constexpr size_t kSorted = 1 << 14;       // rows that a thread sorts at least
constexpr size_t kSamples = 32;           // for each part of rows that are sorted
constexpr int64_t kRun = 512;             // rows of a task; a polite read copies the rows of one task under one lock
constexpr int64_t kLongRun = 1 << 16;     // rows that another read copies under one lock
constexpr int64_t kAhead = 8;             // rows that are prefetched ahead
constexpr int64_t kBlockBytes = 8 << 20;
char* const kNoBlock = reinterpret_cast<char*>(1);
constexpr int kPauses = 6;
constexpr std::chrono::microseconds kLeastPause{50};

// A slice of background work, with the table locked, or shared if the work only reads. After a slice, a polite reader
// pauses for a multiple of the slice's time, so that it takes a small share of a core and threads that wait for the
// lock get it. A low thread priority would not help: the scheduler would suspend the thread while it holds the lock.
template <class Lock>
class Slice {
 public:
  Slice(TableMutex& mutex, bool polite) : polite_(polite), lock_(mutex), begin_(std::chrono::steady_clock::now()) {}
  ~Slice() {
    const auto time = std::chrono::steady_clock::now() - begin_;
    lock_.unlock();
    if (polite_) std::this_thread::sleep_for(std::max<std::chrono::nanoseconds>(kLeastPause, kPauses * time));
  }

 private:
  bool polite_;
  Lock lock_;
  std::chrono::steady_clock::time_point begin_;
};
using ReadSlice = Slice<std::shared_lock<TableMutex>>;

}  // namespace

// Collects rows, and keeps those with the lowest ids.
class Snapshot::Least {
 public:
  // slices: how many are added between two cuts.
  Least(int64_t most, int64_t slices) {
    rows_.reserve(std::min(2 * kFound + static_cast<size_t>((slices + 1) * kSliceEntries), static_cast<size_t>(most)));
  }
  void add(const Row& row) {
    if (row.id <= bound_) rows_.push_back(row);
  }
  void add(const std::vector<Row>& rows) { rows_.insert(rows_.end(), rows.begin(), rows.end()); }
  // Rows with higher ids are not needed.
  int64_t bound() const { return bound_; }
  // Drops rows that exceed the limit. This is slow; do not call it with the table locked.
  void cut() {
    if (rows_.size() >= 2 * kFound) cut_to_limit();
  }
  std::vector<Row> sorted(Executor& executor) {
    if (rows_.size() > kFound) cut_to_limit();
    sort(executor);
    // The scan may find a row twice: the row was removed after the scan had passed it.
    rows_.erase(std::unique(rows_.begin(), rows_.end()), rows_.end());
    return std::move(rows_);
  }

 private:
  void cut_to_limit() {
    std::nth_element(rows_.begin(), rows_.begin() + (kFound - 1), rows_.end());
    bound_ = rows_[kFound - 1].id;
    rows_.resize(kFound);
  }
  // Divides the rows by those of a sample, and sorts the parts. The order of the sample matters only for equal parts.
  void sort(Executor& executor) {
    const size_t parts =
        executor.threads() == 1 ? 1 : std::min(static_cast<size_t>(executor.threads()) * 4, rows_.size() / kSorted);
    if (parts < 2) return std::sort(rows_.begin(), rows_.end());
    std::vector<Row> bounds, unsorted(rows_.size());
    unsorted.swap(rows_);
    for (size_t i = 0; i < parts * kSamples; ++i) bounds.push_back(unsorted[i * unsorted.size() / (parts * kSamples)]);
    std::sort(bounds.begin(), bounds.end());
    for (size_t p = 1; p < parts; ++p) bounds[p - 1] = bounds[p * kSamples];
    bounds.resize(parts - 1);
    const auto begin_of = [&](size_t part) { return part * unsorted.size() / parts; };
    std::vector<uint16_t> part_of(unsorted.size());
    // By part of the input, by part of the result.
    std::vector<std::vector<size_t>> next(parts + 1, std::vector<size_t>(parts));
    for_each_task(executor, static_cast<int64_t>(parts), [&](int64_t task) {
      for (size_t i = begin_of(task); i < begin_of(task + 1); ++i) {
        part_of[i] =
            static_cast<uint16_t>(std::upper_bound(bounds.begin(), bounds.end(), unsorted[i]) - bounds.begin());
        ++next[task][part_of[i]];
      }
    });
    size_t before = 0;
    for (size_t p = 0; p < parts; ++p) {
      for (size_t task = 0; task <= parts; ++task) before += std::exchange(next[task][p], before);
    }
    for_each_task(executor, static_cast<int64_t>(parts), [&](int64_t task) {
      for (size_t i = begin_of(task); i < begin_of(task + 1); ++i) rows_[next[task][part_of[i]]++] = unsorted[i];
    });
    for_each_task(executor, static_cast<int64_t>(parts), [&](int64_t p) {
      // Of the part of the input after its end.
      const size_t begin = p == 0 ? 0 : next[parts][p - 1], end = next[parts][p];
      std::sort(rows_.begin() + static_cast<int64_t>(begin), rows_.begin() + static_cast<int64_t>(end));
    });
  }

  std::vector<Row> rows_;
  int64_t bound_ = INT64_MAX;
};

Snapshot::Snapshot(std::shared_ptr<Table> table, std::optional<Changes::Mark> since)
    : table_(std::move(table)),
      slots_(table_->rows().slots()),
      table_rows_(table_->size()),
      steps_(table_->counters().steps),
      optimizer_steps_(table_->optimizer_steps()),
      pending_(static_cast<size_t>(slots_ + 63) / 64, since ? 0 : ~uint64_t{0}),
      image_bytes_(table_->rows().image_bytes()),
      block_images_(std::max<int64_t>(1, std::min(kBlockBytes / image_bytes_, slots_))),
      blocks_(static_cast<size_t>(slots_ / block_images_ + 1)) {
  if (table_->snapshot() != nullptr) {
    throw InvalidArgument("the table is being saved already: wait until the save has ended");
  }
  if (since) {
    const Changes& changes = table_->rows().changes();
    if (!changes.knows(*since)) throw InvalidArgument("the changes since this mark are no longer known");
    changes.for_each_since(*since, [&](Slot slot) {
      if (slot < slots_ && !table_->rows().is_free(slot)) pending_[slot / 64] |= uint64_t{1} << (slot % 64);
    });
    table_->rows().for_each_retired([&](Slot slot) { pending_[slot / 64] &= ~(uint64_t{1} << (slot % 64)); });
  } else {
    if (slots_ % 64 != 0) pending_.back() = (uint64_t{1} << (slots_ % 64)) - 1;
    table_->rows().for_each_free([&](Slot slot) { pending_[slot / 64] &= ~(uint64_t{1} << (slot % 64)); });
  }
  int64_t rows = 0;
  for (const uint64_t bits : pending_) rows += bits == 0 ? 0 : __builtin_popcountll(bits);
  rows_left_ = rows;
  if (since) {
    left_ = table_->rows().changes().left_since(*since);
    const Index& index = table_->index();
    const auto is_back = [&](int64_t id) { return index.find(id) != kNoSlot; };
    if (left_) left_->erase(std::remove_if(left_->begin(), left_->end(), is_back), left_->end());
  }
  finds_by_slot_ = since && table_->rows().changes().locates_rows();
  numbers_.reserve(static_cast<size_t>(slots_) * sizeof(uint32_t));
  table_->reserve_pass();
  mark_ = table_->rows().mark();
  pass_ = table_->begin_pass(this);  // from now on slots are not reused
  table_->set_snapshot(this);
}

Snapshot::~Snapshot() {
  {
    const std::lock_guard<TableMutex> lock(table_->mutex());
    table_->set_snapshot(nullptr);
    table_->end_pass(pass_);
  }
  for (const auto& block : blocks_) {
    if (block != kNoBlock) ::operator delete(block.load());
  }
}

void Snapshot::find_next(bool polite, Executor& executor) {
  next_ = {};  // frees its memory before more is allocated
  read_ = 0;
  Least least(rows_left_, polite ? 1 : executor.threads());
  // The place of a row is found at random, which takes about this many times the time of a visit in order.
  constexpr int64_t kRandom = 8;
  if (finds_by_slot_ && rows_left_ * kRandom < table_rows_) {
    find_pending(polite, least);
  } else {
    search_index(polite, least, executor);
  }
  SerialExecutor serial;
  next_ = polite ? least.sorted(serial) : least.sorted(executor);
  if (!next_.empty()) last_id_ = next_.back().id;
}

bool Snapshot::is_next(int64_t id, Slot slot) const { return pending(slot) && (!last_id_ || id > *last_id_); }

// Visits all rows of the table.
void Snapshot::search_index(bool polite, Least& least, Executor& executor) {
  std::vector<std::vector<Row>> found(polite ? 1 : static_cast<size_t>(executor.threads()));
  for (uint64_t first = 0; first < Index::kPositions;) {
    least.cut();
    for (auto& rows : found) rows.clear();
    const ReadSlice slice(table_->mutex(), polite);
    table_->check_open();
    const Index& index = table_->index();
    const uint64_t positions = index.positions(kSliceEntries);
    const uint64_t end = std::min(first + found.size() * positions, Index::kPositions);
    for_each_task(executor, static_cast<int64_t>((end - first + positions - 1) / positions), [&](int64_t task) {
      const uint64_t begin = first + static_cast<uint64_t>(task) * positions;
      index.for_each(begin, std::min(begin + positions, end), [&](int64_t id, Slot slot) {
        if (id <= least.bound() && is_next(id, slot)) found[task].push_back({id, slot});
      });
    });
    for (const auto& rows : found) least.add(rows);
    if (end == Index::kPositions) add_removed(least);
    first = end;
  }
}

void Snapshot::add_removed(Least& least) const {
  for (const Row& row : removed_) {
    if (is_next(row.id, row.slot)) least.add(row);
  }
}

// Visits the rows that have not been read, by their slots.
void Snapshot::find_pending(bool polite, Least& least) {
  std::vector<Slot> slots;
  slots.reserve(kSliceRows + 64);
  for (size_t word = 0; word < pending_.size();) {
    slots.clear();
    for (; word < pending_.size() && slots.size() < kSliceRows; ++word) {
      for (uint64_t bits = pending_[word]; bits != 0; bits &= bits - 1) {
        slots.push_back(static_cast<Slot>(word * 64 + static_cast<size_t>(__builtin_ctzll(bits))));
      }
    }
    least.cut();
    const ReadSlice slice(table_->mutex(), polite);
    table_->check_open();
    const Index& index = table_->index();
    const Changes& changes = table_->rows().changes();
    for (size_t i = 0; i < slots.size(); ++i) {
      if (i + 2 * kAhead < slots.size()) changes.prefetch_position(slots[i + 2 * kAhead]);
      if (i + kAhead < slots.size()) index.prefetch_position(changes.position(slots[i + kAhead]));
      // A row without an entry has been removed since the snapshot.
      const auto id = index.id_of(slots[i], changes.position(slots[i]));
      if (id && is_next(*id, slots[i])) least.add({*id, slots[i]});
    }
    if (word == pending_.size()) add_removed(least);
  }
}

void Snapshot::check_count(int64_t n) const {
  if (n >= 0 && n <= rows_left_) return;
  throw InvalidArgument("the snapshot has " + std::to_string(rows_left_) + " rows left, not " + std::to_string(n));
}

void Snapshot::read(int64_t n, int64_t* ids, const RowImages& out, bool polite, Executor& executor) {
  const std::lock_guard<std::mutex> one(reading_);
  if (broken_) throw InvalidArgument("the snapshot cannot be read any more, because an earlier read of it has failed");
  check_count(n);
  broken_ = true;
  read_next(n, ids, out, polite, executor);
  broken_ = false;
}

void Snapshot::read_next(int64_t n, int64_t* ids, const RowImages& out, bool polite, Executor& executor) {
  for (int64_t done = 0; done < n;) {
    if (read_ == next_.size()) find_next(polite, executor);
    const int64_t run = std::min({n - done, static_cast<int64_t>(next_.size() - read_), polite ? kRun : kLongRun});
    if (run == 0) throw std::logic_error("a row of the snapshot cannot be found");
    const Row* rows = next_.data() + read_;
    const auto read_range = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) table_->rows().prefetch(rows[i + kAhead].slot);
        ids[done + i] = rows[i].id;
        read_one(rows[i], out, done + i);
      }
    };
    {
      const ReadSlice slice(table_->mutex(), polite);
      table_->check_open();
      if (out_of_memory_) throw OutOfMemory("no memory for copies of rows that changed during the save");
      for_each_task(executor, (run + kRun - 1) / kRun,
                    [&](int64_t task) { read_range(task * kRun, std::min((task + 1) * kRun, run)); });
      for (int64_t i = 0; i < run; ++i) pending_[rows[i].slot / 64] &= ~(uint64_t{1} << (rows[i].slot % 64));
    }
    read_ += static_cast<size_t>(run);
    done += run;
    rows_left_ -= run;
  }
}

void Snapshot::read_one(const Row& row, const RowImages& out, int64_t position) const {
  const Rows& rows = table_->rows();
  const uint32_t kept = kept_.load(std::memory_order_relaxed) == 0 ? 0 : number(row.slot);  // touches no page in vain
  if (kept == 0) return read_row(rows, rows.row(row.slot), rows.aside(row.slot), out, position);
  const char* image = blocks_[(kept - 1) / block_images_].load() + (kept - 1) % block_images_ * image_bytes_;
  read_row(rows, image, image + rows.row_bytes(), out, position);
}

char* Snapshot::block(int64_t number) {
  std::atomic<char*>& block = blocks_[static_cast<size_t>(number / block_images_)];
  if (number % block_images_ == 0) {  // the thread that keeps the first image of a block allocates the block
    void* fresh = ::operator new(static_cast<size_t>(block_images_ * image_bytes_), std::nothrow);
    if (fresh == nullptr) out_of_memory_ = true;
    block.store(fresh == nullptr ? kNoBlock : static_cast<char*>(fresh));
  }
  while (block.load() == nullptr) std::this_thread::yield();
  return block.load();
}

void Snapshot::keep(Slot slot) {
  if (!pending(slot) || number(slot) != 0 || out_of_memory_.load(std::memory_order_relaxed)) return;
  const int64_t kept = kept_.fetch_add(1);
  char* const begin = block(kept);
  if (begin == kNoBlock) return;  // read() throws OutOfMemory
  const Rows& rows = table_->rows();
  char* image = begin + kept % block_images_ * image_bytes_;
  rows.read_image(slot, image);
  number(slot) = static_cast<uint32_t>(kept + 1);
}

bool Snapshot::removed(int64_t id, Slot slot) noexcept {
  if (!pending(slot)) return false;
  removed_.push_back({id, slot});
  return true;
}

std::shared_ptr<Snapshot> open_snapshot(const std::shared_ptr<Table>& table, std::optional<Changes::Mark> since,
                                        Executor& executor) {
  const LockedTable locked(table);
  table->settle_passes(executor);
  return std::make_shared<Snapshot>(table, since);
}

void locate_rows(const std::shared_ptr<Table>& table) {
  uint64_t number = 0;
  {
    const LockedTable locked(table);
    if (table->rows().changes().locates_rows()) return;
    if (!table->rows().changes().tracks()) table->rows().mark();
    number = table->rows().changes().begin_locating();
  }
  for (uint64_t first = 0; first < Index::kPositions;) {
    const Slice<std::unique_lock<TableMutex>> slice(table->mutex(), /*polite=*/false);
    table->check_open();
    Changes& changes = table->rows().changes();
    if (!changes.is_locating(number)) return;  // the rows were exchanged meanwhile, or another call has begun
    const Index& index = table->index();
    const uint64_t end = std::min(first + index.positions(kSliceEntries), Index::kPositions);
    index.for_each(first, end, [&](int64_t id, Slot slot) { changes.place(slot, Index::position_of(index.hash(id))); });
    first = end;
    if (first == Index::kPositions) changes.end_locating();
  }
}

}  // namespace recstore
