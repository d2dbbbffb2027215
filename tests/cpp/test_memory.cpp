// Memory that returns to the system: a table moves its rows together after most rows were removed, while passes are
// pending and marks are set; the buffer pool keeps no more memory than was used recently.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "base/buffer_pool.h"
#include "base/error.h"
#include "cold/cold_rows.h"
#include "lookup/pass.h"
#include "snapshot/snapshot.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kColumns = 16;
constexpr int64_t kRows = 60000;

std::shared_ptr<Table> make_table() {
  TableConfig config;
  config.name = "t";
  config.column_end = kColumns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.optimizer.kind = OptimizerKind::kAdam;
  config.optimizer.beta1 = 0.9;
  config.optimizer.beta2 = 0.99;
  return std::make_shared<Table>(config);
}

// Returns the resident bytes of the memory of a table's rows.
int64_t resident(const Table& table, int64_t slots) {
  const auto bytes = static_cast<size_t>(slots * table.rows().row_bytes());
  std::vector<unsigned char> pages((bytes + 4095) / 4096);
  CHECK(mincore(table.rows().row(0), bytes, pages.data()) == 0);
  return 4096 * std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; });
}

struct Step {
  std::vector<int64_t> ids;
  std::vector<float> out, grad;
  std::shared_ptr<Pass> pass;
  Step(const std::shared_ptr<const Group>& group, std::vector<int64_t> looked_up, Executor& executor)
      : ids(std::move(looked_up)), out(ids.size() * kColumns), grad(out.size(), 0.25f) {
    Batch batch;
    batch.ids = ids.data();
    batch.n_ids = batch.bags = static_cast<int64_t>(ids.size());
    pass = begun(group, batch, out.data(), executor);
  }
  void backward(Executor& executor) { pass->backward(grad.data(), {0.1f}, nullptr, executor); }
};

std::vector<char> images_of(Table& table, const std::vector<int64_t>& ids, Executor& executor) {
  const auto group = one_table_group(std::shared_ptr<Table>(&table, [](Table*) {}));
  const auto locks = group->lock();
  table.settle_passes(executor);
  std::vector<char> images(ids.size() * static_cast<size_t>(table.image_bytes()));
  read_images(table, ids.data(), static_cast<int64_t>(ids.size()), images.data(), executor);
  return images;
}
std::vector<int64_t> ids_of(const Table& table) {
  std::vector<int64_t> ids(static_cast<size_t>(table.size()));
  table.ids(ids.data());
  std::sort(ids.begin(), ids.end());
  return ids;
}
int64_t remove(Table& table, const std::vector<int64_t>& ids) {
  const std::lock_guard<TableMutex> lock(table.mutex());
  return table.remove(ids.data(), static_cast<int64_t>(ids.size()));
}

// Compares a table with a second one whose rows cannot move, because it always has a snapshot.
void rows_that_move_are_the_same(size_t at_once) {
  std::mt19937_64 random(at_once);
  Threads executor(2);
  const auto table = make_table(), still = make_table();
  const auto group = one_table_group(table), still_group = one_table_group(still);
  std::vector<int64_t> all;
  for (int64_t id = 0; id < kRows; ++id) all.push_back(id * 7919 - 1000);
  for (const auto& of : {group, still_group}) Step(of, all, executor).backward(executor);
  const int64_t before = resident(*table, kRows);
  CHECK(before >= kRows * table->rows().row_bytes() * 9 / 10);

  Changes::Mark mark, still_mark;
  std::optional<Snapshot> snapshot;
  {
    const std::scoped_lock locks(table->mutex(), still->mutex());
    mark = table->rows().mark();
    snapshot.emplace(still, std::nullopt);
    still_mark = snapshot->mark();
  }
  std::shuffle(all.begin(), all.end(), random);
  std::vector<Step> pending, still_pending;  // passes of rows that stay, and of rows that are removed
  const std::vector<int64_t> looked_up(all.end() - 3000, all.end());
  std::vector<int64_t> with_removed(all.begin() + 40000, all.begin() + 40100);
  with_removed.insert(with_removed.end(), all.end() - 500, all.end());
  for (const auto& ids : {looked_up, with_removed}) {
    pending.emplace_back(group, ids, executor);
    still_pending.emplace_back(still_group, ids, executor);
  }
  int64_t removed = 0;
  for (size_t first = 0; first < kRows * 9 / 10; first += at_once) {
    const std::vector<int64_t> some(
        all.begin() + static_cast<int64_t>(first),
        all.begin() + static_cast<int64_t>(std::min<size_t>(first + at_once, kRows * 9 / 10)));
    removed += remove(*table, some);
    remove(*still, some);
    if (first == 30000 / at_once * at_once) {  // the passes end here, after some rows were removed
      for (auto* steps : {&pending, &still_pending}) {
        for (Step& step : *steps) step.backward(executor);
        steps->clear();
      }
    }
  }
  CHECK(removed == kRows * 9 / 10);
  for (auto* steps : {&pending, &still_pending}) {
    for (Step& step : *steps) step.backward(executor);
    steps->clear();
  }
  const auto rest = ids_of(*table);
  CHECK(rest == ids_of(*still));
  for (int step = 0; step < 20; ++step) {  // these steps finish the compaction
    Step(group, {rest[static_cast<size_t>(step)]}, executor).backward(executor);
    Step(still_group, {rest[static_cast<size_t>(step)]}, executor).backward(executor);
  }
  CHECK(images_of(*table, rest, executor) == images_of(*still, rest, executor));
  CHECK(table->rows().slots() < kRows / 4);
  CHECK(resident(*table, kRows) < before / 4);
  CHECK(still->rows().slots() == kRows);

  // The changes since the mark are still known.
  snapshot.reset();
  std::vector<std::vector<int64_t>> changed;
  for (const auto& [of, since] : {std::make_pair(table, mark), std::make_pair(still, still_mark)}) {
    std::unique_ptr<Snapshot> delta;
    {
      const std::lock_guard<TableMutex> lock(of->mutex());
      delta = std::make_unique<Snapshot>(of, since);
    }
    const auto n = static_cast<size_t>(delta->rows_left());
    std::vector<int64_t> ids(n), last_step(n), frequency(n);
    std::vector<float> weights(n * kColumns), first(weights.size()), second(weights.size()), state(n);
    delta->read(delta->rows_left(), ids.data(),
                {weights.data(), {first.data(), second.data()}, state.data(), last_step.data(), frequency.data()},
                false, executor);
    changed.push_back(ids);
  }
  CHECK(changed[0] == changed[1] && changed[0].size() >= 3000);

  // The table grows again, and uses the lowest free slots first.
  for (const auto& of : {group, still_group}) Step(of, all, executor).backward(executor);
  CHECK(table->size() == kRows && table->rows().slots() == kRows);
  CHECK(images_of(*table, all, executor) == images_of(*still, all, executor));
}

void an_empty_table_has_no_memory() {
  Threads executor(2);
  const auto table = make_table();
  std::vector<int64_t> all(kRows);
  for (int64_t id = 0; id < kRows; ++id) all[static_cast<size_t>(id)] = id;
  Step(one_table_group(table), all, executor).backward(executor);
  CHECK(remove(*table, all) == kRows);
  CHECK(table->rows().slots() == 0 && resident(*table, kRows) < 2 << 20);
}

// A table that loses its rows part by part shrinks with them, and keeps the rest to the bit.
void shrink_returns_what_has_been_removed() {
  Threads executor(2);
  const auto table = make_table();
  std::vector<int64_t> all(kRows);
  for (int64_t id = 0; id < kRows; ++id) all[static_cast<size_t>(id)] = id;
  Step(one_table_group(table), all, executor).backward(executor);
  std::mt19937_64 random(3);
  std::shuffle(all.begin(), all.end(), random);
  while (all.size() > kRows / 5) {
    const std::vector<int64_t> some(all.end() - kRows / 10, all.end());
    all.resize(all.size() - kRows / 10);
    std::vector<int64_t> rest = all;
    std::sort(rest.begin(), rest.end());
    const auto before = images_of(*table, rest, executor);
    CHECK(remove(*table, some) == kRows / 10);
    {
      const std::lock_guard<TableMutex> lock(table->mutex());
      table->shrink();
    }
    CHECK((table->rows().slots() - static_cast<int64_t>(all.size())) * table->rows().image_bytes() <= 2 << 20);
    CHECK(ids_of(*table) == rest && images_of(*table, rest, executor) == before);
  }
}

// Random calls, during which compactions begin, end and are abandoned.
void any_calls(uint64_t seed) {
  std::mt19937_64 random(seed);
  Threads executor(2);
  const auto table = make_table(), still = make_table();
  const auto group = one_table_group(table), still_group = one_table_group(still);
  const Snapshot snapshot(still, std::nullopt);
  std::vector<Step> pending, still_pending;
  int64_t shrunk = 0, slots = 0;
  for (int round = 0; round < 40; ++round) {
    const uint64_t what = random() % 6;
    std::vector<int64_t> ids(1000 + random() % 9000);
    for (int64_t& id : ids) id = static_cast<int64_t>(random() % 40000);
    if (what < 3) {
      pending.emplace_back(group, ids, executor);
      still_pending.emplace_back(still_group, ids, executor);
    } else if (what == 3) {
      auto rest = ids_of(*table);
      std::shuffle(rest.begin(), rest.end(), random);
      rest.resize(rest.size() * 7 / 8);
      CHECK(remove(*table, rest) == remove(*still, rest));
    }
    while (!pending.empty() && (pending.size() > 2 || random() % 2 == 0)) {
      const auto which = static_cast<int64_t>(random() % pending.size());
      if (random() % 4 != 0) {
        pending[static_cast<size_t>(which)].backward(executor);
        still_pending[static_cast<size_t>(which)].backward(executor);
      }
      pending.erase(pending.begin() + which);
      still_pending.erase(still_pending.begin() + which);
    }
    shrunk += table->rows().slots() < slots;
    slots = table->rows().slots();
    const auto rest = ids_of(*table);
    CHECK(rest == ids_of(*still));
    CHECK(images_of(*table, rest, executor) == images_of(*still, rest, executor));
  }
  CHECK(shrunk > 0);
}

void the_pool_keeps_what_is_used() {
  constexpr size_t kMiB = size_t{1} << 20;
  BufferPool pool;
  std::vector<BufferPool::Buffer> held;
  for (int i = 0; i < 60; ++i) held.push_back(pool.take(33 * kMiB));
  CHECK(pool.bytes().used >= 60 * 33 * kMiB);
  held.clear();
  CHECK(pool.bytes().used == 0 && pool.bytes().idle <= 64 * kMiB);

  // The steps use more memory than the pool keeps at first. From the third step on, they get the same buffers again.
  const auto step = [&](size_t buffers) {
    std::vector<void*> found;
    for (size_t i = 0; i < buffers; ++i) {
      held.push_back(pool.take(20 * kMiB));
      found.push_back(held.back().data());
    }
    held.clear();
    std::sort(found.begin(), found.end());
    return found;
  };
  step(10);
  step(10);
  const auto third = step(10);
  CHECK(pool.bytes().idle >= 200 * kMiB && pool.bytes().idle <= 300 * kMiB);
  for (int i = 0; i < 20; ++i) CHECK(step(10) == third);

  // When the steps use less memory, the pool frees the rest.
  for (int i = 0; i < 200; ++i) step(1);
  CHECK(pool.bytes().idle <= 64 * kMiB);
  CHECK(pool.free_idle() > 0 && pool.bytes().idle == 0);
}

void tensors_are_no_larger_than_a_machine() {
  CHECK(tensor_bytes({}, 4) == 4 && tensor_bytes({3, 5}, 2) == 30 && tensor_bytes({0, 5}, 8) == 0);
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{int64_t{1} << 45}, {int64_t{1} << 40, int64_t{1} << 40, 1}, {-1, 2}}) {
    CHECK_THROWS(tensor_bytes(shape, 4), OutOfMemory);
  }
}

// Makes a call whose first `failures` tries run out of memory. Returns the number of tries, negative if the last
// failed.
int calls_until_success(BufferPool& pool, int failures, bool native) {
  int calls = 0;
  try {
    CHECK(with_idle_memory(pool, [&] {
            if (++calls > failures) return 7;
            if (native) throw OutOfMemory("for a test");
            throw std::bad_alloc();
          }) == 7);
  } catch (const OutOfMemory&) {
    return -calls;
  } catch (const std::bad_alloc&) {
    return -calls;
  }
  return calls;
}

void a_call_is_repeated_with_idle_memory() {
  for (const bool native : {false, true}) {
    BufferPool pool;
    CHECK(calls_until_success(pool, 0, native) == 1);
    CHECK(calls_until_success(pool, 1, native) == -1);  // the pool has nothing to free
    {
      const auto buffer = pool.take(100);
    }
    CHECK(pool.bytes().idle > 0);
    CHECK(calls_until_success(pool, 1, native) == 2);
    CHECK(pool.bytes().idle == 0);
    {
      const auto buffer = pool.take(100);
    }
    CHECK(calls_until_success(pool, 2, native) == -2);
  }
}

}  // namespace

int main() {
  for (const size_t at_once : {size_t{1000}, size_t{kRows}}) rows_that_move_are_the_same(at_once);
  an_empty_table_has_no_memory();
  shrink_returns_what_has_been_removed();
  for (uint64_t seed = 1; seed <= (kIsSlow ? 1 : 2); ++seed) any_calls(seed);
  the_pool_keeps_what_is_used();
  tensors_are_no_larger_than_a_machine();
  a_call_is_repeated_with_idle_memory();
  std::puts("test_memory passed");
}
