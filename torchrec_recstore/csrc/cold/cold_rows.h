#pragma once

#include <cstdint>
#include <vector>

#include "base/executor.h"
#include "rows/table.h"

namespace recstore {

// Moves rows between a table and its cold store. The owner of the cold store calls these functions; the functions
// themselves never wait for the store. An image is a row as it is stored in the table; see Table::image_bytes().
// For all functions: ids are (n,), and the caller holds the lock of the table, shared if the table is const.

// Returns the distinct ids that have no row in the table, in the order of their first occurrence.
std::vector<int64_t> absent_ids(const Table& table, const int64_t* ids, int64_t n, Executor& executor);

// Returns the ids whose rows must be evicted before `new_rows` more rows are made. These are none of `ids`, and no
// pending pass refers to their rows. No row changes.
// Throws InvalidArgument if the table has no max_rows or the working set is larger than max_rows.
std::vector<int64_t> leaving_ids(Table& table, const int64_t* ids, int64_t n, int64_t new_rows, Executor& executor);

// Copies the rows of the ids to images. Throws InvalidArgument if an id has no row.
void read_images(const Table& table, const int64_t* ids, int64_t n, char* images, Executor& executor);

// Removes rows that are in the cold store and whose ids are in the cold filter. A row stays if it is no longer equal to
// its image, or if a pending pass refers to it. left: (n,), receives whether each row was removed.
// Throws InvalidArgument if the ids are not distinct.
void evict(Table& table, const int64_t* ids, int64_t n, const char* images, bool* left);

// Makes the rows of images that were read from the cold store. looked_up: a step looks these rows up, and counts them.
// Throws InvalidArgument if the ids are not distinct, an id has a row already, or the table has no room; OutOfMemory.
void bring_back(Table& table, const int64_t* ids, int64_t n, const char* images, bool looked_up, Executor& executor);

// Returns the ids of the rows that have expired and to which no pending pass refers.
std::vector<int64_t> expired_ids(const Table& table, Executor& executor);

// Notes that the rows of the ids were deleted from the cold store for good; a delta checkpoint lists these ids, and the
// table's departures have them. Throws std::bad_alloc.
void note_left(Table& table, const int64_t* ids, int64_t n);

}  // namespace recstore
