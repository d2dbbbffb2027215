#pragma once

#include <cstdint>
#include <vector>

#include "executor.h"
#include "forward.h"
#include "table.h"

namespace recstore {

// How the rows of a table with a cold store go there and come back. Who keeps the store calls these, and none of them
// waits for it. An image is a row as it lies in the table, its RowMeta behind. For all: the caller holds the lock.

// The distinct ids among ids (n,) that have no row here, in the order of their first occurrence.
std::vector<int64_t> absent_ids(const Table& table, const int64_t* ids, int64_t n, Executor& executor);

// Rows that must leave before `new_rows` more come: none of ids (n,), nor of a pending pass. Nothing changes.
// Throws InvalidArgument where the working set is too large.
std::vector<int64_t> leaving_ids(const Table& table, const int64_t* ids, int64_t n, int64_t new_rows, Executor& executor);

// Copies the rows of ids (n,) to images. Throws InvalidArgument where an id has no row.
void read_images(const Table& table, const int64_t* ids, int64_t n, char* images, Executor& executor);

// The rows of ids (n,), distinct, leave for the cold store, where their images are and of which the filter knows; those
// stay that are no longer as in their image, or that a pending pass refers to. left: (n,), which have left.
void evict(Table& table, const int64_t* ids, int64_t n, const char* images, bool* left);

// Rows from the cold store, of ids (n,), distinct and without a row here. looked_up: by a step, which counts them.
// Throws InvalidArgument where there is no room for them, or one is here, OutOfMemory.
void bring_back(Table& table, const int64_t* ids, int64_t n, const char* images, bool looked_up, Executor& executor);

}  // namespace recstore
