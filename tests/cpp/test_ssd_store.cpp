// The cold store on an SSD against a plain model: random calls, scans beside them, writes and reads that fail, and
// files that are opened again, also after a write that was cut off at any byte.

#include "cold/ssd_store.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/mix.h"
#include "cold/file_lock.h"
#include "cold/ssd_end.h"
#include "testing.h"

namespace {

using recstore::SsdScan;
using recstore::SsdStore;
using recstore::StorageError;
using Row = std::vector<char>;
using Model = std::map<int64_t, Row>;

Threads executor(2);

std::string folder() {
  static const std::string made = [] {
    char name[] = "/tmp/recstore-ssd-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    return std::string(name);
  }();
  return made;
}

Model read(SsdStore& store, const std::vector<int64_t>& ids) {
  std::vector<char> rows;
  auto found = std::make_unique<bool[]>(ids.size());
  const auto bytes = static_cast<size_t>(store.row_bytes());
  store.get(
      ids.data(), static_cast<int64_t>(ids.size()), found.get(),
      [&](int64_t n) {
        rows.resize(static_cast<size_t>(n) * bytes + 1);
        return rows.data();
      },
      executor);
  Model read;
  size_t at = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (found[i]) {
      read[ids[i]] = Row(rows.begin() + static_cast<long>(at), rows.begin() + static_cast<long>(at + bytes)),
      at += bytes;
    }
  }
  return read;
}

Model scanned(SsdScan& scan, int64_t batch) {
  Model read;
  const auto bytes = static_cast<size_t>(scan.row_bytes());
  int64_t last = 0;
  for (bool first = true; scan.left() > 0; first = false) {
    const auto n = std::min(batch, scan.left());
    std::vector<int64_t> ids(static_cast<size_t>(n));
    std::vector<char> rows(static_cast<size_t>(n) * bytes);
    scan.read(n, ids.data(), rows.data(), executor);
    CHECK(first || last < ids[0]);
    CHECK(std::is_sorted(ids.begin(), ids.end()));
    last = ids.back();
    for (size_t i = 0; i < ids.size(); ++i) {
      read[ids[i]] =
          Row(rows.begin() + static_cast<long>(i * bytes), rows.begin() + static_cast<long>((i + 1) * bytes));
    }
  }
  return read;
}

void check(const std::shared_ptr<SsdStore>& store, const Model& model) {
  std::vector<int64_t> ids{1234567890123};  // has no row
  for (const auto& [id, row] : model) ids.push_back(id);
  CHECK(read(*store, ids) == model);
  auto all = store->ids();
  std::sort(all.begin(), all.end());
  CHECK(std::equal(all.begin(), all.end(), ids.begin() + 1, ids.end()));
  SsdScan scan(store);
  CHECK(scanned(scan, 700) == model);
}

class Random {
 public:
  explicit Random(uint32_t seed) : random_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  std::vector<int64_t> ids(int64_t n, int64_t range) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < n; ++i) {
      ids.push_back(static_cast<int64_t>(static_cast<uint64_t>(below(range)) * 0x9e3779b97f4a7c15));
    }
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    std::shuffle(ids.begin(), ids.end(), random_);
    return ids;
  }
  std::vector<char> rows(size_t n, int64_t bytes) {
    std::vector<char> rows(n * static_cast<size_t>(bytes));
    for (size_t i = 0; i + 8 <= rows.size(); i += 8) {
      const uint64_t word = random_();
      std::memcpy(&rows[i], &word, 8);
    }
    return rows;
  }

 private:
  std::mt19937_64 random_;
};

void put(Model& model, const std::vector<int64_t>& ids, const std::vector<char>& rows) {
  const size_t bytes = rows.size() / std::max<size_t>(1, ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    model[ids[i]] = Row(rows.begin() + static_cast<long>(i * bytes), rows.begin() + static_cast<long>((i + 1) * bytes));
  }
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

void set_content(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << content;
  CHECK(file.good());
}

int64_t disk_bytes(const std::string& path) {
  struct stat status;
  CHECK(stat(path.c_str(), &status) == 0);
  return status.st_blocks * 512;
}

// The file descriptor of the store's file.
int file_of(const std::string& path) {
  for (int file = 3; file < 1000; ++file) {
    char name[4096];
    const auto n = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), name, sizeof name);
    if (n > 0 && std::string(name, static_cast<size_t>(n)) == path) return file;
  }
  std::abort();
}

// Puts another file in the place of the store's, until it is destroyed.
class Broken {
 public:
  Broken(const std::string& path, const char* by) : file_(file_of(path)), kept_(dup(file_)) {
    const int other = open(by, O_RDWR);
    CHECK(other >= 0 && dup2(other, file_) == file_);
    close(other);
  }
  ~Broken() {
    CHECK(dup2(kept_, file_) == file_);
    close(kept_);
  }

 private:
  int file_, kept_;
};

void random_calls(int64_t row_bytes, bool keep, uint32_t seed) {
  const std::string path = folder() + "/rows";
  unlink(path.c_str());
  unlink((path + ".end").c_str());
  auto store = std::make_shared<SsdStore>(path, row_bytes, keep);
  Model model;
  Random random(seed);
  const int64_t range = 1000 * 4100 / row_bytes;  // rows of 4 MB: two segments
  struct Former {
    std::unique_ptr<SsdScan> scan;
    Model model;
  };
  std::vector<Former> scans;
  for (int round = 0; round < 30; ++round) {
    const auto what = random.below(10);
    const auto ids = random.ids(random.below(3) == 0 ? random.below(20) : random.below(range / 3), range);
    if (what < 6) {
      const auto rows = random.rows(ids.size(), row_bytes);
      store->put(ids.data(), rows.data(), static_cast<int64_t>(ids.size()));
      put(model, ids, rows);
    } else if (what < 8) {
      store->remove(ids.data(), static_cast<int64_t>(ids.size()));
      for (const int64_t id : ids) model.erase(id);
    } else if (what == 8 && scans.size() < 3) {
      scans.push_back({std::make_unique<SsdScan>(store), model});
      // It reads its first rows now, and the others when many others have been written.
      if (random.below(2) == 0 && !model.empty()) {
        std::vector<char> row(static_cast<size_t>(row_bytes));
        int64_t id = 0;
        scans.back().scan->read(1, &id, row.data(), executor);
        CHECK(id == model.begin()->first && row == model.begin()->second);
        scans.back().model.erase(id);
      }
    } else if (!scans.empty() && random.below(2) == 0) {
      CHECK(scanned(*scans[0].scan, 1 + random.below(2000)) == scans[0].model);
      scans.erase(scans.begin());
    } else if (keep && scans.empty()) {
      store.reset();
      store = std::make_shared<SsdStore>(path, row_bytes, true);
    }
    Model wanted;
    for (const int64_t id : ids) {
      if (const auto found = model.find(id); found != model.end()) wanted.insert(*found);
    }
    CHECK(read(*store, ids) == wanted);
  }
  for (auto& each : scans) CHECK(scanned(*each.scan, 500) == each.model);
  scans.clear();
  check(store, model);
  // The garbage of all that was written is bounded when no scan waits, and a file of few rows gives its space back.
  for (int round = 0; round < 20; ++round) {
    const auto ids = random.ids(1, 3);
    const auto rows = random.rows(1, row_bytes);
    store->put(ids.data(), rows.data(), 1);
    put(model, ids, rows);
  }
  CHECK(disk_bytes(path) <=
        2 * (static_cast<int64_t>(model.size()) + 1) * (row_bytes + 24) * 5 / 4 + 20 * (int64_t{2} << 20));
  while (model.size() > 10) {
    std::vector<int64_t> ids;
    for (const auto& [id, row] : model) ids.push_back(id);
    ids.resize(std::min<size_t>(ids.size() - 10, 500));
    store->remove(ids.data(), static_cast<int64_t>(ids.size()));
    for (const int64_t id : ids) model.erase(id);
  }
  for (int round = 0; round < 20; ++round) {
    const auto ids = random.ids(1, 3);
    const auto rows = random.rows(1, row_bytes);
    store->put(ids.data(), rows.data(), 1);
    put(model, ids, rows);
  }
  check(store, model);
  CHECK(disk_bytes(path) <= 14 * (int64_t{2} << 20));
}

// Writes that fail leave every row as it was, in memory and in the file.
void failing_writes() {
  const std::string path = folder() + "/failing";
  constexpr int64_t kRow = 1000;
  Random random(5);
  auto store = std::make_shared<SsdStore>(path, kRow, true);
  Model model;
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  for (int round = 0; round < 12; ++round) {
    const auto ids = random.ids(1 + random.below(4000), 6000);
    const auto rows = random.rows(ids.size(), kRow);
    const auto n = static_cast<int64_t>(ids.size());
    if (round % 3 == 0) {
      const Broken full(path, "/dev/full");
      CHECK_THROWS(store->put(ids.data(), rows.data(), n), StorageError);
    } else if (round % 3 == 1) {
      // The file may not grow above a size at which some byte of the batch lies.
      struct stat status;
      CHECK(stat(path.c_str(), &status) == 0);
      const rlimit limit{static_cast<rlim_t>(status.st_size + random.below(1 + n * kRow / 2)), before.rlim_max};
      CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
      try {
        store->put(ids.data(), rows.data(), n);
        put(model, ids, rows);  // there were free segments
      } catch (const StorageError&) {
      }
      CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    } else {
      store->put(ids.data(), rows.data(), n);
      put(model, ids, rows);
    }
    check(store, model);
    if (round % 4 == 3) {
      store.reset();
      store = std::make_shared<SsdStore>(path, kRow, true);
      check(store, model);
    }
  }
  {
    const Broken unreadable(path, "/proc/self/mem");
    CHECK_THROWS(read(*store, {model.begin()->first}), StorageError);
  }
  check(store, model);
}

// A process that is killed leaves any beginning of its last write.
void cut_off() {
  const std::string path = folder() + "/cut", copy = folder() + "/copy";
  constexpr int64_t kRow = 40;
  Random random(6);
  for (int round = 0; round < 6; ++round) {
    unlink(path.c_str());
    unlink((path + ".end").c_str());
    Model model;
    auto store = std::make_shared<SsdStore>(path, kRow, true);
    for (int batch = 0; batch < 3; ++batch) {
      const auto ids = random.ids(1 + random.below(8000), 50000);
      const auto rows = random.rows(ids.size(), kRow);
      store->put(ids.data(), rows.data(), static_cast<int64_t>(ids.size()));
      put(model, ids, rows);
    }
    const auto gone = random.ids(1000, 50000);
    store->remove(gone.data(), static_cast<int64_t>(gone.size()));
    for (const int64_t id : gone) model.erase(id);
    struct stat status;
    CHECK(stat(path.c_str(), &status) == 0);
    const auto end = status.st_size;
    const std::string acknowledged = content(path + ".end");
    const auto ids = random.ids(1 + random.below(40000), 50000);
    const auto rows = random.rows(ids.size(), kRow);
    store->put(ids.data(), rows.data(), static_cast<int64_t>(ids.size()));
    CHECK(stat(path.c_str(), &status) == 0);
    const bool whole = round % 5 == 0;  // it is killed after the last row, and before they are acknowledged
    const auto cut = whole ? status.st_size : end + random.below(status.st_size - end);
    store.reset();
    CHECK(truncate(path.c_str(), cut) == 0);
    set_content(path + ".end", acknowledged);
    store = std::make_shared<SsdStore>(path, kRow, true);
    const int64_t most = static_cast<int64_t>(ids.size());
    CHECK(whole ? store->dropped() == most : store->dropped() <= std::min(most, (cut - end) / kRow + 1));
    check(store, model);
    store.reset();
    store = std::make_shared<SsdStore>(path, kRow, true);
    CHECK(store->dropped() == 0);
    check(store, model);
    // It goes on, also with a batch that ends before the rest of the one that was cut off.
    for (int batch = 0; batch < 2; ++batch) {
      const auto more = random.ids(1 + random.below(100), 50000);
      const auto their = random.rows(more.size(), kRow);
      store->put(more.data(), their.data(), static_cast<int64_t>(more.size()));
      put(model, more, their);
      store.reset();
      store = std::make_shared<SsdStore>(path, kRow, true);
      check(store, model);
    }
  }
}

void damage() {
  const std::string path = folder() + "/damaged";
  constexpr int64_t kRow = 100;
  Random random(7);
  const auto ids = random.ids(40000, 1 << 30);  // three segments
  const auto rows = random.rows(ids.size(), kRow);
  {
    SsdStore store(path, kRow, true);
    store.put(ids.data(), rows.data(), static_cast<int64_t>(ids.size()));
    const int file = open(path.c_str(), O_RDWR);
    char byte;
    CHECK(pread(file, &byte, 1, 500000) == 1);
    byte ^= 4;
    CHECK(pwrite(file, &byte, 1, 500000) == 1);
    CHECK_THROWS(read(store, ids), StorageError);
    close(file);
  }
  CHECK_THROWS(SsdStore(path, kRow, true), StorageError);
  CHECK_THROWS(SsdStore(path, kRow + 1, true), StorageError);
  CHECK_THROWS(SsdStore(folder() + "/nowhere/rows", kRow, true), StorageError);
}

// Any damage of what counts is an error when the file is opened, or all rows are there: never a missing or an old row.
void damage_anywhere() {
  const std::string path = folder() + "/anywhere";
  constexpr int64_t kRow = 1000;
  Random random(8);
  Model model;
  {
    SsdStore store(path, kRow, true);
    for (int round = 0; round < 30; ++round) {  // until segments have been moved, and are free
      const auto ids = random.ids(1500, 3000);
      const auto rows = random.rows(ids.size(), kRow);
      store.put(ids.data(), rows.data(), static_cast<int64_t>(ids.size()));
      put(model, ids, rows);
      const auto gone = random.ids(100, 3000);
      store.remove(gone.data(), static_cast<int64_t>(gone.size()));
      for (const int64_t id : gone) model.erase(id);
    }
  }
  const std::string rows = content(path), end = content(path + ".end");
  constexpr int kDamages = kIsSlow ? 24 : 48;
  int refused = 0;
  for (int round = 0; round < kDamages; ++round) {
    std::string damaged_rows = rows, damaged_end = end;
    std::string& damaged = round % 3 == 0 ? damaged_end : damaged_rows;
    const auto at = static_cast<size_t>(random.below(static_cast<int64_t>(damaged.size())));
    const auto what = random.below(4);
    if (what == 0) {
      damaged.resize(at);
    } else if (what == 1) {
      std::fill_n(damaged.begin() + static_cast<long>(at / 4096 * 4096),
                  std::min<size_t>(4096, damaged.size() - at / 4096 * 4096), 0);
    } else {
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << random.below(8)));
    }
    set_content(path, damaged_rows);
    set_content(path + ".end", damaged_end);
    try {
      const auto store = std::make_shared<SsdStore>(path, kRow, true);
      CHECK(store->dropped() == 0);
      check(store, model);
    } catch (const StorageError& error) {
      CHECK(std::string(error.what()).find("is damaged") != std::string::npos);
      ++refused;
    }
  }
  CHECK(refused > kDamages / 2 && refused < kDamages);
  set_content(path, rows);
  unlink((path + ".end").c_str());
  CHECK_THROWS(SsdStore(path, kRow, true), StorageError);
  unlink(path.c_str());
  set_content(path + ".end", end);
  CHECK_THROWS(SsdStore(path, kRow, true), StorageError);
}

// The header of a segment of an unacknowledged call is lost, and the call has written the segment's word, or has not.
// The segment is free, and its word must say so: later calls use the same sequences, and count the words of all
// segments.
void lost_header() {
  for (const char* name : {"/no-word", "/new-segment", "/free-segment"}) {
    const std::string path = folder() + name;
    const bool has_word = path.find("word") == std::string::npos;
    constexpr int64_t kRow = 100;
    Random random(11);
    Model model;
    const auto write = [&](int64_t n) {
      SsdStore store(path, kRow, true);
      const auto ids = random.ids(n, 1 << 30);
      const auto rows = random.rows(ids.size(), kRow);
      store.put(ids.data(), rows.data(), static_cast<int64_t>(ids.size()));
      put(model, ids, rows);
    };
    write(10);
    if (has_word) {
      recstore::SsdEnd end(path);
      const recstore::SsdEnd::State state = *end.read();
      CHECK(state.sequence == 1 && state.segments.size() == 1);
      end.set_segment(1, 2);
      if (path.find("free") != std::string::npos) {  // the segment was in use once
        end.set_segment(2, 0);
        end.set_segment(3, 0);
        end.acknowledge(1, state.used, 4);
      }
    }
    std::string rows = content(path);
    rows.resize(size_t{4} << 21);  // segments 1 to 3 are zeros
    set_content(path, rows);
    write(20000);  // takes segment 3, which gets sequence 2
    const auto store = std::make_shared<SsdStore>(path, kRow, true);
    CHECK(store->dropped() == 0);
    check(store, model);
  }
}

// A file of a version that did not write which rows count is opened as then, and has this from then on.
void former_version() {
  const std::string path = folder() + "/former";
  constexpr int64_t kRow = 100;
  Random random(9);
  Model model;
  const auto ids = random.ids(40000, 1 << 30);  // three segments
  const auto rows = random.rows(ids.size(), kRow);
  {
    SsdStore store(path, kRow, true);
    store.put(ids.data(), rows.data(), static_cast<int64_t>(ids.size()));
    put(model, ids, rows);
  }
  std::string former = content(path);
  for (size_t at = 0; at < former.size(); at += size_t{2} << 20) {
    uint64_t header[4];
    std::memcpy(header, &former[at], sizeof header);
    header[0] = 0x3152'4f54'5344'5353;
    header[3] = recstore::mix(header[0] ^ recstore::mix(header[1] ^ recstore::mix(header[2])));
    std::memcpy(&former[at], header, sizeof header);
  }
  set_content(path, former);
  unlink((path + ".end").c_str());
  for (int open = 0; open < 2; ++open) {
    const auto store = std::make_shared<SsdStore>(path, kRow, true);
    check(store, model);
    const auto more = random.ids(10, 1 << 30);
    const auto their = random.rows(more.size(), kRow);
    store->put(more.data(), their.data(), static_cast<int64_t>(more.size()));
    put(model, more, their);
  }
  unlink((path + ".end").c_str());
  CHECK_THROWS(SsdStore(path, kRow, true), StorageError);
}

// One process at a time has the lock, also when the file was opened and closed elsewhere, and no forked child has it.
void locks() {
  const std::string path = folder() + "/locked";
  constexpr int64_t kRow = 100;
  auto store = std::make_unique<SsdStore>(path, kRow, true);
  close(open(path.c_str(), O_RDWR));  // this ends a POSIX lock
  CHECK_THROWS(SsdStore(path, kRow, true), StorageError);
  recstore::FileLock::before_fork();
  const pid_t child = fork();
  if (child == 0) {
    recstore::FileLock::after_fork_in_child();
    pause();
    _exit(0);
  }
  recstore::FileLock::after_fork_in_parent();
  usleep(100000);
  store.reset();
  int tries = 0;
  while (store == nullptr) {
    try {
      store = std::make_unique<SsdStore>(path, kRow, true);
    } catch (const StorageError&) {
      CHECK(++tries < 100);
      usleep(100000);
    }
  }
  CHECK(kill(child, SIGKILL) == 0);
  waitpid(child, nullptr, 0);
}

// Puts, gets and scans at the same time.
void together() {
  const std::string path = folder() + "/together";
  constexpr int64_t kRow = 400;
  auto store = std::make_shared<SsdStore>(path, kRow, false);
  constexpr int64_t kIds = 20000;
  const auto rows_of = [](int64_t begin, int64_t n, char value) {
    std::vector<char> rows(static_cast<size_t>(n * kRow), value);
    for (int64_t i = 0; i < n; ++i) std::memcpy(&rows[static_cast<size_t>(i * kRow)], &begin, 8), ++begin;
    return rows;
  };
  std::vector<int64_t> ids(kIds);
  for (int64_t i = 0; i < kIds; ++i) ids[static_cast<size_t>(i)] = i;
  store->put(ids.data(), rows_of(0, kIds, 0).data(), kIds);
  std::atomic<bool> stop{false};
  std::thread scans([&] {
    while (!stop) {
      SsdScan scan(store);
      for (const auto& [id, row] : scanned(scan, 999)) {
        int64_t is;
        std::memcpy(&is, row.data(), 8);
        CHECK(is == id && row[8] == row[kRow - 1]);
      }
    }
  });
  for (int round = 1; round < 30; ++round) {
    const int64_t begin = round * 997 % (kIds - 3000);
    store->put(ids.data() + begin, rows_of(begin, 3000, static_cast<char>(round)).data(), 3000);
    const std::vector<int64_t> some(ids.begin() + begin, ids.begin() + begin + 2000);
    for (const auto& [id, row] : read(*store, some)) CHECK(row[8] == static_cast<char>(round));
  }
  stop = true;
  scans.join();
}

}  // namespace

int main() {
  uint32_t seed = 1;
  for (const int64_t row_bytes : {4100, 200, 1017}) {
    for (const bool keep : {false, true}) random_calls(row_bytes, keep, seed++);
  }
  failing_writes();
  cut_off();
  damage();
  damage_anywhere();
  lost_header();
  former_version();
  locks();
  together();
  CHECK(system(("rm -r " + folder()).c_str()) == 0);
  std::puts("test_ssd_store passed");
}
