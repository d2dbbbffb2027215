#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#include "recstore.pb.h"

namespace recstore::detail {

namespace pb = torchrec_recstore;

using Seconds = std::chrono::duration<double>;

// What a server has answered: gRPC's status code and message, and the name of the error that the server has raised.
struct Outcome {
  grpc::StatusCode code = grpc::StatusCode::OK;
  std::string details, error;
};

// The ids of a call that one server gets, and their positions in the call. No positions: the order of the ids.
struct Part {
  const int64_t* ids;  // (n,)
  int64_t n;
  const int64_t* places;  // (n,) or null
};

// Takes the answer to a read, which arrives in pieces, in the order of the ids.
struct Answer {
  const Part& part;
  size_t entry_bytes;                                         // the size of what the server sends for each id
  std::function<void(const char* entry, int64_t place)> put;  // stores the entry of the id at this position of the call
  int64_t done = 0;                                           // the number of ids whose entries have arrived

  // Returns false if the piece is not of whole entries, or of too many.
  bool add(const char* piece, size_t bytes) {
    const auto n = static_cast<int64_t>(bytes / entry_bytes);
    if (bytes % entry_bytes != 0 || n > part.n - done) return false;
    for (int64_t i = 0; i < n; ++i, ++done) {
      put(piece + static_cast<size_t>(i) * entry_bytes, part.places ? part.places[done] : done);
    }
    return true;
  }
};

// Copies the rows of n ids of a part, from the id `first` on.
inline void copy_rows(const Part& part, int64_t first, int64_t n, const float* rows, int64_t row_bytes, char* to) {
  if (row_bytes == 0 || n == 0) return;
  const char* from = reinterpret_cast<const char*>(rows);
  const auto size = static_cast<size_t>(row_bytes);
  if (part.places == nullptr) {
    std::memcpy(to, from + first * row_bytes, static_cast<size_t>(n) * size);
    return;
  }
  for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * row_bytes, from + part.places[first + i] * row_bytes, size);
}

inline Outcome unfit() {
  return {grpc::StatusCode::DATA_LOSS, "the server has answered with a wrong number of rows", ""};
}

}  // namespace recstore::detail
