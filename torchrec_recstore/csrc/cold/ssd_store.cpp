#include "cold/ssd_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/memory.h"
#include "base/mix.h"
#include "base/prefetch.h"

namespace recstore {
namespace {

constexpr int kPartBits = 10;
constexpr uint32_t kFirstCapacity = 8;
// A file has at most 9 / 4 entries for each of its rows, and some segments more.
constexpr int64_t kSpaceQuarters = 9;
constexpr int64_t kSpareSegments = 4;
constexpr int64_t kSegmentBytes = 2 << 20;
constexpr int64_t kLeastEntries = 64;                // of a segment
constexpr int64_t kMostIovs = 64;                    // two for each row of one read
constexpr int64_t kReadRows = 512;                   // a thread reads at least so many rows
constexpr uint64_t kMagic = 0x3252'4f54'5344'5353;   // "SSDSTOR2"
constexpr uint64_t kMagic1 = 0x3152'4f54'5344'5353;  // "SSDSTOR1", of the versions that wrote no SsdEnd
constexpr uint32_t kKindMask = uint32_t{3} << 30;
constexpr uint32_t kRow = 0;
constexpr uint32_t kDeletion = uint32_t{1} << 30;  // of the ids of the entry
constexpr uint32_t kFormer = uint32_t{2} << 30;    // a row of a scan, which has been replaced or deleted since
constexpr int64_t kMostBatch = 1 << 28;

uint64_t multiplied(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t loaded(const char* data, int64_t n = 8) {
  uint64_t word = 0;
  std::memcpy(&word, data, static_cast<size_t>(n));
  return word;
}

uint64_t hash_of(int64_t id) { return mix(static_cast<uint64_t>(id)); }

}  // namespace

SsdIndex::SsdIndex() : parts_(size_t{1} << kPartBits) {}

uint32_t SsdIndex::home(const Part& part, uint64_t hash) {
  return static_cast<uint32_t>((hash & 0xffffffffU) * part.capacity >> 32);
}

// Returns the position of the id, or of the free entry at which its search ends.
uint32_t SsdIndex::search(const Part& part, int64_t id, uint64_t hash) {
  uint32_t i = home(part, hash);
  while (part.places[i] != kNowhere && part.ids[i] != id) i = i + 1 == part.capacity ? 0 : i + 1;
  return i;
}

void SsdIndex::grow(Part& part, uint32_t number, uint32_t used) {
  // The steps differ from part to part, so that the parts do not grow at the same time.
  uint64_t capacity = part.capacity == 0 ? kFirstCapacity : part.capacity;
  while (used > capacity * 7 / 8) capacity = capacity * 9 / 8 + 1 + (number * (capacity / 64) >> kPartBits);
  if (capacity > kNowhere) throw OutOfMemory("an index of a cold store has too many ids");
  Part larger;
  larger.ids.reset(new int64_t[capacity]);
  larger.places.reset(new uint32_t[capacity]);
  larger.capacity = static_cast<uint32_t>(capacity);
  larger.used = part.used;
  std::fill_n(larger.places.get(), capacity, kNowhere);
  for (uint32_t i = 0; i < part.capacity; ++i) {
    if (part.places[i] == kNowhere) continue;
    const uint32_t to = search(larger, part.ids[i], hash_of(part.ids[i]));
    larger.ids[to] = part.ids[i];
    larger.places[to] = part.places[i];
  }
  part = std::move(larger);
}

void SsdIndex::reserve(const int64_t* ids, int64_t n) {
  try {
    std::vector<uint32_t> more(parts_.size());
    for (int64_t i = 0; i < n; ++i) ++more[hash_of(ids[i]) >> (64 - kPartBits)];
    for (uint32_t p = 0; p < parts_.size(); ++p) {
      const uint64_t used = uint64_t{parts_[p].used} + more[p];
      if (used > uint64_t{parts_[p].capacity} * 7 / 8) grow(parts_[p], p, static_cast<uint32_t>(used));
    }
  } catch (const std::bad_alloc&) {
    throw OutOfMemory("the index of a cold store");
  }
}

RECSTORE_PREFETCHES inline void SsdIndex::prefetch(int64_t id) const {
  const uint64_t hash = hash_of(id);
  const Part& part = parts_[hash >> (64 - kPartBits)];
  if (part.capacity == 0) return;
  const uint32_t i = home(part, hash);
  __builtin_prefetch(&part.ids[i]);
  __builtin_prefetch(&part.places[i]);
}

uint32_t SsdIndex::find(int64_t id) const {
  const uint64_t hash = hash_of(id);
  const Part& part = parts_[hash >> (64 - kPartBits)];
  return part.capacity == 0 ? kNowhere : part.places[search(part, id, hash)];
}

uint32_t SsdIndex::set(int64_t id, uint32_t place) noexcept {
  const uint64_t hash = hash_of(id);
  Part& part = parts_[hash >> (64 - kPartBits)];
  const uint32_t i = search(part, id, hash);
  const uint32_t before = std::exchange(part.places[i], place);
  if (before == kNowhere) {
    part.ids[i] = id;
    ++part.used;
    ++size_;
  }
  return before;
}

uint32_t SsdIndex::remove(int64_t id) noexcept {
  const uint64_t hash = hash_of(id);
  Part& part = parts_[hash >> (64 - kPartBits)];
  if (part.capacity == 0) return kNowhere;
  uint32_t hole = search(part, id, hash);
  const uint32_t before = std::exchange(part.places[hole], kNowhere);
  if (before == kNowhere) return before;
  --part.used;
  --size_;
  // Later entries of the same run move up, if their search would end at the hole (Knuth, vol. 3, algorithm 6.4R).
  for (uint32_t i = hole;;) {
    i = i + 1 == part.capacity ? 0 : i + 1;
    if (part.places[i] == kNowhere) return before;
    const uint32_t from = home(part, hash_of(part.ids[i]));
    const bool begins_behind_hole = hole < i ? hole < from && from <= i : hole < from || from <= i;
    if (begins_behind_hole) continue;
    part.ids[hole] = part.ids[i];
    part.places[hole] = std::exchange(part.places[i], kNowhere);
    hole = i;
  }
}

struct SsdStore::SegmentHeader {
  uint64_t magic;
  uint64_t sequence;
  uint64_t row_bytes;
  uint64_t check;

  uint64_t computed_check() const { return mix(magic ^ mix(sequence ^ mix(row_bytes))); }
};

struct SsdStore::Header {
  uint32_t check;
  uint32_t left;  // the number of entries of the batch that follow, and the kind of the entry
  int64_t id;
};

// Entries that are written together: a process that opens the file finds all of them or none. If the batch is destroyed
// before done(), later entries take its place, and no batch is written before its segments are free on the disk.
class SsdStore::Batch {
 public:
  Batch(SsdStore& store, int64_t entries) : store_(store), before_(store.head_), left_(entries) {
    if (entries > kMostBatch) throw InvalidArgument("too many rows at once");
    for (; !store.undone_.empty(); store.undone_.pop_back()) store.release(store.undone_.back(), true);
    taken_.reserve(static_cast<size_t>(entries / store.per_segment_ + 2));
    reserve_more(store.free_, taken_.capacity());
    store.undone_.reserve(taken_.capacity());
    store.buffer_.resize(static_cast<size_t>(store.segment_bytes_));
  }
  ~Batch() {
    if (written_) return;
    store_.head_ = before_;
    if (store_.keep_ && before_.segment != kNowhere) {
      try {
        store_.erase_after(before_.segment, before_.used);
      } catch (const StorageError&) {
        // Later entries take their place, and a process that opens the file drops the rest.
      }
    }
    for (; !taken_.empty(); taken_.pop_back()) {
      try {
        store_.release(taken_.back(), true);
      } catch (const StorageError&) {
        store_.undone_.push_back(taken_.back());
        store_.segments_[taken_.back()].damaged = true;
      }
    }
  }

  // Returns the place of the entry. row: row_bytes().
  uint32_t add(uint32_t kind, int64_t id, const char* row) {
    Head& head = store_.head_;
    if (head.segment == kNowhere || head.used == store_.per_segment_) {
      flush();
      const uint32_t segment = store_.take_segment();
      taken_.push_back(segment);
      head = {segment, 0, ++store_.last_sequence_};
      store_.segments_[segment] = {head.sequence, 0, false};
      SegmentHeader begin{kMagic, head.sequence, static_cast<uint64_t>(store_.row_bytes_), 0};
      begin.check = begin.computed_check();
      std::memcpy(store_.buffer_.data(), &begin, sizeof begin);
      filled_ = sizeof begin;
    }
    const uint32_t place = head.segment * store_.per_segment_ + head.used++;
    char* to = store_.buffer_.data() + filled_;
    Header header{0, kind | static_cast<uint32_t>(--left_), id};
    header.check = store_.check({place, head.sequence}, header, row);
    std::memcpy(to, &header, sizeof header);
    std::memcpy(to + sizeof header, row, static_cast<size_t>(store_.row_bytes_));
    std::memset(to + sizeof header + store_.row_bytes_, 0,
                static_cast<size_t>(store_.stride_ - store_.row_bytes_) - sizeof header);
    filled_ += store_.stride_;
    return place;
  }
  void done() {
    flush();
    if (store_.keep_) {
      const Head& head = store_.head_;
      for (const uint32_t segment : taken_) store_.end_.set_segment(segment, store_.segments_[segment].sequence);
      store_.end_.acknowledge(head.sequence, head.used, static_cast<uint32_t>(store_.segments_.size()));
    }
    written_ = true;
  }

 private:
  void flush() {
    if (filled_ == 0) return;
    const Head& head = store_.head_;
    const int64_t end = store_.offset(head.segment * store_.per_segment_) + int64_t{head.used} * store_.stride_;
    store_.write(store_.buffer_.data(), filled_, end - filled_);
    filled_ = 0;
  }

  SsdStore& store_;
  const Head before_;
  int64_t left_;
  int64_t filled_ = 0;  // bytes of the buffer
  bool written_ = false;
  std::vector<uint32_t> taken_;
};

SsdStore::SsdStore(std::string path, int64_t row_bytes, bool keep)
    : path_(std::move(path)),
      row_bytes_(row_bytes),
      keep_(keep),
      stride_((static_cast<int64_t>(sizeof(Header)) + row_bytes + 7) / 8 * 8),
      segment_bytes_(std::max(kSegmentBytes, (kLeastEntries * stride_ + 4096) / 4096 * 4096)),
      per_segment_(static_cast<uint32_t>((segment_bytes_ - static_cast<int64_t>(sizeof(SegmentHeader))) / stride_)),
      end_(path_) {
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | (keep ? 0 : O_TRUNC), 0600);
  if (file_ < 0) throw StorageError(path_ + " cannot be opened: " + open_error(errno));
  try {
    lock_.emplace(
        path_,
        path_ + " is in use by another process: one process at a time can have these rows, so give each its own path");
    ::posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);  // the kernel reads no more than is asked for
    if (keep) recover();
  } catch (...) {
    ::close(file_);
    throw;
  }
}

SsdStore::~SsdStore() { ::close(file_); }

int64_t SsdStore::offset(uint32_t place) const {
  return place / per_segment_ * segment_bytes_ + static_cast<int64_t>(sizeof(SegmentHeader)) +
         place % per_segment_ * stride_;
}

// A checksum, and not a hash against attacks: the 64-bit multiplications of wyhash (Wang Yi, public domain), in two
// lanes.
uint32_t SsdStore::check(Place place, const Header& header, const char* row) const {
  uint64_t a = multiplied(place.sequence ^ 0xa0761d6478bd642fU, place.number % per_segment_ ^ 0xe7037ed1a0b428dbU);
  uint64_t b = multiplied(static_cast<uint64_t>(header.id) ^ 0x8ebc6af09c88c6e3U, header.left ^ 0x589965cc75374cc3U);
  int64_t i = 0;
  for (; i + 16 <= row_bytes_; i += 16) {
    a = multiplied(a ^ loaded(row + i), 0xe7037ed1a0b428dbU);
    b = multiplied(b ^ loaded(row + i + 8), 0x8ebc6af09c88c6e3U);
  }
  if (i + 8 <= row_bytes_) {
    a = multiplied(a ^ loaded(row + i), 0xe7037ed1a0b428dbU);
    i += 8;
  }
  if (i < row_bytes_) b = multiplied(b ^ loaded(row + i, row_bytes_ - i), 0x8ebc6af09c88c6e3U);
  return static_cast<uint32_t>(mix(a ^ mix(b)) >> 32);
}

void SsdStore::write(const char* data, int64_t n, int64_t at) {
  while (n > 0) {
    const ssize_t written = ::pwrite(file_, data, static_cast<size_t>(n), at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw StorageError(path_ + " cannot be written: " + std::strerror(written < 0 ? errno : ENOSPC));
    data += written;
    n -= written;
    at += written;
  }
}

void SsdStore::read_all(char* data, int64_t n, int64_t at) const {
  while (n > 0) {
    const ssize_t got = ::pread(file_, data, static_cast<size_t>(n), at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw StorageError(path_ + " cannot be read: " + std::strerror(errno));
    if (got == 0) throw StorageError(path_ + " is damaged: it is shorter than it was");
    data += got;
    n -= got;
    at += got;
  }
}

void SsdStore::read(const Place* places, int64_t n, char* rows, Executor& executor) const {
  const int64_t task_rows = std::max(kReadRows, (n + executor.threads() - 1) / executor.threads());
  for_each_task(executor, (n + task_rows - 1) / task_rows, [&](int64_t task) {
    const int64_t begin = task * task_rows;
    read_part(places + begin, std::min(task_rows, n - begin), rows + begin * row_bytes_);
  });
}

void SsdStore::read_part(const Place* places, int64_t n, char* rows) const {
  // The bytes between a row and the next header are read with the header, and thrown away.
  const int64_t gap = stride_ - row_bytes_;
  std::vector<char> headers(static_cast<size_t>(n * gap + 8));
  struct Run {
    int64_t begin;
    int64_t rows;
  };
  std::vector<Run> missed;
  iovec parts[kMostIovs];
  // Describes the read of rows whose entries follow one another, and returns its length.
  const auto describe = [&](const Run& run) {
    for (int64_t i = 0; i < run.rows; ++i) {
      // The first header has no gap of a row before it: its place in `headers` begins with what would be the gap.
      const int64_t begin = i == 0 ? gap - static_cast<int64_t>(sizeof(Header)) : 0;
      parts[2 * i] = {headers.data() + (run.begin + i) * gap + begin, static_cast<size_t>(gap - begin)};
      parts[2 * i + 1] = {rows + (run.begin + i) * row_bytes_, static_cast<size_t>(row_bytes_)};
    }
    return run.rows * stride_ - (gap - static_cast<int64_t>(sizeof(Header)));
  };
  for (int64_t begin = 0; begin < n;) {
    int64_t end = begin + 1;
    while (end < n && end - begin < kMostIovs / 2 && places[end].number == places[end - 1].number + 1 &&
           places[end].number % per_segment_ != 0) {
      ++end;
    }
    const Run run{begin, end - begin};
    const int64_t bytes = describe(run);
    const int64_t at = offset(places[begin].number);
    if (::preadv2(file_, parts, static_cast<int>(2 * run.rows), at, RWF_NOWAIT) != bytes) {
      ::posix_fadvise(file_, at, bytes, POSIX_FADV_WILLNEED);  // older kernels do not read ahead by RWF_NOWAIT
      missed.push_back(run);
    }
    begin = end;
  }
  for (const Run& run : missed) {
    const int64_t bytes = describe(run);
    const int64_t at = offset(places[run.begin].number);
    ssize_t got = 0;
    do {
      got = ::preadv(file_, parts, static_cast<int>(2 * run.rows), at);
    } while (got < 0 && errno == EINTR);
    if (got < 0) throw StorageError(path_ + " cannot be read: " + std::strerror(errno));
    if (got == bytes) continue;
    for (int64_t i = 0; i < 2 * run.rows; ++i) {  // a read that was cut short, for example by a signal
      const int64_t before = i == 0 ? 0 : parts[0].iov_len + (i - 1) / 2 * stride_ + (i % 2 == 0 ? row_bytes_ : 0);
      read_all(static_cast<char*>(parts[i].iov_base), static_cast<int64_t>(parts[i].iov_len), at + before);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    Header header;
    std::memcpy(&header, headers.data() + (i + 1) * gap - static_cast<int64_t>(sizeof header), sizeof header);
    if (header.check != check(places[i], header, rows + i * row_bytes_)) {
      throw_damaged(places[i].number);
    }
  }
}

void SsdStore::get(const int64_t* ids, int64_t n, bool* found, const std::function<char*(int64_t)>& receive,
                   Executor& executor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  constexpr int64_t kAhead = 16;
  std::vector<Place> places;
  places.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) index_.prefetch(ids[i + kAhead]);
    const uint32_t place = index_.find(ids[i]);
    found[i] = place != kNowhere;
    if (found[i]) places.push_back(located(place));
  }
  const auto rows = static_cast<int64_t>(places.size());
  read(places.data(), rows, receive(rows), executor);
}

void SsdStore::put(const int64_t* ids, const char* rows, int64_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (n == 0) return;
  index_.reserve(ids, n);
  std::vector<uint32_t> places(static_cast<size_t>(n));
  Batch batch(*this, n);
  for (int64_t i = 0; i < n; ++i) places[static_cast<size_t>(i)] = batch.add(kRow, ids[i], rows + i * row_bytes_);
  batch.done();
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t place = places[static_cast<size_t>(i)];
    unlive(index_.set(ids[i], place));
    ++segments_[place / per_segment_].live;
    ++live_;
  }
  clean(2 * n + per_segment_);
}

void SsdStore::remove(const int64_t* ids, int64_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (keep_) {
    std::vector<int64_t> gone;
    for (int64_t i = 0; i < n; ++i) {
      if (index_.find(ids[i]) != kNowhere) gone.push_back(ids[i]);
    }
    const int64_t entry_ids = 1 + row_bytes_ / 8;
    const int64_t entries = (static_cast<int64_t>(gone.size()) + entry_ids - 1) / entry_ids;
    if (entries == 0) return;
    std::vector<uint32_t> places;
    places.reserve(static_cast<size_t>(entries));
    std::vector<char> row(static_cast<size_t>(row_bytes_));
    Batch batch(*this, entries);
    for (size_t i = 0; i < gone.size(); i += static_cast<size_t>(entry_ids)) {
      set_deleted(&gone[i], gone.size() - i, row.data());
      places.push_back(batch.add(kDeletion, gone[i], row.data()));
    }
    batch.done();
    for (const uint32_t place : places) ++segments_[place / per_segment_].live;
    live_ += entries;
    deletions_ += entries;
  }
  for (int64_t i = 0; i < n; ++i) unlive(index_.remove(ids[i]));
  clean(2 * n + per_segment_);
}

std::vector<int64_t> SsdStore::ids() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> all;
  all.reserve(static_cast<size_t>(index_.size()));
  index_.for_each([&](int64_t id, uint32_t) { all.push_back(id); });
  return all;
}

uint32_t SsdStore::take_segment() {
  if (!free_.empty()) {
    const uint32_t segment = free_.back();
    free_.pop_back();
    return segment;
  }
  if ((segments_.size() + 1) * per_segment_ >= kNowhere) {
    throw StorageError(path_ + " is full: it has 2**32 places for rows");
  }
  segments_.emplace_back();
  return static_cast<uint32_t>(segments_.size() - 1);
}

int64_t SsdStore::used_segments() const {
  return static_cast<int64_t>(segments_.size() - free_.size() - freed_.size());
}

// Makes a segment free that no scan reads. The next process that opens a kept file must not find its entries. A file
// with many free segments gives their space back to the file system, and so does a call with give_back.
void SsdStore::release(uint32_t segment, bool give_back) {
  const int64_t at = int64_t{segment} * segment_bytes_;
  give_back = give_back || static_cast<int64_t>(free_.size()) > kSpareSegments + used_segments() / 4;
  // First: an entry that counts is never missing in the file.
  if (keep_) end_.set_segment(segment, 0);
  const bool given_back =
      give_back && ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, segment_bytes_) == 0;
  if (keep_ && !given_back) {
    const SegmentHeader none{};
    write(reinterpret_cast<const char*>(&none), sizeof none, at);
  }
  segments_[segment] = Segment{};
  free_.push_back(segment);
}

// Overwrites the entries of a segment after the first `used` ones by zeros.
void SsdStore::erase_after(uint32_t segment, uint32_t used) {
  const int64_t at = int64_t{segment} * segment_bytes_ + static_cast<int64_t>(sizeof(SegmentHeader)) + used * stride_;
  const int64_t end = (int64_t{segment} + 1) * segment_bytes_;
  if (::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, end - at) == 0) return;
  static constexpr char kZeros[4096]{};
  for (int64_t next = at; next < end; next += static_cast<int64_t>(sizeof kZeros)) {
    write(kZeros, std::min(static_cast<int64_t>(sizeof kZeros), end - next), next);
  }
}

// Moves at most about `most` entries.
void SsdStore::clean(int64_t most) {
  try {
    const auto has_too_many_segments = [&] {
      return used_segments() > kSpaceQuarters * live_ / 4 / per_segment_ + kSpareSegments;
    };
    for (int64_t moved = 0; moved < most && has_too_many_segments();) {
      const uint32_t segment = victim();
      if (segment == kNowhere) return;
      moved += move(segment) + 1;
      reserve_more(freed_, 1);
      reserve_more(free_, freed_.size() + 1);
      freed_.push_back(segment);
      while (reading_ == 0 && !freed_.empty()) {
        release(freed_.back(), false);
        freed_.pop_back();
      }
    }
  } catch (const StorageError&) {
    // The rows are where they were, and the file stays larger than it has to be. A call that needs the disk says so.
  } catch (const std::bad_alloc&) {
  }
}

// The segment to move the rows from, or kNowhere. While deletions are kept, the oldest segment is moved now and then:
// a deletion can go when no segment is older, because only such a segment may have a row of its ids.
uint32_t SsdStore::victim() {
  for (const SsdScan* scan : scans_) {
    if (!scan->sorted_) return kNowhere;  // it cannot be told yet which entries it needs
  }
  const bool oldest = deletions_ > 0 && ++moves_ % 8 == 0;
  uint32_t best = kNowhere;
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.sequence == 0 || segment.damaged || s == head_.segment) continue;
    if (std::find(freed_.begin(), freed_.end(), s) != freed_.end()) continue;
    if (best == kNowhere) {
      best = s;
      continue;
    }
    const Segment& present = segments_[best];
    const bool is_better = oldest ? segment.sequence < present.sequence : segment.live < present.live;
    if (is_better) best = s;
  }
  return best;
}

// Writes what is needed of a segment again, and returns the number of entries.
int64_t SsdStore::move(uint32_t segment) {
  struct Needed {
    uint32_t place;
    uint32_t kind;
    int64_t id;
    char* row;
  };
  std::vector<Needed> needed;
  const Segment from = segments_[segment];
  if (from.live > 0 || !scans_.empty()) {
    moving_.resize(static_cast<size_t>(segment_bytes_));
    read_all(moving_.data(), int64_t{per_segment_} * stride_ + static_cast<int64_t>(sizeof(SegmentHeader)),
             int64_t{segment} * segment_bytes_);
    bool is_oldest = true;
    for (const Segment& other : segments_) {
      is_oldest = is_oldest && (other.sequence == 0 || other.sequence >= from.sequence);
    }
    for (uint32_t e = 0; e < per_segment_; ++e) {
      Header header;
      char* data = moving_.data() + sizeof(SegmentHeader) + e * stride_;
      std::memcpy(&header, data, sizeof header);
      char* row = data + sizeof header;
      const Place place = located(segment * per_segment_ + e);
      const uint32_t kind = header.left & kKindMask;
      Needed entry{place.number, kind, header.id, row};
      if (kind == kDeletion) {
        if (is_oldest) continue;
      } else if (index_.find(header.id) == place.number) {
        entry.kind = kRow;
      } else {
        bool scanned = false;
        for (SsdScan* scan : scans_) scanned = scanned || scan->find(header.id, place.number) != nullptr;
        if (!scanned) continue;
        entry.kind = kFormer;
      }
      if (header.check != check(place, header, row)) {
        segments_[segment].damaged = true;
        throw StorageError(path_ + " is damaged");
      }
      if (kind == kDeletion && !keep_deleted(entry.id, row)) continue;
      needed.push_back(entry);
    }
  }
  std::vector<uint32_t> places;
  places.reserve(needed.size());
  Batch batch(*this, static_cast<int64_t>(needed.size()));
  for (const Needed& entry : needed) places.push_back(batch.add(entry.kind, entry.id, entry.row));
  batch.done();
  int64_t live = 0;
  for (size_t i = 0; i < needed.size(); ++i) {
    const Needed& entry = needed[i];
    if (entry.kind == kRow) index_.set(entry.id, places[i]);
    if (entry.kind != kDeletion) {
      for (SsdScan* scan : scans_) {
        if (auto* scanned = scan->find(needed[i].id, needed[i].place)) scanned->place = places[i];
      }
    }
    if (entry.kind == kFormer) continue;
    ++segments_[places[i] / per_segment_].live;
    ++live;
  }
  // What was live and is not needed any more are deletions.
  deletions_ -= from.live - live;
  live_ -= from.live - live;
  segments_[segment].live = 0;
  return static_cast<int64_t>(needed.size());
}

// The ids of a deletion: `first`, which is the id of the entry, and those in the place of its row.
std::vector<int64_t> SsdStore::deleted(int64_t first, const char* row) const {
  std::vector<int64_t> ids{first};
  for (int64_t j = 0; j < row_bytes_ / 8; ++j) ids.push_back(static_cast<int64_t>(loaded(row + 8 * j)));
  return ids;
}

// Writes the ids after the first one. A deletion that has room for more than n ids has the last one several times.
void SsdStore::set_deleted(const int64_t* ids, size_t n, char* row) const {
  for (size_t j = 0; j < static_cast<size_t>(row_bytes_ / 8); ++j) {
    std::memcpy(row + 8 * j, &ids[std::min(j + 1, n - 1)], 8);
  }
}

// Takes the ids that have a row again out of a deletion, and returns whether ids are left.
bool SsdStore::keep_deleted(int64_t& first, char* row) const {
  std::vector<int64_t> ids = deleted(first, row);
  ids.erase(std::remove_if(ids.begin(), ids.end(), [&](int64_t id) { return index_.find(id) != kNowhere; }), ids.end());
  if (ids.empty()) return false;
  first = ids[0];
  set_deleted(ids.data(), ids.size(), row);
  return true;
}

void SsdStore::recover() {
  struct stat status;
  if (::fstat(file_, &status) != 0) throw StorageError(path_ + " cannot be read: " + std::strerror(errno));
  const std::optional<SsdEnd::State> end = end_.read();
  const std::vector<uint32_t> order = end ? counted_segments(*end, status.st_size) : segments_of_before(status.st_size);
  std::vector<Replayed> pending;
  for (const uint32_t s : order) {
    load(s, status.st_size);
    const bool is_newest = s == order.back();
    const uint32_t used = end && is_newest ? end->used : per_segment_;
    replay(s, used, !end && is_newest, pending);
    if (end && is_newest) {
      if (!pending.empty() || head_.used != used) throw_damaged(s * per_segment_ + used - 1);
      const int64_t uncounted = valid_entries(s, used);
      dropped_ += uncounted;
      if (uncounted > 0) erase_after(s, used);
    }
  }
  for (const uint32_t s : order) {
    if (segments_[s].sequence > head_.sequence) release(s, false);
  }
  index_.for_each([&](int64_t, uint32_t place) { ++segments_[place / per_segment_].live; });
  live_ = index_.size() + deletions_;
  if (end && (end->row_bytes == static_cast<uint64_t>(row_bytes_) || !order.empty())) return;
  // A new file, or one of a version that wrote no SsdEnd.
  SsdEnd::State state;
  state.sequence = head_.sequence;
  state.used = head_.used;
  state.row_bytes = static_cast<uint64_t>(row_bytes_);
  for (const Segment& segment : segments_) state.segments.push_back(segment.sequence);
  end_.replace(state);
  for (uint32_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s].sequence == 0) continue;
    SegmentHeader header{kMagic, segments_[s].sequence, static_cast<uint64_t>(row_bytes_), 0};
    header.check = header.computed_check();
    write(reinterpret_cast<const char*>(&header), sizeof header, int64_t{s} * segment_bytes_);
  }
}

// Returns the header of a segment. None: the segment has none, or lies beyond the end of the file.
std::optional<SsdStore::SegmentHeader> SsdStore::header_of(uint32_t segment, int64_t file_bytes) const {
  SegmentHeader header{};
  const int64_t at = int64_t{segment} * segment_bytes_;
  if (at >= file_bytes) return std::nullopt;
  read_all(reinterpret_cast<char*>(&header), std::min<int64_t>(sizeof header, file_bytes - at), at);
  if ((header.magic != kMagic && header.magic != kMagic1) || header.check != header.computed_check()) {
    return std::nullopt;
  }
  if (header.row_bytes != static_cast<uint64_t>(row_bytes_)) throw_other_rows(header.row_bytes);
  return header;
}

void SsdStore::throw_other_rows(uint64_t row_bytes) const {
  throw StorageError(path_ + " has rows of " + std::to_string(row_bytes) + " bytes, and the table has rows of " +
                     std::to_string(row_bytes_) +
                     " bytes: use the columns, dtype and optimizer of then, or another name");
}

// Finds the segments whose entries count, and returns them, the oldest one first. All others are free.
std::vector<uint32_t> SsdStore::counted_segments(const SsdEnd::State& end, int64_t file_bytes) {
  const bool has_rows =
      std::any_of(end.segments.begin(), end.segments.end(), [](uint64_t sequence) { return sequence != 0; });
  if (has_rows && end.row_bytes != static_cast<uint64_t>(row_bytes_)) throw_other_rows(end.row_bytes);
  std::vector<uint32_t> order;
  std::vector<uint32_t> uncounted;
  std::vector<uint32_t> stale;  // free segments without a header, whose words do not say that they are free
  const auto in_file = static_cast<uint32_t>((file_bytes + segment_bytes_ - 1) / segment_bytes_);
  const auto count = std::max(in_file, static_cast<uint32_t>(end.segments.size()));
  last_sequence_ = end.sequence;
  for (uint32_t s = 0; s < count; ++s) {
    const std::optional<SegmentHeader> header = header_of(s, file_bytes);
    const uint64_t sequence = s < end.segments.size() ? end.segments[s] : 0;
    segments_.push_back({sequence, 0, false});
    if (sequence != 0) {
      if (!header || header->sequence != sequence) {
        throw StorageError(path_ + " is damaged: no segment begins at byte " + std::to_string(s * segment_bytes_));
      }
      order.push_back(s);
      continue;
    }
    if (header && header->sequence > end.sequence) {  // a call that was not acknowledged has begun it
      segments_[s].sequence = header->sequence;
      load(s, file_bytes);
      dropped_ += valid_entries(s, 0);
      segments_[s].sequence = 0;
      last_sequence_ = std::max(last_sequence_, header->sequence);
      uncounted.push_back(s);
      continue;
    }
    const bool has_no_word = s >= end.segments.size();
    if (has_no_word || std::binary_search(end.uncounted.begin(), end.uncounted.end(), s)) stale.push_back(s);
    free_.push_back(s);
  }
  // Later calls use the sequences of a call that was not acknowledged again, and count the words of all segments.
  for (const uint32_t s : stale) end_.set_segment(s, 0);
  for (const uint32_t s : uncounted) release(s, true);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return segments_[a].sequence < segments_[b].sequence; });
  const bool has_newest = order.empty() ? end.sequence == 0 : segments_[order.back()].sequence == end.sequence;
  if (!has_newest || end.used > per_segment_) {
    throw StorageError(path_ + " is damaged: its newest segment is not there");
  }
  return order;
}

// The same for a file of a version that wrote no SsdEnd.
std::vector<uint32_t> SsdStore::segments_of_before(int64_t file_bytes) {
  std::vector<uint32_t> order;
  for (uint32_t s = 0; s * segment_bytes_ < file_bytes; ++s) {
    const int64_t at = s * segment_bytes_;
    const std::optional<SegmentHeader> header = header_of(s, file_bytes);
    segments_.emplace_back();
    if (header && header->magic == kMagic) {
      throw StorageError(path_ + " is damaged: " + path_ + ".end, which says which of its rows count, is missing");
    }
    if (header) {
      segments_.back().sequence = header->sequence;
      last_sequence_ = std::max(last_sequence_, header->sequence);
      order.push_back(s);
      continue;
    }
    uint64_t magic = 0;
    read_all(reinterpret_cast<char*>(&magic), std::min<int64_t>(sizeof magic, file_bytes - at), at);
    if (magic != 0) throw StorageError(path_ + " is damaged: no segment begins at byte " + std::to_string(at));
    free_.push_back(s);
  }
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return segments_[a].sequence < segments_[b].sequence; });
  return order;
}

// Reads a segment into `moving_`. What is beyond the end of the file reads as zeros.
void SsdStore::load(uint32_t segment, int64_t file_bytes) {
  const int64_t at = int64_t{segment} * segment_bytes_;
  const int64_t n = std::min(segment_bytes_, file_bytes - at);
  moving_.resize(static_cast<size_t>(segment_bytes_));
  read_all(moving_.data(), n, at);
  std::fill(moving_.begin() + n, moving_.end(), 0);
}

// The number of entries in `moving_` from `begin` on that were written whole.
int64_t SsdStore::valid_entries(uint32_t segment, uint32_t begin) const {
  for (uint32_t e = begin; e < per_segment_; ++e) {
    const char* row = moving_.data() + sizeof(SegmentHeader) + e * stride_ + sizeof(Header);
    Header header;
    std::memcpy(&header, row - sizeof header, sizeof header);
    if (header.check != check(located(segment * per_segment_ + e), header, row)) return e - begin;
  }
  return per_segment_ - begin;
}

void SsdStore::throw_damaged(uint32_t place) const {
  throw StorageError(path_ + " is damaged: the checksum of a row is wrong, at byte " + std::to_string(offset(place)));
}

// Takes the first `used` entries of the segment in `moving_`. may_end: whether it may have fewer, as the newest segment
// of a version that wrote no SsdEnd. pending: the entries since the last one that ends a batch. They are rows if such
// an entry follows, though it may end a later batch: the segments in which their own one ends may be free by now.
void SsdStore::replay(uint32_t segment, uint32_t used, bool may_end, std::vector<Replayed>& pending) {
  for (uint32_t e = 0; e < used; ++e) {
    const Place place = located(segment * per_segment_ + e);
    const char* row = moving_.data() + sizeof(SegmentHeader) + e * stride_ + sizeof(Header);
    Header header;
    std::memcpy(&header, row - sizeof header, sizeof header);
    if (header.check != check(place, header, row)) {
      if (!may_end) throw_damaged(place.number);
      return;
    }
    const uint32_t kind = header.left & kKindMask;
    if (kind == kDeletion) {
      for (const int64_t id : deleted(header.id, row)) pending.push_back({id, place.number, kind});
    } else {
      pending.push_back({header.id, place.number, kind});
    }
    if ((header.left & ~kKindMask) != 0) continue;
    std::vector<int64_t> ids;
    for (const Replayed& entry : pending) ids.push_back(entry.id);
    index_.reserve(ids.data(), static_cast<int64_t>(ids.size()));
    uint32_t last_deletion = kNowhere;
    for (const Replayed& entry : pending) {
      if (entry.kind == kRow) index_.set(entry.id, entry.place);
      if (entry.kind != kDeletion) continue;
      index_.remove(entry.id);
      if (entry.place == std::exchange(last_deletion, entry.place)) continue;
      ++segments_[entry.place / per_segment_].live;
      ++deletions_;
    }
    pending.clear();
    head_ = {segment, e + 1, place.sequence};
  }
}

SsdScan::SsdScan(std::shared_ptr<SsdStore> store) : store_(std::move(store)) {
  const std::lock_guard<std::mutex> lock(store_->mutex_);
  entries_.reserve(static_cast<size_t>(store_->index_.size()));
  reserve_more(store_->scans_, 1);
  store_->index_.for_each([&](int64_t id, uint32_t place) { entries_.push_back({id, place}); });
  store_->scans_.push_back(this);
}

SsdScan::~SsdScan() {
  const std::lock_guard<std::mutex> lock(store_->mutex_);
  auto& scans = store_->scans_;
  scans.erase(std::find(scans.begin(), scans.end(), this));
}

SsdScan::Entry* SsdScan::find(int64_t id, uint32_t place) {
  const auto entry = std::lower_bound(entries_.begin() + next_, entries_.end(), id,
                                      [](const Entry& a, int64_t b) { return a.id < b; });
  if (entry == entries_.end() || entry->id != id || entry->place != place) return nullptr;
  return &*entry;
}

void SsdScan::read(int64_t n, int64_t* ids, char* rows, Executor& executor) {
  if (!sorted_) {  // without the lock: until it is sorted, no place changes
    std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
  }
  std::vector<SsdStore::Place> places;
  places.reserve(static_cast<size_t>(n));
  {
    const std::lock_guard<std::mutex> lock(store_->mutex_);
    sorted_ = true;
    for (int64_t i = 0; i < n; ++i) {
      const Entry& entry = entries_[static_cast<size_t>(next_ + i)];
      ids[i] = entry.id;
      places.push_back(store_->located(entry.place));
    }
    ++store_->reading_;
  }
  const auto ended = [&](int64_t read) {
    const std::lock_guard<std::mutex> lock(store_->mutex_);
    --store_->reading_;
    next_ += read;
  };
  try {
    store_->read(places.data(), n, rows, executor);
  } catch (...) {
    ended(0);
    throw;
  }
  ended(n);
}

}  // namespace recstore
