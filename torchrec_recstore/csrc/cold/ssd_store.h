#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/executor.h"
#include "cold/file_lock.h"
#include "cold/ssd_end.h"

namespace recstore {

constexpr uint32_t kNowhere = ~uint32_t{0};  // no place in a file

// Where the row of each id lies in the file of an SsdStore: 12 bytes for an entry, of which 78 to 88 % are in use.
//
// Open addressing with linear probing, in parts that grow alone, each by an eighth, and not at the same time, so that
// no call waits for the growth of the whole.
class SsdIndex {
 public:
  SsdIndex();

  // Makes room for `n` more ids, so that set() cannot fail for them. Throws OutOfMemory; nothing has changed then.
  void reserve(const int64_t* ids, int64_t n);
  // Returns the place of the id, or kNowhere.
  uint32_t find(int64_t id) const;
  // Sets the place of the id, and returns the place before. There must be room.
  uint32_t set(int64_t id, uint32_t place) noexcept;
  // Forgets the id, and returns its place, or kNowhere.
  uint32_t remove(int64_t id) noexcept;
  // Loads the cache lines in which the search for the id begins.
  void prefetch(int64_t id) const;
  int64_t size() const { return size_; }
  // Calls visit(id, place) for all ids, in no particular order.
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const Part& part : parts_) {
      for (uint32_t i = 0; i < part.capacity; ++i) {
        if (part.places[i] != kNowhere) visit(part.ids[i], part.places[i]);
      }
    }
  }

 private:
  struct Part {
    std::unique_ptr<int64_t[]> ids;
    std::unique_ptr<uint32_t[]> places;  // kNowhere for a free entry
    uint32_t capacity = 0;
    uint32_t used = 0;
  };
  static uint32_t home(const Part& part, uint64_t hash);
  static uint32_t search(const Part& part, int64_t id, uint64_t hash);
  static void grow(Part& part, uint32_t number, uint32_t used);

  std::vector<Part> parts_;
  int64_t size_ = 0;
};

// The rows of a cold store on a local SSD, in one file, whose rows survive a SIGKILL of the process.
//
// The file consists of segments, and a segment of entries of one size: an id, its row and a checksum of both. Rows are
// only ever written at the end of the newest segment, in whole batches, which is what an SSD is fast at and what wears
// it least; the entry that a row had before is garbage from then on. A put makes room afterwards: as long as the
// segments in use have more than 2.25 entries for each row, the rows of the segment with the fewest are written again,
// and the segment is free. (Rosenblum and Ousterhout, The Design and Implementation of a Log-Structured File System,
// 1992. If all rows change equally often, 1.2 rows are written for each row that is put; otherwise less.)
//
// A file that is kept can be opened again. The newest entry of an id is its row. Deletions are entries too, of several
// ids each. The file beside it says which entries count (SsdEnd): if one of these cannot be read, the file is damaged,
// and what follows them was never acknowledged and is dropped. Nothing waits for the disk: a crash of the machine may
// lose what was written last.
//
// Rows are read through the page cache. A first pass reads what is there and has the kernel read the rest ahead
// (RWF_NOWAIT), a second pass waits for the rest. So all reads of a batch are in flight at the same time, as with
// io_uring, which many containers forbid.
//
// All functions throw StorageError if the file cannot be read or written, or is damaged. The functions may be called
// from several threads at the same time.
class SsdStore {
 public:
  // Creates the file, or opens the one that is there if the file is to be kept. Throws StorageError, too, if another
  // process has the file open, or if it has rows of another size.
  SsdStore(std::string path, int64_t row_bytes, bool keep);
  ~SsdStore();
  SsdStore(const SsdStore&) = delete;
  SsdStore& operator=(const SsdStore&) = delete;

  int64_t row_bytes() const { return row_bytes_; }
  // The number of entries that were dropped when the file was opened, because no call had acknowledged them.
  int64_t dropped() const { return dropped_; }
  // Finds out which ids, (n,), have a row; receive(number of these rows) returns where they are written, in the order
  // of the ids.
  void get(const int64_t* ids, int64_t n, bool* found, const std::function<char*(int64_t)>& receive,
           Executor& executor);
  // Writes the rows of distinct ids. If it throws, the rows are those of before.
  void put(const int64_t* ids, const char* rows, int64_t n);
  // Ids without a row are ignored.
  void remove(const int64_t* ids, int64_t n);
  // All ids, in no particular order.
  std::vector<int64_t> ids() const;

 private:
  friend class SsdScan;
  struct Segment {
    uint64_t sequence = 0;  // 0: free
    uint32_t live = 0;      // its entries that are rows, or deletions that a reopened file needs
    bool damaged = false;   // it has an entry that cannot be read, and stays as it is
  };
  struct Place {  // where an entry is, and the sequence of its segment, by which a read needs no lock
    uint32_t number;
    uint64_t sequence;
  };
  struct Replayed {  // an entry of a file that is opened again, or one of the ids of a deletion
    int64_t id;
    uint32_t place, kind;
  };
  struct Header;
  struct SegmentHeader;
  struct Head {  // where the next entry is written
    uint32_t segment = kNowhere;
    uint32_t used = 0;  // entries
    uint64_t sequence = 0;
  };
  class Batch;

  int64_t offset(uint32_t place) const;
  uint32_t check(Place place, const Header& header, const char* row) const;
  void write(const char* data, int64_t n, int64_t at);
  void read_all(char* data, int64_t n, int64_t at) const;
  void read(const Place* places, int64_t n, char* rows, Executor& executor) const;
  void read_part(const Place* places, int64_t n, char* rows) const;
  void recover();
  std::optional<SegmentHeader> header_of(uint32_t segment, int64_t file_bytes) const;
  std::vector<uint32_t> counted_segments(const SsdEnd::State& end, int64_t file_bytes);
  std::vector<uint32_t> segments_of_before(int64_t file_bytes);
  void load(uint32_t segment, int64_t file_bytes);
  void replay(uint32_t segment, uint32_t used, bool may_end, std::vector<Replayed>& pending);
  int64_t valid_entries(uint32_t segment, uint32_t begin) const;
  [[noreturn]] void throw_damaged(uint32_t place) const;
  [[noreturn]] void throw_other_rows(uint64_t row_bytes) const;
  uint32_t take_segment();
  void release(uint32_t segment, bool give_back);
  void erase_after(uint32_t segment, uint32_t used);
  int64_t used_segments() const;
  void clean(int64_t most);
  uint32_t victim();
  int64_t move(uint32_t segment);
  std::vector<int64_t> deleted(int64_t first, const char* row) const;
  void set_deleted(const int64_t* ids, size_t n, char* row) const;
  bool keep_deleted(int64_t& first, char* row) const;
  Place located(uint32_t place) const { return {place, segments_[place / per_segment_].sequence}; }
  void unlive(uint32_t place) {
    if (place == kNowhere) return;
    --segments_[place / per_segment_].live;
    --live_;
  }

  const std::string path_;
  const int64_t row_bytes_;
  const bool keep_;
  const int64_t stride_;
  const int64_t segment_bytes_;
  const uint32_t per_segment_;
  int file_ = -1;
  std::optional<FileLock> lock_;
  SsdEnd end_;  // of a file that is kept
  int64_t dropped_ = 0;
  mutable std::mutex mutex_;  // guards all that follows
  SsdIndex index_;
  std::vector<Segment> segments_;
  std::vector<uint32_t> free_;    // the last one is taken first
  std::vector<uint32_t> freed_;   // segments that are free when no scan is reading
  std::vector<uint32_t> undone_;  // segments of a batch that failed, which the disk did not let go
  Head head_;
  uint64_t last_sequence_ = 0;
  int64_t live_ = 0;
  int64_t deletions_ = 0;  // entries of deletions
  int64_t moves_ = 0;
  int reading_ = 0;  // the number of scans that are reading
  std::vector<char> buffer_;
  std::vector<char> moving_;  // a segment whose entries are moved, or taken from a file that is opened again
  std::vector<class SsdScan*> scans_;
};

// The rows of a store as they were when the scan was made, in ascending order of their ids. It takes 16 bytes for each
// row. One thread at a time may use it.
class SsdScan {
 public:
  explicit SsdScan(std::shared_ptr<SsdStore> store);
  ~SsdScan();

  int64_t row_bytes() const { return store_->row_bytes(); }
  int64_t left() const { return static_cast<int64_t>(entries_.size()) - next_; }
  // Reads the next rows, n <= left().
  void read(int64_t n, int64_t* ids, char* rows, Executor& executor);

 private:
  friend class SsdStore;
  struct Entry {
    int64_t id;
    uint32_t place;
  };
  // The entry that has this id and place and has yet to be read, or null.
  Entry* find(int64_t id, uint32_t place);

  const std::shared_ptr<SsdStore> store_;
  std::vector<Entry> entries_;
  int64_t next_ = 0;
  bool sorted_ = false;
};

}  // namespace recstore
