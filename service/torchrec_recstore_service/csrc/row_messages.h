#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "status.h"

namespace recstore_service {

// The beginning of a connection by TCP: see "Calls on rows by TCP" in recstore.proto.
constexpr char kMagic[] = "RECSTORE";
constexpr uint32_t kVersion = 3;         // ROWS_VERSION in protocol.py
constexpr uint32_t kUnnamedVersion = 2;  // of earlier releases, whose connections do not name the server

// See TableIds, PullHeader, WriteHeader and SegmentRequest in recstore.proto.
struct TableIds {
  std::string table;
  uint64_t ids = 0;
  bool zeros = false;
  std::optional<double> learning_rate;
};

enum class Want : uint64_t { kRows = 0, kFound = 1, kFoundRows = 2 };
enum class Kind : uint64_t { kNone = 0, kPush = 1, kUpdate = 2, kDelete = 3 };

// Python answers the last two.
enum class Call { kWrite, kPull, kDescribe, kAttach };

struct RowRequest {
  Call call = Call::kWrite;
  std::string table;
  std::string epoch;
  std::vector<TableIds> tables;
  Want want = Want::kRows;
  std::string client;
  uint64_t request = 0;
  uint64_t done_before = 0;
  Kind kind = Kind::kNone;
  uint64_t ids = 0;  // the number of ids that a write announces
  bool float32 = false;
  std::array<uint64_t, 4> sizes{};  // in bytes: ids, rows, initial ids, initial rows

  bool is_write() const { return call == Call::kWrite; }
  uint64_t bytes() const { return sizes[0] + sizes[1] + sizes[2] + sizes[3]; }
};

// Reads a SegmentRequest, which may be any bytes. Throws CallFailed.
RowRequest parse_request(const char* data, size_t size);

// A SegmentReply.
struct RowReply {
  Status status;
  uint64_t found = 0;
  uint64_t rows = 0;
  uint64_t deleted = 0;
  bool last = true;
  std::string server = {};  // the name of the server, in the reply to the beginning of a connection

  std::string serialized() const;
};

// Whether text is UTF-8, which protobuf's strings must be.
bool is_utf8(const char* text, size_t size);

}  // namespace recstore_service
