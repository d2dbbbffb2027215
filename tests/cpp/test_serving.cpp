// Versions of a served table beside an oracle: random changes, versions that are not kept, second changes of one
// version, and threads that read a version while later versions are made.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/memory.h"
#include "gate.h"
#include "served_rows.h"
#include "testing.h"

using namespace recstore;

namespace {

constexpr RowLayout kLayout{RowFormat::kFloat32, 6, 24};
using Row = std::vector<float>;
using Oracle = std::map<int64_t, Row>;

struct Version {
  std::shared_ptr<const ServedRows> rows;
  Oracle oracle;
};

Row random_row(std::mt19937_64& random) {
  Row row(6);
  for (float& value : row) value = static_cast<float>(random() % 1000);
  return row;
}

// Half of the ids are few, so that they change and leave often; the others are any of 64 bits.
int64_t random_id(std::mt19937_64& random) {
  return random() % 2 == 0 ? static_cast<int64_t>(random() % 600) - 300 : static_cast<int64_t>(random());
}

// A table over the rows in this memory, as over those of a mapped file.
std::shared_ptr<const ServedRows> over(const std::vector<int64_t>& ids, const std::shared_ptr<Region>& rows,
                                       uint64_t checksum) {
  auto base = std::make_shared<BaseRows>();
  base->layout = kLayout;
  base->index = std::make_unique<IdIndex>(static_cast<int64_t>(ids.size()), 7);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(base->index->insert(ids[i], static_cast<Slot>(i + 1)));
  base->rows = rows->data();
  base->slots = static_cast<int64_t>(ids.size()) + 1;
  base->checksum = checksum;
  base->check = [rows] {};
  return ServedRows::over(base);
}

Version built(int64_t count, std::mt19937_64& random, bool mapped = false) {
  Version version;
  while (static_cast<int64_t>(version.oracle.size()) < count) version.oracle[random_id(random)] = random_row(random);
  auto region = std::make_shared<Region>();
  region->reserve(static_cast<size_t>((count + 1) * kLayout.row_bytes));
  auto* to = reinterpret_cast<float*>(region->data());
  std::fill_n(to, 6, -1.0f);  // the row for ids without a row
  std::vector<int64_t> ids;
  for (const auto& [id, row] : version.oracle) {
    ids.push_back(id);
    std::copy(row.begin(), row.end(), to += 6);
  }
  version.rows = ServedRows::build(kLayout, ids.data(), count, {region->data(), !mapped, region});
  if (mapped) version.rows = over(ids, region, version.rows->checksum());
  return version;
}

Version changed(const Version& before, std::mt19937_64& random, std::shared_ptr<ServedRows>& made) {
  Version after{nullptr, before.oracle};
  std::vector<int64_t> ids, removed;
  std::vector<float> rows;
  std::set<int64_t> used;
  for (uint64_t i = random() % 200; i-- > 0;) {
    const int64_t id = random_id(random);
    if (!used.insert(id).second) continue;
    if (random() % 3 == 0) {
      removed.push_back(id);  // which may have no row
      after.oracle.erase(id);
    } else {
      const Row row = random_row(random);
      ids.push_back(id);
      rows.insert(rows.end(), row.begin(), row.end());
      after.oracle[id] = row;
    }
  }
  const RowChanges changes{ids.data(), reinterpret_cast<const char*>(rows.data()), static_cast<int64_t>(ids.size()),
                           removed.data(), static_cast<int64_t>(removed.size())};
  made = before.rows->with(changes);
  CHECK(made->checksum() == before.rows->checksum_with(changes));
  after.rows = made;
  return after;
}

void check(const Version& version, std::mt19937_64& random) {
  const ServedRows& rows = *version.rows;
  std::vector<int64_t> ids;
  for (const auto& [id, row] : version.oracle) ids.push_back(id);
  CHECK(rows.rows() == static_cast<int64_t>(ids.size()));
  const auto entries = rows.entries();
  CHECK(entries.size() == ids.size());
  for (size_t i = 0; i < ids.size(); ++i) CHECK(entries[i].id == ids[i]);
  for (int i = 0; i < 50; ++i) ids.push_back(random_id(random));
  std::vector<float> out(ids.size() * 6);
  rows.lookup(ids.data(), static_cast<int64_t>(ids.size()), out.data());
  std::vector<char> found(ids.size());
  rows.contains(ids.data(), static_cast<int64_t>(ids.size()), reinterpret_cast<bool*>(found.data()));
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto at = version.oracle.find(ids[i]);
    CHECK((found[i] != 0) == (at != version.oracle.end()));
    const Row wanted = at == version.oracle.end() ? Row(6, -1.0f) : at->second;
    CHECK(std::memcmp(out.data() + i * 6, wanted.data(), 24) == 0);
  }
  CHECK(rows.checksum() == rows.recomputed_checksum());
}

void test_versions() {
  for (int seed = 0; seed < 8; ++seed) {
    std::mt19937_64 random(seed);
    std::deque<Version> versions{built(seed / 2 * 300, random, seed % 2 != 0)};
    for (int step = 0; step < (kIsSlow ? 25 : 60); ++step) {
      // Mostly the newest version is changed, sometimes an older one, which copies all rows.
      const bool newest = random() % 16 != 0;
      const Version& before = newest ? versions.back() : versions[random() % versions.size()];
      std::shared_ptr<ServedRows> made;
      Version after = changed(before, random, made);
      if (random() % 4 == 0) {
        check(after, random);  // it is not kept
        continue;
      }
      made->keep();
      versions.push_back(std::move(after));
      if (versions.size() > 6) versions.erase(versions.begin() + static_cast<int64_t>(random() % 6));
      check(versions[random() % versions.size()], random);
    }
    for (const Version& version : versions) check(version, random);
  }
}

void test_refused_changes() {
  std::mt19937_64 random(1);
  const Version version = built(100, random);
  const int64_t twice[] = {5, 5};
  const std::vector<float> rows(12);
  const auto* bytes = reinterpret_cast<const char*>(rows.data());
  CHECK_THROWS(version.rows->with({twice, bytes, 2, nullptr, 0}), InvalidArgument);
  CHECK_THROWS(version.rows->with({twice, bytes, 1, twice + 1, 1}), InvalidArgument);
  CHECK_THROWS(ServedRows::build({RowFormat::kFloat32, 1, 4}, twice, 2, {const_cast<char*>(bytes), false, nullptr}),
               InvalidArgument);
  CHECK_THROWS((RowLayout{RowFormat::kFloat32, 6, 20}.check()), InvalidArgument);
  check(version, random);
}

void test_readers() {
  std::mt19937_64 random(2);
  Version newest = built(kIsSlow ? 500 : 2000, random);
  const Version held = newest;
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int t = 0; t < 2; ++t) {
    readers.emplace_back([&, t] {
      std::mt19937_64 own(t);
      do check(held, own);
      while (!done);
    });
  }
  for (int step = 0; step < (kIsSlow ? 30 : 100); ++step) {
    std::shared_ptr<ServedRows> made;
    Version after = changed(newest, random, made);
    made->keep();
    newest = std::move(after);
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  check(newest, random);
}

// A model of two tables and a weight, changed in place: a call of it reads one version of all three.
void test_calls_of_one_version() {
  const auto gate = std::make_shared<Gate>();
  const int64_t ids[] = {-5, 1, 7};
  const auto of_version = [&](const ServedRows* before, float number) -> std::shared_ptr<const ServedRows> {
    std::vector<float> rows(24, number);
    if (before != nullptr) return before->with({ids, reinterpret_cast<const char*>(rows.data() + 6), 3, nullptr, 0});
    auto region = std::make_shared<Region>();
    region->reserve(96);
    std::memcpy(region->data(), rows.data(), 96);
    return ServedRows::build(kLayout, ids, 3, {region->data(), true, region});
  };
  std::shared_ptr<const ServedRows> first = of_version(nullptr, 0), second = of_version(nullptr, 0);
  float weight = 0;
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      do {
        const auto call = gate->hold();
        float out[2][18];
        first->lookup(ids, 3, out[0]);
        const auto nested = gate->hold();
        second->lookup(ids, 3, out[1]);
        for (const auto& rows : out) CHECK(std::all_of(rows, rows + 18, [&](float value) { return value == weight; }));
      } while (!done);
    });
  }
  std::atomic<int> changes{0};
  std::vector<std::thread> writers;
  for (int t = 0; t < 2; ++t) {
    writers.emplace_back([&] {
      for (int step = 0; step < 150; ++step) {
        Gate::Change change(gate);
        const auto number = static_cast<float>(++changes);
        const auto next_first = of_version(first.get(), number), next_second = of_version(second.get(), number);
        change.commit();
        first = next_first;
        weight = number;
        second = next_second;
      }
    });
  }
  for (std::thread& thread : writers) thread.join();
  done = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(weight == 300.0f);
  // A hold may end in another thread than its own, and a thread that has a hold cannot change the model.
  auto hold = gate->hold();
  CHECK(gate->hold() == hold);
  {
    Gate::Change change(gate);
    CHECK_THROWS(change.commit(), InvalidArgument);
  }
  std::thread([&] { hold.reset(); }).join();
  Gate::Change(gate).commit();
  gate->hold();
}

}  // namespace

int main() {
  test_versions();
  test_refused_changes();
  test_readers();
  test_calls_of_one_version();
  std::puts("test_serving passed");
}
