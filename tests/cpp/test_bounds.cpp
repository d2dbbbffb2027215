// Tables with bounds: a table never has more rows than its bound, pending passes keep their rows, a call that fails
// changes nothing, and rows return from a cold store bit for bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mix.h"
#include "bounds/eviction.h"
#include "bounds/row_uses.h"
#include "bounds/scores.h"
#include "cold/cold_rows.h"
#include "lookup/find.h"
#include "lookup/pass.h"
#include "snapshot/departures.h"
#include "snapshot/snapshot.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr int64_t kColumns = 5;
constexpr int64_t kMaxRows = 300;

std::shared_ptr<Table> make_table(const Bounds& bounds, OptimizerKind kind = OptimizerKind::kAdam) {
  TableConfig config;
  config.name = "t";
  config.column_end = kColumns;
  config.init = {InitKind::kUniform, -1.0, 1.0};
  config.optimizer.kind = kind;
  config.optimizer.beta1 = 0.9;
  config.optimizer.beta2 = 0.99;
  config.bounds = bounds;
  return std::make_shared<Table>(config);
}

std::vector<int64_t> draw(std::mt19937_64& random, size_t n, uint64_t spread) {
  std::vector<int64_t> ids(n);
  for (int64_t& id : ids) id = static_cast<int64_t>(random() % spread * (random() % 3 == 0 ? 1 : 7919)) - 40;
  return ids;
}

struct Step {
  std::vector<int64_t> ids;
  std::vector<float> out;
  std::shared_ptr<Pass> pass;

  Step(const std::shared_ptr<const Group>& group, std::vector<int64_t> looked_up, Executor& executor)
      : ids(std::move(looked_up)), out(ids.size() * kColumns) {
    Batch batch;
    batch.ids = ids.data();
    batch.n_ids = batch.bags = static_cast<int64_t>(ids.size());
    pass = begun(group, batch, out.data(), executor);
  }
  void backward(Executor& executor) {
    std::vector<float> grad(out.size());
    for (size_t i = 0; i < grad.size(); ++i) grad[i] = 0.01f * static_cast<float>(i % 17) - 0.05f;
    pass->backward(grad.data(), {0.1f}, nullptr, executor);
  }
};

Slot slot_of(const Table& table, int64_t id) { return table.index().find(id); }

// A slot that a pending pass refers to does not belong to another id.
void check_pinned(const Table& table, const std::vector<Step>& pending) {
  for (const Step& step : pending) {
    SlotSet pinned(table.rows().slots());
    step.pass->pin(table, pinned);
    const std::set<int64_t> ids(step.ids.begin(), step.ids.end());
    table.index().for_each([&](int64_t id, Slot slot) { CHECK(!pinned.contains(slot) || ids.count(id) > 0); });
  }
}

void any_calls_keep_the_bound(const Bounds& bounds, uint64_t seed) {
  std::mt19937_64 random(seed);
  Threads executor(1 + static_cast<int>(seed % 3));
  const auto table = make_table(bounds);
  const auto group = one_table_group(table);
  std::vector<Step> pending;
  std::unique_ptr<Snapshot> snapshot;
  int64_t full = 0;
  constexpr int kRounds = 400;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t what = random() % 20;
    if (what < 9) {
      const int64_t before = table->size(), clock = table->clock();
      const Counters counters = table->counters();
      try {
        Step step(group, draw(random, 1 + random() % 120, 400), executor);
        if (bounds.min_frequency == 0) {
          for (const int64_t id : step.ids) CHECK(slot_of(*table, id) != kNoSlot);
        }
        pending.push_back(std::move(step));
      } catch (const InvalidArgument&) {
        ++full;
        CHECK(table->size() == before && table->clock() == clock);
        CHECK(table->counters().evicted == counters.evicted && table->counters().inserts == counters.inserts);
      }
    } else if (what < 14 && !pending.empty()) {
      const size_t which = random() % pending.size();
      if (random() % 4 != 0) pending[which].backward(executor);
      pending.erase(pending.begin() + static_cast<int64_t>(which));
    } else if (what == 14) {
      const auto ids = draw(random, 20, 400);
      const auto locks = group->lock();
      table->remove(ids.data(), 20);
    } else if (what == 15) {
      const auto ids = draw(random, 50, 400);
      std::vector<Slot> slots(50);
      const auto locks = group->lock();
      try {
        find_or_insert(*table, ids.data(), 50, slots.data(), executor,
                       random() % 2 == 0 ? Arrival::kUpdate : Arrival::kWrite);
      } catch (const InvalidArgument&) {
        ++full;
      }
    } else if (what == 16) {
      if (snapshot == nullptr) {
        std::optional<Changes::Mark> since;
        const auto locks = group->lock();
        table->settle_passes(executor);
        if (random() % 2 == 0) since = table->rows().mark();
        snapshot = std::make_unique<Snapshot>(table, since);
      } else {
        const int64_t n = snapshot->rows_left();
        std::vector<int64_t> ids(static_cast<size_t>(n)), last_step(ids.size()), frequency(ids.size());
        std::vector<float> weights(ids.size() * kColumns), first(weights.size()), second(weights.size()),
            state(ids.size());
        const RowImages images{
            weights.data(), {first.data(), second.data()}, state.data(), last_step.data(), frequency.data()};
        if (random() % 3 != 0) snapshot->read(n, ids.data(), images, false, executor);
        CHECK(random() % 3 == 0 || std::is_sorted(ids.begin(), ids.end()));
        snapshot.reset();
      }
    }
    CHECK(table->size() <= bounds.max_rows);
    if (round % 4 == 0) check_pinned(*table, pending);
  }
  CHECK(full > 0);
  CHECK(table->counters().evicted > kMaxRows);
  CHECK(bounds.expiry == 0 || table->counters().expired > 0);
  CHECK(bounds.min_frequency == 0 || table->counters().refused > 0);
}

// Counts the tasks that it runs.
class Counting final : public Executor {
 public:
  int64_t tasks = 0;
  int threads() const override { return 1 << 16; }
  void run(int workers, Body body, void* context) override {
    tasks += workers;
    body(context);
  }
};

void the_search_for_the_least_rows_is_spread_over_the_steps() {
  constexpr int64_t kRows = 100'000, kNew = 125, kSteps = 120;
  for (const auto& [half_life, frequency] :
       std::vector<std::pair<int64_t, uint32_t>>{{0, 0}, {50, 0}, {20, 0}, {20, 1 << 20}}) {
    Bounds bounds;
    bounds.max_rows = kRows;
    bounds.eviction = Eviction::kLeastFrequent;
    bounds.half_life = half_life;
    const auto table = make_table(bounds, OptimizerKind::kSgd);
    Threads executor(2);
    Counting counting;
    int64_t all = 0, most = 0;
    const auto insert = [&](int64_t n) {
      std::vector<int64_t> ids(static_cast<size_t>(n));
      for (int64_t& id : ids) id = all++;
      std::vector<Slot> slots(ids.size());
      find_or_insert(*table, ids.data(), n, slots.data(), executor, Arrival::kUpdate);
    };
    const std::lock_guard<TableMutex> lock(table->mutex());
    table->begin_step();
    insert(kRows);
    // If the rows are frequent, new ones leave first.
    table->index().for_each([&](int64_t, Slot slot) { table->rows().meta(slot).frequency += frequency; });
    int64_t whole = 0;
    for (int64_t step = 0; step < kSteps; ++step) {
      table->begin_step();
      const SlotSet kept(table->rows().slots());
      counting.tasks = 0;
      const std::vector<Leaver> leavers = table->evictions().next(*table, kept, kNew, counting);
      if (step == 0) {
        whole = counting.tasks;
      } else {
        most = std::max(most, counting.tasks);
      }
      std::vector<int64_t> ids, least;
      for (const Leaver& leaver : leavers) ids.push_back(leaver.id);
      if (table->clock() % 10 < 2) {
        for (const Leaver& leaver : least_rows(*table, kept, kNew, executor)) least.push_back(leaver.id);
        CHECK(std::set<int64_t>(ids.begin(), ids.end()) == std::set<int64_t>(least.begin(), least.end()));
      }
      CHECK(table->remove(ids.data(), kNew) == kNew);
      table->evictions().evicted();
      insert(kNew);
    }
    CHECK(whole >= kRows / 4096);
    CHECK(most <= whole / 3);
  }
}

void encoded_scores_ascend() {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const std::vector<float> ascending{-kLargest, -1.5f, -1.0f, -1e-40f, 0.0f, 1e-40f, 1e-30f, 1.0f, 1.5f, kLargest};
  for (size_t i = 1; i < ascending.size(); ++i) CHECK(encoded_score(ascending[i - 1]) < encoded_score(ascending[i]));
  CHECK(encoded_score(-0.0f) == encoded_score(0.0f));
  CHECK(encoded_score(-kLargest) == kLeastScore && encoded_score(kLargest) == kLargestScore);
  CHECK(encoded_score(std::numeric_limits<float>::infinity()) > kLargestScore);
  CHECK(score_rank({0, 0}, 7) == 7 && score_rank({0, kLeastScore - 1}, 7) == 7 &&
        score_rank({0, kLeastScore}, 7) == kLeastScore);
}

// A table of which the test knows the scores and last steps, and so which rows are the least.
struct ScoredTable {
  explicit ScoredTable(int64_t max_rows, float unscored) : default_score(unscored) {
    Bounds bounds;
    bounds.max_rows = max_rows;
    bounds.eviction = Eviction::kLeastScored;
    bounds.unscored = encoded_score(unscored);
    table = make_table(bounds, OptimizerKind::kSgd);
  }

  void insert(const std::vector<int64_t>& ids) {
    std::vector<Slot> slots(ids.size());
    find_or_insert(*table, ids.data(), static_cast<int64_t>(ids.size()), slots.data(), executor, Arrival::kUpdate);
    for (const int64_t id : ids) {
      if (rows.count(id) == 0) rows[id] = {default_score, static_cast<uint32_t>(table->clock())};
    }
  }
  void score(const std::vector<int64_t>& ids, const std::vector<float>& scores) {
    std::set<int64_t> scored;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto row = rows.find(ids[i]);
      if (row == rows.end()) continue;
      row->second.first = scores[i];
      scored.insert(ids[i]);
    }
    CHECK(set_scores(*table, ids.data(), static_cast<int64_t>(ids.size()), scores.data(), executor) ==
          static_cast<int64_t>(scored.size()));
  }
  std::set<int64_t> least(size_t count) const {
    std::vector<std::tuple<float, uint32_t, uint64_t>> ranks;
    for (const auto& [id, row] : rows) ranks.emplace_back(row.first, row.second, mix(static_cast<uint64_t>(id)));
    std::sort(ranks.begin(), ranks.end());
    std::set<int64_t> ids;
    for (size_t i = 0; i < std::min(count, ranks.size()); ++i) {
      ids.insert(static_cast<int64_t>(unmix(std::get<2>(ranks[i]))));
    }
    return ids;
  }
  void remove(const std::set<int64_t>& ids) {
    const std::vector<int64_t> gone(ids.begin(), ids.end());
    CHECK(table->remove(gone.data(), static_cast<int64_t>(gone.size())) == static_cast<int64_t>(gone.size()));
    for (const int64_t id : gone) rows.erase(id);
  }

  float default_score;
  std::shared_ptr<Table> table;
  std::map<int64_t, std::pair<float, uint32_t>> rows;  // score and last step
  Threads executor{2};
};

std::set<int64_t> ids_of(const std::vector<Leaver>& leavers) {
  std::set<int64_t> ids;
  for (const Leaver& leaver : leavers) ids.insert(leaver.id);
  return ids;
}

void the_lowest_scores_leave() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float unscored : {kInfinity, 0.5f, -1.0f}) {
    std::mt19937_64 random(11);
    ScoredTable scored(6000, unscored);
    const std::lock_guard<TableMutex> lock(scored.table->mutex());
    scored.table->begin_step();
    int64_t next = 0;
    const auto new_ids = [&](int64_t n) {
      std::vector<int64_t> ids(static_cast<size_t>(n));
      for (int64_t& id : ids) id = random() % 4 == 0 && next > 0 ? static_cast<int64_t>(random() % next) : next++;
      return ids;
    };
    scored.insert(new_ids(5000));
    for (int step = 0; step < 60; ++step) {
      scored.table->begin_step();
      for (uint64_t call = random() % 3; call > 0; --call) {
        std::vector<int64_t> ids(random() % (step % 50 == 49 ? 5000 : 300));
        std::vector<float> scores(ids.size());
        for (size_t i = 0; i < ids.size(); ++i) {
          ids[i] = static_cast<int64_t>(random() % next);
          // Few different scores, so that the last step and the hash of the id decide, too.
          scores[i] = static_cast<float>(random() % 40) / 16.0f - 1.0f;
          if (random() % 8 == 0) scores[i] = -static_cast<float>(step);  // lower and lower
        }
        scored.score(ids, scores);
      }
      if (step % 20 == 7) {
        std::set<int64_t> gone;
        for (int i = 0; i < 50; ++i) gone.insert(std::next(scored.rows.begin(), random() % scored.rows.size())->first);
        scored.remove(gone);
      }
      const size_t count = random() % (step % 30 == 29 ? 1500 : 100);
      const SlotSet kept(scored.table->rows().slots());
      const std::set<int64_t> leaving =
          ids_of(scored.table->evictions().next(*scored.table, kept, static_cast<int64_t>(count), scored.executor));
      CHECK(leaving == scored.least(count));
      CHECK(leaving == ids_of(least_rows(*scored.table, kept, static_cast<int64_t>(count), scored.executor)));
      if (random() % 4 != 0) {  // else they are offered again
        scored.remove(leaving);
        scored.table->evictions().evicted();
      }
      scored.insert(new_ids(static_cast<int64_t>(std::min<size_t>(count, 6000 - scored.rows.size()))));
    }
  }
  Bounds bounds;
  const auto plain = make_table(bounds);
  const int64_t id = 3;
  const float score = 1, not_finite = std::nanf("");
  Threads executor(1);
  CHECK_THROWS(set_scores(*plain, &id, 1, &score, executor), InvalidArgument);
  ScoredTable scored(9, 0);
  CHECK_THROWS(set_scores(*scored.table, &id, 1, &not_finite, executor), InvalidArgument);
}

void the_search_for_the_lowest_scores_is_spread_over_the_steps() {
  constexpr int64_t kRows = 100'000, kNew = 125, kSteps = 120;
  std::mt19937_64 random(3);
  ScoredTable scored(kRows, std::numeric_limits<float>::infinity());
  Table& table = *scored.table;
  Counting counting;
  const std::lock_guard<TableMutex> lock(table.mutex());
  table.begin_step();
  int64_t all = 0, whole = 0, most = 0;
  const auto insert = [&](int64_t n) {
    std::vector<int64_t> ids(static_cast<size_t>(n));
    for (int64_t& id : ids) id = all++;
    std::vector<Slot> slots(ids.size());
    find_or_insert(table, ids.data(), n, slots.data(), scored.executor, Arrival::kUpdate);
  };
  const auto score = [&](int64_t n) {
    std::vector<int64_t> ids(static_cast<size_t>(n));
    std::vector<float> scores(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = all - 1 - static_cast<int64_t>(random() % kRows);
      scores[i] = static_cast<float>(random() % 1'000'000);
    }
    set_scores(table, ids.data(), n, scores.data(), scored.executor);
  };
  insert(kRows);
  score(2 * kRows);
  for (int64_t step = 0; step < kSteps; ++step) {
    table.begin_step();
    score(500);
    const SlotSet kept(table.rows().slots());
    counting.tasks = 0;
    const std::vector<Leaver> leavers = table.evictions().next(table, kept, kNew, counting);
    if (step == 0) {
      whole = counting.tasks;
    } else {
      most = std::max(most, counting.tasks);
    }
    const std::set<int64_t> leaving = ids_of(leavers);
    if (step % 10 == 0) CHECK(leaving == ids_of(least_rows(table, kept, kNew, scored.executor)));
    const std::vector<int64_t> gone(leaving.begin(), leaving.end());
    CHECK(table.remove(gone.data(), kNew) == kNew);
    table.evictions().evicted();
    insert(kNew);
  }
  CHECK(whole >= kRows / 4096);
  CHECK(most <= whole / 3);
}

// Passes of a batch with many occurrences of few ids, whatever ends them, count all of them.
void occurrences_are_counted() {
  std::mt19937_64 random(7);
  Bounds bounds;
  bounds.max_rows = kMaxRows;
  bounds.eviction = Eviction::kLeastOccurring;
  bounds.half_life = 3;
  for (const int threads : {1, 3}) {
    Threads executor(threads);
    const auto table = make_table(bounds);
    const auto group = one_table_group(table);
    std::map<int64_t, std::pair<uint32_t, uint32_t>> expected;  // frequency and last step
    for (uint32_t step = 1; step <= 12; ++step) {
      const auto ids = draw(random, step % 4 == 0 ? 40'000 : 300, 30);
      {
        Step looked_up(group, ids, executor);
        if (step % 3 != 0) looked_up.backward(executor);
      }
      std::map<int64_t, uint32_t> times;
      for (const int64_t id : ids) ++times[id];
      for (const auto& [id, count] : times) {
        auto& [frequency, last_step] = expected[id];
        frequency = (frequency >> (step / 3 - last_step / 3)) + count;
        last_step = step;
      }
    }
    for (const auto& [id, row] : expected) {
      const RowMeta& meta = table->rows().meta(slot_of(*table, id));
      CHECK(meta.frequency == row.first && meta.last_step == row.second);
    }
    // The frequency stops at its largest value.
    const int64_t id = expected.begin()->first;
    table->rows().meta(slot_of(*table, id)).frequency = UINT32_MAX - 1;
    table->rows().meta(slot_of(*table, id)).last_step = 12;
    {
      Step looked_up(group, {id, id, id}, executor);
    }
    CHECK(table->rows().meta(slot_of(*table, id)).frequency == UINT32_MAX);
  }
}

void departures_are_distinct_and_bounded() {
  std::mt19937_64 random(9);
  for (const int64_t most : {1, 7, 100, 5000}) {
    Departures departures(most);
    std::set<int64_t> expected;
    for (int round = 0; round < 400; ++round) {
      const auto ids = draw(random, random() % 60, static_cast<uint64_t>(2 * most));
      departures.reserve(static_cast<int64_t>(ids.size()));
      for (const int64_t id : ids) departures.add(id);
      expected.insert(ids.begin(), ids.end());
      const bool fits = static_cast<int64_t>(expected.size()) <= most;
      CHECK(departures.overflowed() == !fits);
      CHECK(fits || departures.ids().empty());
      if (fits) CHECK(std::set<int64_t>(departures.ids().begin(), departures.ids().end()) == expected);
      CHECK(departures.ids().size() == (fits ? expected.size() : 0));
      CHECK(departures.bytes() <= 24 * most + 64);
      if (random() % 40 == 0) {
        departures.clear();
        expected.clear();
        CHECK(!departures.overflowed() && departures.bytes() == 0);
      }
    }
    departures.overflow();
    CHECK(departures.overflowed() && departures.ids().empty());
  }
}

void cold_rows_come_back_as_they_left() {
  std::mt19937_64 random(5);
  Threads executor(2);
  Bounds bounds;
  bounds.max_rows = kMaxRows;
  bounds.cold_store = true;
  Bounds no_bounds;
  no_bounds.cold_store = true;  // so that the images have the same form
  const auto table = make_table(bounds), whole = make_table(no_bounds);
  const auto group = one_table_group(table), whole_group = one_table_group(whole);
  std::map<int64_t, std::vector<char>> cold;
  const auto bytes = static_cast<size_t>(table->image_bytes());
  const auto make_room = [&](const std::vector<int64_t>& ids, int64_t n) {
    for (;;) {
      const auto leaving = leaving_ids(*table, ids.data(), static_cast<int64_t>(ids.size()), n, executor);
      if (leaving.empty()) return;
      std::vector<char> images(leaving.size() * bytes);
      std::unique_ptr<bool[]> left(new bool[leaving.size()]);
      read_images(*table, leaving.data(), static_cast<int64_t>(leaving.size()), images.data(), executor);
      table->cold_filter().add(leaving.data(), static_cast<int64_t>(leaving.size()));
      evict(*table, leaving.data(), static_cast<int64_t>(leaving.size()), images.data(), left.get());
      for (size_t i = 0; i < leaving.size(); ++i) {
        if (left[i]) cold[leaving[i]].assign(images.data() + i * bytes, images.data() + (i + 1) * bytes);
      }
    }
  };
  for (int round = 0; round < 300; ++round) {
    const auto ids = draw(random, 1 + random() % 150, 900);
    if (round % 30 == 29) {  // the images have the marks of the last changes: to move a row is no change
      table->rows().mark();
      whole->rows().mark();
    }
    {
      const auto locks = group->lock();
      const auto absent = absent_ids(*table, ids.data(), static_cast<int64_t>(ids.size()), executor);
      std::vector<int64_t> back;
      std::vector<char> images;
      for (const int64_t id : absent) {
        const auto found = cold.find(id);
        if (found == cold.end()) continue;
        CHECK(table->cold_filter().may_contain(id));
        back.push_back(id);
        images.insert(images.end(), found->second.begin(), found->second.end());
      }
      make_room(ids, static_cast<int64_t>(absent.size()));
      bring_back(*table, back.data(), static_cast<int64_t>(back.size()), images.data(), true, executor);
      for (const int64_t id : back) cold.erase(id);
    }
    Step step(group, ids, executor), expected(whole_group, ids, executor);
    CHECK(step.out == expected.out);
    if (round % 5 == 0) continue;  // the graph is dropped
    step.backward(executor);
    expected.backward(executor);
  }
  CHECK(table->size() + static_cast<int64_t>(cold.size()) == whole->size());
  CHECK(static_cast<int64_t>(cold.size()) > kMaxRows);
  for (const auto& [id, image] : cold) {
    std::vector<char> same(bytes);
    read_images(*whole, &id, 1, same.data(), executor);
    CHECK(same == image);
  }
  const std::vector<int64_t> many = draw(random, 2000, 100000);
  CHECK_THROWS(leaving_ids(*table, many.data(), 2000, 2000, executor), InvalidArgument);
}

struct Entries {
  explicit Entries(const Sightings& sightings) : ids(sightings.size()), counts(ids.size()), generations(ids.size()) {
    sightings.read(ids.data(), counts.data(), generations.data());
  }
  void write_to(Sightings& sightings) const {
    sightings.write(ids.data(), counts.data(), generations.data(), static_cast<int64_t>(ids.size()));
  }
  void add(const Entries& other) {
    ids.insert(ids.end(), other.ids.begin(), other.ids.end());
    counts.insert(counts.end(), other.counts.begin(), other.counts.end());
    generations.insert(generations.end(), other.generations.begin(), other.generations.end());
  }

  std::vector<int64_t> ids;
  std::vector<uint8_t> counts, generations;
};

void sightings_are_exact() {
  Sightings sightings(1 << 12);
  std::map<int64_t, int64_t> seen, former;  // of the generations
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const auto id = static_cast<int64_t>(random() % 400) - 200;
    const auto present = seen.find(id);
    const auto old = former.find(id);
    CHECK(sightings.count(id) == std::min<int64_t>(255, (present == seen.end() ? 0 : present->second) +
                                                            (old == former.end() ? 0 : old->second)));
    if (present == seen.end() && static_cast<int64_t>(seen.size()) == sightings.most()) {
      former = std::move(seen);
      seen.clear();
    }
    ++seen[id];
    sightings.add(id);
    if (i % 1000 == 0) {
      Sightings other(1 << 12);
      Entries(sightings).write_to(other);
      for (int64_t each = -250; each < 250; ++each) CHECK(other.count(each) == sightings.count(each));
    }
  }
  for (int i = 0; i < 300; ++i) sightings.add(7);
  CHECK(sightings.count(7) == 255);
}

// Ids that are counted together have the counts of ids that are counted one by one, and their places do not depend on
// the threads. Some do not fit into their part, and in the last rounds a generation ends.
void sightings_of_many_ids_are_exact() {
  Sightings single(1 << 17);
  std::vector<std::unique_ptr<Sightings>> together;
  std::vector<std::unique_ptr<Threads>> executors;
  for (const int threads : {1, 3, 8}) {
    together.push_back(std::make_unique<Sightings>(1 << 17));
    executors.push_back(std::make_unique<Threads>(threads));
  }
  std::mt19937_64 random(1);
  for (int round = 0; round < 30; ++round) {
    std::set<int64_t> some;
    while (some.size() < 700) some.insert(static_cast<int64_t>(random() % 9000));
    const std::vector<int64_t> ids(some.begin(), some.end());
    for (const int64_t id : ids) single.add(id);
    for (size_t i = 0; i < together.size(); ++i) {
      std::vector<int64_t> sorted = together[i]->by_part(ids);
      CHECK(std::multiset<int64_t>(sorted.begin(), sorted.end()) == std::multiset<int64_t>(ids.begin(), ids.end()));
      together[i]->add(sorted, *executors[i]);
      CHECK(Entries(*together[i]).ids == Entries(*together[0]).ids &&
            Entries(*together[i]).counts == Entries(*together[0]).counts);
    }
    const bool ended = single.size() > single.most();  // other ids may then be in the older generation
    CHECK(ended || together[1]->size() == single.size());
    for (int64_t id = 0; id < 9000 && !ended; ++id) CHECK(together[1]->count(id) == single.count(id));
  }
  CHECK(single.size() > single.most() && together[1]->size() > single.most());
}

void sightings_of_several_counters_merge() {
  Sightings one(1 << 12), other(1 << 12), large(1 << 13), small(1 << 10);
  for (int64_t id = 0; id < one.most(); ++id) {
    one.add(2 * id);
    other.add(2 * id + 1);
  }
  Entries both(one);
  both.add(Entries(other));
  both.write_to(large);
  for (int64_t id = 0; id < 2 * one.most(); ++id) CHECK(large.count(id) == 1);
  CHECK(large.count(2 * one.most()) == 0);
  both.write_to(small);  // it remembers as many as it has room for, in both generations
  int64_t known = 0;
  for (int64_t id = 0; id < 2 * one.most(); ++id) known += small.count(id);
  CHECK(known == 2 * small.most());
}

void the_filter_forgets_nothing() {
  ColdFilter filter(1000);
  int64_t wrong = 0;
  for (int64_t id = -20000; id < 20000; ++id) {
    const int64_t added = id * 7919;
    filter.add(&added, 1);
  }
  for (int64_t id = -20000; id < 20000; ++id) CHECK(filter.may_contain(id * 7919));
  for (int64_t id = 1; id <= 40000; ++id) wrong += filter.may_contain(id * 7919 + 1);
  CHECK(wrong < 40000 / 8);
  CHECK(filter.bytes() < 4 * 40000);
}

void a_renewed_filter_has_the_ids_that_were_kept_or_added() {
  ColdFilter filter(1000);
  const auto add = [&](int64_t begin, int64_t end) {
    for (int64_t id = begin; id < end; ++id) filter.add(&id, 1);
  };
  const auto count = [&](int64_t begin, int64_t end) {
    int64_t found = 0;
    for (int64_t id = begin; id < end; ++id) found += filter.may_contain(id);
    return found;
  };
  add(0, 100000);
  const int64_t bytes = filter.bytes();
  for (int renewal = 0; renewal < 2; ++renewal) {  // the second one begins in place of the first one
    filter.begin_renewal();
    add(200000, 201000);
    for (int64_t id = 1000; id < 2000; ++id) filter.keep(&id, 1);
    CHECK(count(0, 100000) == 100000);
    int64_t kept = 0;
    for (int64_t id = 2000; id < 100000; ++id) kept += filter.may_be_kept(id);
    CHECK(kept < 98000 / 8);
    for (int64_t id = 0; id < 1000; ++id) CHECK(filter.may_be_kept(1000 + id) && filter.may_be_kept(200000 + id));
  }
  filter.end_renewal();
  CHECK(filter.may_be_kept(2000));  // without a renewal, nothing is certain
  CHECK(count(1000, 2000) == 1000);
  CHECK(count(200000, 201000) == 1000);
  CHECK(count(2000, 100000) < 98000 / 8);
  CHECK(filter.bytes() < bytes / 8);
  add(300000, 301000);
  CHECK(count(300000, 301000) == 1000);
}

}  // namespace

int main() {
  uint64_t seed = 0;
  for (const Eviction eviction : {Eviction::kLeastRecent, Eviction::kLeastFrequent, Eviction::kLeastOccurring}) {
    for (const int64_t half_life : {0, 5}) {
      for (const int64_t expiry : {0, 9}) {
        for (const int64_t min_frequency : {0, 2}) {
          Bounds bounds;
          bounds.max_rows = kMaxRows;
          bounds.eviction = eviction;
          bounds.half_life = half_life;
          bounds.expiry = expiry;
          bounds.min_frequency = min_frequency;
          bounds.counter_bytes = 1 << 12;
          any_calls_keep_the_bound(bounds, ++seed);
        }
      }
    }
  }
  the_search_for_the_least_rows_is_spread_over_the_steps();
  encoded_scores_ascend();
  the_lowest_scores_leave();
  the_search_for_the_lowest_scores_is_spread_over_the_steps();
  occurrences_are_counted();
  departures_are_distinct_and_bounded();
  cold_rows_come_back_as_they_left();
  sightings_are_exact();
  sightings_of_many_ids_are_exact();
  sightings_of_several_counters_merge();
  the_filter_forgets_nothing();
  a_renewed_filter_has_the_ids_that_were_kept_or_added();
  std::puts("test_bounds passed");
}
