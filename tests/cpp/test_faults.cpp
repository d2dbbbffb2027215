// Each allocation of a call fails in turn. After the failure the tables are unchanged, to the bit, and a second call
// gives the same result as a call without a failure.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bounds/scores.h"
#include "cold/cold_rows.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "lookup/prefetch.h"
#include "rows/transfer.h"
#include "snapshot/snapshot.h"
#include "testing.h"

namespace faults {

thread_local bool counting = false;  // whether allocations of this thread are counted
std::atomic<int64_t> count{0};
int64_t failing = -1;  // the number of the allocation that fails; the first is 0

bool fails() { return counting && count.fetch_add(1) == failing; }

}  // namespace faults

// These functions replace those by which the core allocates memory. They are not inlined, because GCC 12 warns about
// free() in operator delete if it inlines only one function of a new-delete pair.
#define NOT_INLINED __attribute__((noinline))
NOT_INLINED void* operator new(std::size_t size) {
  void* memory = faults::fails() ? nullptr : std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return faults::fails() ? nullptr : std::malloc(size == 0 ? 1 : size);
}
NOT_INLINED void operator delete(void* memory) noexcept { std::free(memory); }
NOT_INLINED void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" {
void* __real_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset);
void* __real_mremap(void* from, size_t old_bytes, size_t bytes, int flags, void* to);
void* __real_aligned_alloc(size_t alignment, size_t bytes);
void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
  return faults::fails() ? MAP_FAILED : __real_mmap(address, bytes, protection, flags, file, offset);
}
void* __wrap_mremap(void* from, size_t old_bytes, size_t bytes, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  void* to = va_arg(arguments, void*);
  va_end(arguments);
  return faults::fails() ? MAP_FAILED : __real_mremap(from, old_bytes, bytes, flags, to);
}
void* __wrap_aligned_alloc(size_t alignment, size_t bytes) {
  return faults::fails() ? nullptr : __real_aligned_alloc(alignment, bytes);
}
}

using namespace recstore;

namespace {

constexpr int64_t kColumns = 5;

// An executor that does not count the memory of its threads themselves.
class Workers final : public Executor {
 public:
  explicit Workers(int count) : threads_(count) {}
  int threads() const override { return threads_.threads(); }
  void run(int workers, Body body, void* context) override {
    if (faults::fails()) throw std::bad_alloc();  // as if no thread could be started
    struct Shared {
      Body body;
      void* context;
      bool counted;
    } shared{body, context, std::exchange(faults::counting, false)};
    threads_.run(
        workers,
        [](void* of) {
          const Shared& own = *static_cast<Shared*>(of);
          faults::counting = own.counted;
          own.body(own.context);
        },
        &shared);
    faults::counting = shared.counted;
  }

 private:
  Threads threads_;
};

struct Tables {
  std::vector<std::shared_ptr<Table>> all;
  std::shared_ptr<const Group> group;
  std::vector<std::shared_ptr<Pass>> passes;  // passes without a backward
  std::vector<std::unique_ptr<Snapshot>> snapshots;
  std::vector<float> out = std::vector<float>(40 * 3 * kColumns);
};

struct Kind {
  std::string name;
  Bounds first;             // bounds of the first table; the second table has none, and the third is full
  bool snapshot;            // whether each table has a snapshot
  bool departures = false;  // whether the first table records which ids leave it
};

std::shared_ptr<Table> make_table(const Bounds& bounds, const char* name) {
  TableConfig config;
  config.name = name;
  config.column_end = kColumns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.optimizer.kind = OptimizerKind::kAdam;
  config.optimizer.beta1 = 0.9;
  config.optimizer.beta2 = 0.99;
  config.bounds = bounds;
  return std::make_shared<Table>(config);
}

// A batch with n ids for each feature.
struct Data {
  std::vector<int64_t> ids, offsets;
  std::vector<float> grad;
  Batch batch;

  Data(const Data&) = delete;
  Data(int64_t features, int64_t n, int64_t first) {
    for (int64_t f = 0; f < features; ++f) {
      for (int64_t i = 0; i < n; ++i) ids.push_back((i % 7 == 0 ? 0 : first) + i / 2 * 3);
    }
    for (int64_t i = 0; i <= features * n; ++i) offsets.push_back(i);
    for (int64_t i = 0; i < n * features * kColumns; ++i) grad.push_back(0.01f * static_cast<float>(i % 31) - 0.1f);
    batch.ids = ids.data();
    batch.n_ids = static_cast<int64_t>(ids.size());
    batch.offsets = offsets.data();
    batch.bags = n;
  }
};

constexpr int64_t kFull = 45;

Tables make_tables(const Kind& kind) {
  SerialExecutor executor;
  Tables tables;
  Bounds full;
  full.max_rows = kFull;
  full.eviction = Eviction::kLeastFrequent;
  tables.all = {make_table(kind.first, "first"), make_table({}, "second"), make_table(full, "full")};
  if (kind.departures) tables.all[0]->record_departures(50);
  tables.group =
      std::make_shared<const Group>(tables.all, std::vector<Routing>(3), std::vector<int64_t>{0, 1, 2}, false);
  for (int64_t step = 0; step < 5; ++step) {
    const Data data(3, 40, 40 * step);
    begun(tables.group, data.batch, tables.out.data(), executor)
        ->backward(data.grad.data(), {0.1f, 0.2f, 0.3f}, nullptr, executor);
  }
  if (kind.snapshot) {
    for (const auto& table : tables.all) {
      const std::lock_guard<TableMutex> lock(table->mutex());
      CHECK(table->rows().mark() == 1);
      tables.snapshots.push_back(std::make_unique<Snapshot>(table, std::nullopt));
    }
  }
  return tables;
}

template <class T>
void append(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Returns everything that the calls may change, except the slots of the rows.
std::string state_of(const Tables& tables) {
  SerialExecutor executor;
  std::string state;
  for (const auto& table : tables.all) {
    table->settle_passes(executor);
    std::vector<int64_t> ids(static_cast<size_t>(table->size()));
    table->ids(ids.data());
    std::sort(ids.begin(), ids.end());
    const int64_t n = table->size();
    std::vector<char> images(static_cast<size_t>(n * table->image_bytes()));
    read_images(*table, ids.data(), n, images.data(), executor);
    state.append(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int64_t));
    state.append(images.begin(), images.end());
    append(state, table->counters());
    append(state, table->optimizer_steps());
    if (table->sightings() != nullptr) {
      const auto size = static_cast<size_t>(table->sightings()->size());
      std::vector<int64_t> seen(size);
      std::vector<uint8_t> counts(size), generations(size);
      table->sightings()->read(seen.data(), counts.data(), generations.data());
      for (const int64_t id : seen) append(state, id);
      for (const uint8_t count : counts) append(state, count);
      for (const uint8_t generation : generations) append(state, generation);
    }
    if (table->departures() != nullptr) {
      std::vector<int64_t> gone = table->departures()->ids();
      std::sort(gone.begin(), gone.end());
      for (const int64_t id : gone) append(state, id);
    }
    for (int64_t id = 0; id < 200; ++id) append(state, table->cold_filter().may_contain(id));
    const auto left = table->rows().changes().left_since(1);
    for (const int64_t id : left ? *left : std::vector<int64_t>{-1}) append(state, id);
  }
  return state;
}

using Call = std::function<void(Tables&, Executor&)>;

int64_t calls_that_failed = 0;

// before: runs before the call and does not fail.
void every_allocation_fails_once(const Kind& kind, const std::string& name, int threads, const Call& before,
                                 const Call& call) {
  Workers workers(threads);
  Tables untouched = make_tables(kind);
  if (before) before(untouched, workers);
  call(untouched, workers);
  untouched.passes.clear();
  const std::string expected = state_of(untouched);
  for (int64_t failing = 0;; ++failing) {
    Tables tables = make_tables(kind);
    if (before) before(tables, workers);
    const std::string before_call = state_of(tables);
    bool failed = false;
    faults::count = 0;
    faults::failing = failing;
    faults::counting = true;
    try {
      call(tables, workers);
    } catch (const std::bad_alloc&) {
      failed = true;
    } catch (const OutOfMemory&) {
      failed = true;
    }
    faults::counting = false;
    if (failed) {
      ++calls_that_failed;
      if (state_of(tables) != before_call) {
        std::fprintf(stderr, "%s, %s, %d threads: allocation %lld changes the tables\n", kind.name.c_str(),
                     name.c_str(), threads, static_cast<long long>(failing));
        std::abort();
      }
      call(tables, workers);
    }
    tables.passes.clear();
    if (state_of(tables) != expected) {
      std::fprintf(stderr, "%s, %s, %d threads: another result after allocation %lld, which %s\n", kind.name.c_str(),
                   name.c_str(), threads, static_cast<long long>(failing), failed ? "failed" : "did not fail the call");
      std::abort();
    }
    if (faults::count <= failing) break;
  }
}

const Data& new_ids() {
  static const Data data(3, 40, 777);
  return data;
}

void forward(Tables& tables, Executor& executor) {
  auto pass = begun(tables.group, new_ids().batch, tables.out.data(), executor);
  const bool counted = std::exchange(faults::counting, false);
  tables.passes.push_back(std::move(pass));
  faults::counting = counted;
}
void backward(Tables& tables, Executor& executor) {
  tables.passes.back()->backward(new_ids().grad.data(), {0.1f, 0.2f, 0.3f}, nullptr, executor);
}
void accumulated(Tables& tables, Executor& executor) {
  accumulated_backward(tables.passes, {new_ids().grad.data(), new_ids().grad.data()}, {0.1f, 0.2f, 0.3f}, executor);
}
const Data& ids_of_one_table() {
  static const Data data(1, 40, 777);
  return data;
}
// One pass for each table.
std::vector<std::shared_ptr<Pass>> begun_passes(Tables& tables, Executor& executor) {
  std::vector<std::shared_ptr<Pass>> passes;
  std::vector<Pass::Start> starts;
  for (size_t t = 0; t < tables.all.size(); ++t) {
    passes.push_back(
        std::make_shared<Pass>(one_table_group(tables.all[t]), ids_of_one_table().batch, nullptr, executor));
    starts.push_back({passes.back().get(), tables.out.data() + t * 40 * kColumns});
  }
  Pass::begin(starts, executor);
  return passes;
}
void several_passes(Tables& tables, Executor& executor) { begun_passes(tables, executor); }
void keep_passes(Tables& tables, Executor& executor) {
  for (auto& pass : begun_passes(tables, executor)) tables.passes.push_back(std::move(pass));
}
void end_passes(Tables& tables, Executor& executor) {
  std::vector<Pass::End> ends;
  for (const auto& pass : tables.passes) ends.push_back({pass.get(), ids_of_one_table().grad.data(), 0.1f});
  Pass::end(ends, executor);
}
// The forward that follows probes the index again for some positions.
void prefetch_all(Tables& tables, Executor& executor) {
  prefetch(*tables.group, new_ids().ids.data(), new_ids().batch.n_ids, {40, 40, 40}, executor);
  for (const auto& table : tables.all) LockedTable(table)->vacated().add(0);
}
void prefetch_one(Tables& tables, Executor& executor) {
  static const Data data(1, 40, 777);
  prefetch(*one_table_group(tables.all[1]), data.ids.data(), 40, {40}, executor);
}
void drop(Tables& tables, Executor&) { tables.passes.clear(); }
void for_each_table(Tables& tables, size_t only, const std::function<void(const std::shared_ptr<Table>&)>& work) {
  const std::lock_guard<TableMutex> lock(tables.all[only]->mutex());
  work(tables.all[only]);
}
Call update(size_t of) {
  return [of](Tables& tables, Executor& executor) {
    const Data data(1, 40, 777);
    update_rows(*one_table_group(tables.all[of]), data.batch, data.grad.data(), 0.1f, executor);
  };
}
Call insert(size_t of) {
  return [of](Tables& tables, Executor& executor) {
    for_each_table(tables, of, [&](const std::shared_ptr<Table>& table) {
      const Data data(1, 40, 777);
      write_weights(*table, data.ids.data(), 40, data.grad.data(), executor);
    });
  };
}
Call import(size_t of) {
  return [of](Tables& tables, Executor& executor) {
    for_each_table(tables, of, [&](const std::shared_ptr<Table>& table) {
      const Data data(1, 40, 777);
      const std::vector<float> values(40 * kColumns, 0.5f), state(40, 0.0f);
      const std::vector<int64_t> numbers(40, 3);
      write_rows(*table, data.ids.data(), 40,
                 {values.data(), {values.data(), values.data()}, state.data(), numbers.data(), numbers.data()},
                 executor);
    });
  };
}
Call remove(size_t of) {
  return [of](Tables& tables, Executor&) {
    for_each_table(tables, of, [&](const std::shared_ptr<Table>& table) {
      const Data data(1, 40, 40);
      table->remove(data.ids.data(), 40);
    });
  };
}
void evict_half(Tables& tables, Executor& executor) {
  for_each_table(tables, 0, [&](const std::shared_ptr<Table>& table) {
    std::vector<int64_t> ids(static_cast<size_t>(table->size()));
    table->ids(ids.data());
    std::sort(ids.begin(), ids.end());
    const auto n = static_cast<int64_t>(ids.size());
    std::vector<char> images(static_cast<size_t>(n * table->image_bytes()));
    read_images(*table, ids.data(), n, images.data(), executor);
    std::unique_ptr<bool[]> left(new bool[ids.size()]);
    std::vector<int64_t> some(ids.begin(), ids.begin() + n / 2);
    evict(*table, some.data(), n / 2, images.data(), left.get());
  });
}
void bring(Tables& tables, Executor& executor) {
  for_each_table(tables, 1, [&](const std::shared_ptr<Table>& table) {
    const std::vector<int64_t> ids{100001, 100002, 100003};
    const std::vector<char> images(static_cast<size_t>(3 * table->image_bytes()), 1);
    bring_back(*table, ids.data(), 3, images.data(), true, executor);
  });
}
void note_cold(Tables& tables, Executor&) {
  for_each_table(tables, 0, [&](const std::shared_ptr<Table>& table) {
    std::vector<int64_t> ids;
    for (int64_t id = 0; id < 5000; ++id) ids.push_back(id % 1900);
    table->cold_filter().add(ids.data(), 5000);
  });
}
void watch(Tables& tables, Executor&) {
  if (!tables.snapshots.empty()) return;
  auto snapshot = std::make_unique<Snapshot>(tables.all[0], std::nullopt);
}
void score(Tables& tables, Executor& executor) {
  for_each_table(tables, 0, [&](const std::shared_ptr<Table>& table) {
    std::vector<int64_t> ids(static_cast<size_t>(table->size()));
    table->ids(ids.data());
    std::vector<float> scores(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) scores[i] = static_cast<float>(ids[i] % 11) - 5;
    set_scores(*table, ids.data(), table->size(), scores.data(), executor);
  });
}
// A table grows so far that its regions grow several times.
void grow(Tables& tables, Executor& executor) {
  static const Data data(1, 9000, 100000);
  for_each_table(tables, 1, [&](const std::shared_ptr<Table>& table) {
    std::vector<Slot> slots(9000);
    find_or_insert(*table, data.ids.data(), 9000, slots.data(), executor, Arrival::kUpdate);
  });
}

}  // namespace

int main() {
  Bounds bounded;
  bounded.max_rows = 60;
  bounded.eviction = Eviction::kLeastRecent;
  Bounds admitting = bounded;
  admitting.min_frequency = 2;
  admitting.counter_bytes = 1 << 12;
  Bounds expiring;
  expiring.expiry = 2;
  const std::vector<Kind> kinds{
      {"bounded", bounded, false}, {"admitting", admitting, false}, {"expiring", expiring, true}};
  for (const Kind& kind : kinds) {
    for (const int threads : {1, 3}) {
      if (threads > 1 && kind.name != "bounded") continue;
      const auto test = [&](const char* name, const Call& before, const Call& call) {
        every_allocation_fails_once(kind, name, threads, before, call);
      };
      test("forward", nullptr, forward);
      test("several passes", nullptr, several_passes);
      test("the end of several passes", keep_passes, end_passes);
      test("forward after a prefetch", prefetch_all, forward);
      test("prefetch", nullptr, prefetch_one);
      test("backward", forward, backward);
      test("drop", forward, drop);
      if (threads > 1) continue;
      test(
          "accumulated backward",
          [](Tables& tables, Executor& executor) {
            forward(tables, executor);
            forward(tables, executor);
          },
          accumulated);
      for (const size_t of : {0, 1, 2}) {
        if (of > 0 && kind.name != "bounded") continue;
        test("update", nullptr, update(of));
        test("import", nullptr, import(of));
        test("insert", nullptr, insert(of));
        test("remove", nullptr, remove(of));
        test("remove beside a pass", forward, remove(of));
      }
      test("evict", nullptr, evict_half);
      test("note cold", nullptr, note_cold);
      test("bring back", nullptr, bring);
      test("watch", nullptr, watch);
    }
  }
  Bounds occurring = bounded, scored = bounded;
  occurring.eviction = Eviction::kLeastOccurring;
  scored.eviction = Eviction::kLeastScored;
  for (const Kind& kind : {Kind{"occurring", occurring, false, true}, Kind{"scored", scored, true, true}}) {
    every_allocation_fails_once(kind, "forward", 1, nullptr, forward);
    every_allocation_fails_once(kind, "backward", 1, forward, backward);
    every_allocation_fails_once(kind, "drop", 1, forward, drop);
    every_allocation_fails_once(kind, "remove", 1, nullptr, remove(size_t{0}));
  }
  every_allocation_fails_once({"scored", scored, false}, "score", 2, nullptr, score);
  every_allocation_fails_once(kinds[0], "grow", 2, nullptr, grow);
  CHECK(calls_that_failed > 500);
  std::printf("test_faults passed: %lld calls failed\n", static_cast<long long>(calls_that_failed));
}
