#pragma once

// The functions on rows that other native libraries call, without Python and without torch. The op row_api returns the
// address of the table below. It is plain C, so that a library fits each core with the same kRowApiVersion, whatever
// compiler has made either of them.

#include <cstdint>

namespace recstore {

constexpr int64_t kRowApiVersion = 1;

// What a function returns. kClosed: the table is closed or unknown. A message is in RowError.
enum RowStatus : int { kRowsDone = 0, kRowsInvalid = 1, kRowsNoMemory = 2, kRowsClosed = 3 };

struct RowError {
  char text[1024];
};

// The rows of one table in a call. Values are float32, or of the table's type with 16 bits if `narrow` says so.
struct RowsOfTable {
  int64_t table;       // the handle of the table
  int64_t group;       // the handle of a group of this table alone, with one feature
  const int64_t* ids;  // (n,)
  int64_t n;
  void* values;  // (n, columns): the memory of the rows that are read, or the gradients of an update
  bool narrow;
  bool zeros;            // reads: an id without a row reads as zeros
  double learning_rate;  // updates
};

// No function throws. Each returns a RowStatus, and writes a message to `error` unless it is kRowsDone.
struct RowApi {
  int64_t version;
  // Reads the rows of `count` tables. No row changes.
  int (*read)(const RowsOfTable* parts, int64_t count, RowError* error);
  // A step and an update of each of `count` distinct tables, also of those without ids. If one fails, no row changes.
  int (*update)(const RowsOfTable* parts, int64_t count, RowError* error);
  // Writes whether each id has a row to out, (n,).
  int (*contains)(int64_t table, const int64_t* ids, int64_t n, bool* out, RowError* error);
  // Writes weights. See write_weights.
  int (*insert)(const RowsOfTable* rows, RowError* error);
  // Removes rows, and writes their number to `removed`.
  int (*remove)(int64_t table, const int64_t* ids, int64_t n, int64_t* removed, RowError* error);
};

}  // namespace recstore
