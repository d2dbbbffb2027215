#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "id_index.h"
#include "row_format.h"

namespace recstore {

// How the rows of a table are stored. An int8 or int4 row begins with its scale and its bias, each in float16.
struct RowLayout {
  RowFormat format;
  int64_t dim;
  int64_t row_bytes;           // of a row that is given or returned, with FBGEMM's padding
  int64_t stride = row_bytes;  // of a row in memory, which need not have the padding

  // The layout without padding, for rows that are given and returned with row_bytes bytes.
  static RowLayout compact(RowFormat format, int64_t dim, int64_t row_bytes);
  // Throws InvalidArgument if rows of this size cannot have `dim` columns of the format.
  void check() const;
};

// Memory that a table reads its rows from.
struct RowMemory {
  char* data = nullptr;         // (slots, stride)
  bool writable = false;        // whether the table may write into it when no version reads it any more
  std::shared_ptr<void> owner;  // keeps the memory
};

// Rows and their index that never change: those of a mapped file. A table over them has its changes in memory.
struct BaseRows {
  RowLayout layout;
  std::unique_ptr<IdIndex> index;
  const char* rows;  // (slots, stride), at first the row for ids without a row
  int64_t slots;
  uint64_t checksum;
  std::function<void()> check;  // throws if the memory is not to be read any more; it keeps the memory

  // Writes the row of each of ids (n,), n at most 1024, to found; `otherwise` for an id without a row.
  void find(const int64_t* ids, int64_t n, const char* otherwise, const char** found) const;
};

// The changes that lead from one version to the next.
struct RowChanges {
  const int64_t* ids;  // (count,) without duplicates
  const char* rows;    // (count, row_bytes)
  int64_t count;
  const int64_t* removed;  // (removed_count,); none of them is in ids
  int64_t removed_count;
};

// One version of the rows of a served table. It never changes, so that any number of threads may read it.
//
// A change makes a new version, which shares the index and all unchanged rows with the versions before it. Rows lie in
// chunks of about 2 KiB. A new version has an array of chunks of its own, and a copy of each chunk with a changed row.
// The copies that no version reads any more are used again. An id keeps its slot, also when its row is removed: the
// slot then has a copy of the row for ids without a row, which slot 0 has. The index gets entries and never loses any.
// A version ignores entries with slots that it does not have.
//
// Versions form a line: the first change of a version extends it, and a second change of the same version first copies
// all of its rows. They are copied, too, if the index is full or if many slots have removed rows.
//
// A table over base rows has only changed, added and removed ids in its own index. An id is searched in both, and its
// own entry hides that of the base. So a copy has only what has changed.
class ServedRows : public std::enable_shared_from_this<ServedRows> {
 public:
  // The table of ids (count,) and their rows, which follow the row for ids without a row in `memory`: (count + 1,
  // stride). Throws InvalidArgument if an id occurs twice.
  static std::shared_ptr<ServedRows> build(const RowLayout& layout, const int64_t* ids, int64_t count,
                                           RowMemory memory);
  // The table whose index and rows have been saved.
  static std::shared_ptr<const ServedRows> load(const RowLayout& layout, std::unique_ptr<IdIndex> index,
                                                std::shared_ptr<void> index_owner, RowMemory memory, int64_t slots,
                                                uint64_t checksum);
  // The table of the base rows, without changes.
  static std::shared_ptr<const ServedRows> over(std::shared_ptr<const BaseRows> base);
  ~ServedRows();

  const RowLayout& layout() const { return layout_; }
  // Throws if the base rows are not to be read any more. Each call of a table begins with it.
  void check() const {
    if (base_ != nullptr) base_->check();
  }
  int64_t rows() const { return slots_ - 1 - removed_count_ + (base_ == nullptr ? 0 : base_->slots - 1 - hidden_); }
  int64_t bytes() const;
  // The sum of a hash of each id with its row, plus that of the row for ids without a row. It does not depend on the
  // order of the rows.
  uint64_t checksum() const { return checksum_; }
  // The same, computed from the rows.
  uint64_t recomputed_checksum() const;

  // Writes the row of each of ids (n,), as it is stored, to out (n, row_bytes).
  void copy(const int64_t* ids, int64_t n, char* out) const;
  // Writes the rows of ids (n,) to out (n, dim).
  void lookup(const int64_t* ids, int64_t n, float* out) const;
  // Writes the sums, or the means, of the rows of bags to out (bags, dim). Bag b has the ids from offsets[b] to
  // offsets[b + 1]. weights: by position, or null.
  void pool(const int64_t* ids, const int64_t* offsets, int64_t bags, const float* weights, bool mean,
            float* out) const;
  // Writes whether each of ids (n,) has a row.
  void contains(const int64_t* ids, int64_t n, bool* found) const;
  // The ids in ascending order, and their rows.
  struct Entry {
    int64_t id;
    const char* row;
    bool operator<(const Entry& other) const { return id < other.id; }
  };
  std::vector<Entry> entries() const;
  const char* row(int64_t slot) const {
    return chunks_[static_cast<size_t>(slot >> chunk_bits_)] + (slot & chunk_mask_) * layout_.stride;
  }
  int64_t slots() const { return slots_; }

  // The index, if all of its entries are rows of this version; otherwise null. hold: keeps the index from changing.
  // Null for a table over base rows.
  const IdIndex* whole_index(std::unique_lock<std::mutex>& hold) const;
  // The memory of the rows in the order of their slots, if none has changed since they were built; otherwise null.
  const RowMemory* whole_memory() const;

  // The checksum of the version that with() would make. Throws InvalidArgument if an id occurs twice in the changes.
  uint64_t checksum_with(const RowChanges& changes) const;
  // Makes the next version. Throws InvalidArgument if an id occurs twice in the changes, OutOfMemory.
  std::shared_ptr<ServedRows> with(const RowChanges& changes) const;
  // Keeps a version that with() has returned. The memory that only the version before uses is freed with that version.
  // A version that is destroyed before this call has no effect on other versions.
  void keep() noexcept;

 private:
  struct Store;
  struct Retired;

  ServedRows(const RowLayout& layout, std::shared_ptr<Store> store);
  ServedRows(const ServedRows& before, int64_t slots);

  bool is_removed(int64_t slot) const {
    return removed_count_ > 0 && slot / 64 < static_cast<int64_t>(removed_.size()) &&
           (removed_[slot / 64] >> (slot % 64) & 1) != 0;
  }
  void prefetch_row(const char* row) const;
  void find_slots(const int64_t* ids, int64_t n, Slot* slots) const;
  void locate(const int64_t* ids, int64_t n, const char** rows) const;
  void find_rows(const int64_t* ids, int64_t n, const char** rows) const;
  std::shared_ptr<const ServedRows> copied(int64_t more_rows) const;
  std::shared_ptr<ServedRows> extended(const RowChanges& changes) const;
  void add_chunks();
  char* own_row(const ServedRows& before, int64_t slot);
  template <class Visit>
  void for_each_entry(const Visit& visit) const;
  template <class Visit>
  void for_each_row(const int64_t* ids, int64_t n, const Visit& visit) const;

  RowLayout layout_;
  int chunk_bits_ = 0;
  int64_t chunk_mask_ = 0;
  std::shared_ptr<Store> store_;
  std::vector<char*> chunks_;
  int64_t slots_ = 1;
  std::vector<uint64_t> removed_;  // one bit for each slot
  int64_t removed_count_ = 0;
  std::shared_ptr<const BaseRows> base_;  // or null
  int64_t hidden_ = 0;                    // rows of the base that an own entry hides,
  int64_t hidden_removed_ = 0;            // and those of them whose ids have no row
  uint64_t checksum_ = 0;
  // The chunks that the next version does not have; the next version keeps them too, until the versions up to this one
  // end.
  std::shared_ptr<Retired> retired_;
  std::shared_ptr<Retired> before_;  // of the version before; null after keep()
  std::vector<char*> replaced_;      // until keep(): the chunks of the version before that this version has copied,
  std::vector<char*> made_;          // and the chunks that only this version has
  uint64_t number_ = 0;              // of the versions of one store
};

}  // namespace recstore
