#include "cold/ssd_end.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/mix.h"

namespace recstore {
namespace {

constexpr uint64_t kMagic = 0x3144'4e45'4453'5300;  // "\0SSDEND1"
constexpr int64_t kFirstWord = 4096;                // the record and the words are in different pages
constexpr int kCheckBits = 24;
constexpr uint64_t kMostSequence = (uint64_t{1} << (64 - kCheckBits)) - 1;

struct Record {
  uint64_t magic;
  uint64_t sequence;
  uint64_t row_bytes;
  uint32_t used;
  uint32_t segments;
  uint64_t check;
};

uint64_t check_of(const Record& record) {
  const uint64_t counts = uint64_t{record.used} << 32 | record.segments;
  return mix(record.magic ^ mix(record.sequence ^ mix(record.row_bytes ^ mix(counts))));
}

// The lower bits check that the word is the one of this segment. A word of zeros, from a page that was lost, is none.
uint64_t word_of(uint32_t segment, uint64_t sequence) {
  const uint64_t check = mix(sequence ^ mix(uint64_t{segment} + 1)) >> (64 - kCheckBits);
  return sequence << kCheckBits | check;
}

int64_t place_of(uint32_t segment) { return kFirstWord + int64_t{segment} * static_cast<int64_t>(sizeof(uint64_t)); }

void write_all(int file, const std::string& path, const void* data, size_t n, int64_t at) {
  const char* next = static_cast<const char*>(data);
  while (n > 0) {
    const ssize_t written = ::pwrite(file, next, n, at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      throw StorageError(path + " cannot be written: " + std::strerror(written < 0 ? errno : ENOSPC));
    }
    next += written;
    n -= static_cast<size_t>(written);
    at += written;
  }
}

// Returns whether the file has so many bytes at this place.
bool read_all(int file, const std::string& path, void* data, size_t n, int64_t at) {
  char* next = static_cast<char*>(data);
  while (n > 0) {
    const ssize_t got = ::pread(file, next, n, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw StorageError(path + " cannot be read: " + std::strerror(errno));
    if (got == 0) return false;
    next += got;
    n -= static_cast<size_t>(got);
    at += got;
  }
  return true;
}

}  // namespace

std::string open_error(int code) {
  return code == ELOOP ? "it is a link, which a store never makes: delete it" : std::strerror(code);
}

SsdEnd::SsdEnd(std::string rows) : rows_(std::move(rows)), path_(rows_ + ".end") {}

SsdEnd::~SsdEnd() { close(); }

void SsdEnd::open() {
  close();
  file_ = ::open(path_.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (file_ < 0 && errno != ENOENT) throw StorageError(path_ + " cannot be opened: " + open_error(errno));
}

void SsdEnd::close() {
  if (file_ >= 0) ::close(std::exchange(file_, -1));
}

std::optional<SsdEnd::State> SsdEnd::read() {
  open();
  if (file_ < 0) return std::nullopt;
  Record record{};
  if (!read_all(file_, path_, &record, sizeof record, 0) || record.magic != kMagic ||
      record.check != check_of(record)) {
    throw StorageError(rows_ + " is damaged: " + path_ + " does not say which of its rows count");
  }
  State state;
  state.sequence = record.sequence;
  state.used = record.used;
  state.row_bytes = row_bytes_ = record.row_bytes;
  state.segments.resize(record.segments);
  if (!read_all(file_, path_, state.segments.data(), record.segments * sizeof(uint64_t), kFirstWord)) {
    throw StorageError(rows_ + " is damaged: " + path_ + " is shorter than it was");
  }
  for (uint32_t s = 0; s < record.segments; ++s) {
    const uint64_t sequence = state.segments[s] >> kCheckBits;
    if (state.segments[s] != word_of(s, sequence)) {
      throw StorageError(rows_ + " is damaged: " + path_ + " does not say which of its rows count");
    }
    state.segments[s] = sequence <= record.sequence ? sequence : 0;
    if (sequence > record.sequence) state.uncounted.push_back(s);
  }
  return state;
}

void SsdEnd::replace(const State& state) {
  const std::string beside = path_ + ".new";
  ::unlink(beside.c_str());  // of a process that was killed
  const int file = ::open(beside.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) throw StorageError(beside + " cannot be created: " + open_error(errno));
  try {
    Record record{kMagic, state.sequence, state.row_bytes, state.used, static_cast<uint32_t>(state.segments.size()), 0};
    record.check = check_of(record);
    write_all(file, beside, &record, sizeof record, 0);
    std::vector<uint64_t> words;
    words.reserve(state.segments.size());
    for (uint32_t s = 0; s < state.segments.size(); ++s) words.push_back(word_of(s, state.segments[s]));
    write_all(file, beside, words.data(), words.size() * sizeof(uint64_t), kFirstWord);
    if (std::rename(beside.c_str(), path_.c_str()) != 0) {
      throw StorageError(path_ + " cannot be replaced: " + std::strerror(errno));
    }
  } catch (...) {
    ::close(file);
    ::unlink(beside.c_str());
    throw;
  }
  close();
  file_ = file;
  row_bytes_ = state.row_bytes;
}

void SsdEnd::set_segment(uint32_t segment, uint64_t sequence) {
  if (sequence > kMostSequence) throw StorageError(rows_ + " has been written too often: 2**40 segments");
  const uint64_t word = word_of(segment, sequence);
  write_all(file_, path_, &word, sizeof word, place_of(segment));
}

void SsdEnd::acknowledge(uint64_t sequence, uint32_t used, uint32_t segments) {
  Record record{kMagic, sequence, row_bytes_, used, segments, 0};
  record.check = check_of(record);
  write_all(file_, path_, &record, sizeof record, 0);
}

}  // namespace recstore
