#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace recstore {

// Returns why a file of a store cannot be opened. With O_NOFOLLOW, a link has the code ELOOP: another user can have
// left it there, and what it names would be overwritten.
std::string open_error(int code);

// What a kept SsdStore has acknowledged, in a file beside its rows, PATH.end. It tells damage apart from what a killed
// process has left at the end: the rows of a call count from the moment in which this file says so.
//
// The file begins with one record: the newest segment and how many of its entries count, the number of segments, and a
// checksum. At byte 4,096 begins one word for each segment: its sequence, or that it is free, and a check of both. A
// word of a sequence that is newer than the record's counts as free. All are written after what they describe, each by
// one call of pwrite that changes a few bytes of one page of memory, which a SIGKILL does not interrupt.
//
// All functions throw StorageError if the file cannot be read or written.
class SsdEnd {
 public:
  struct State {
    uint64_t sequence = 0;  // of the newest segment; 0 if there is none
    uint32_t used = 0;      // entries of the newest segment that count
    uint64_t row_bytes = 0;
    std::vector<uint64_t> segments;   // the sequence of each segment; 0: it is free
    std::vector<uint32_t> uncounted;  // the free segments whose word has a newer sequence, ascending
  };

  // rows: the path of the rows, which begins all messages.
  explicit SsdEnd(std::string rows);
  ~SsdEnd();
  SsdEnd(const SsdEnd&) = delete;
  SsdEnd& operator=(const SsdEnd&) = delete;

  // Returns what has been acknowledged. Nothing: there is no such file. Throws StorageError if the file is damaged.
  std::optional<State> read();
  // Creates or replaces the file, at once.
  void replace(const State& state);
  // A segment that was taken counts from the next call of acknowledge(). One that is free (sequence 0) is free at once.
  void set_segment(uint32_t segment, uint64_t sequence);
  // The entries of all segments count, and the first `used` ones of the newest segment.
  void acknowledge(uint64_t sequence, uint32_t used, uint32_t segments);

 private:
  void open();
  void close();

  const std::string rows_;
  const std::string path_;
  uint64_t row_bytes_ = 0;
  int file_ = -1;
};

}  // namespace recstore
