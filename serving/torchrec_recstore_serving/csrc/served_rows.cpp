#include "served_rows.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/mix.h"
#include "base/prefetch.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

constexpr int64_t kChunkBytes = 2048;
constexpr int64_t kBlockChunks = 64;  // chunks that are allocated together, at least
constexpr int64_t kFound = 1024;      // ids that are searched together
constexpr int64_t kAhead = 48;        // rows that are prefetched ahead
constexpr int64_t kLine = 64;         // bytes of a cache line
constexpr int64_t kMostLines = 8;     // cache lines of a row that are prefetched
// The index has room for this part of the rows more; after a copy, because the table grows, for one of kRoomToGrow.
// When it is full, or when one of kMostRemoved slots has a removed row, the rows are copied to a larger table.
constexpr int64_t kRoom = 24;
constexpr int64_t kRoomToGrow = 16;
constexpr int64_t kMostRemoved = 8;
constexpr int64_t kBlocks = 8;  // a new block of chunks has this part of the bytes of all blocks before it
constexpr int64_t kLeastRoom = 1024;
constexpr int64_t kMostSlots = int64_t{kNoSlot};

int64_t header_bytes(RowFormat format) { return format == RowFormat::kInt8 || format == RowFormat::kInt4 ? 4 : 0; }

int64_t least_bytes(const RowLayout& layout) {
  const int64_t bits[] = {32, 16, 8, 4};
  return (layout.dim * bits[static_cast<int64_t>(layout.format)] + 7) / 8 + header_bytes(layout.format);
}

// The hash is that of the row with its padding, which is of zeros, whether it is in memory or not.
uint64_t hash_of(int64_t id, const char* row, const RowLayout& layout) {
  uint64_t state = mix(static_cast<uint64_t>(id) ^ 0x9E3779B97F4A7C15u);
  for (int64_t at = 0; at < layout.row_bytes; at += 8) {
    uint64_t word = 0;
    if (at < layout.stride) std::memcpy(&word, row + at, static_cast<size_t>(std::min<int64_t>(8, layout.stride - at)));
    state = (state ^ word) * 0x9FB21C651E98DF25u;
    state ^= state >> 32;
  }
  return mix(state);
}

// The layout of rows that are given. A change of their padding changes the hash, too.
RowLayout given_layout(const RowLayout& layout) { return {layout.format, layout.dim, layout.row_bytes}; }

uint64_t hash_of_missing(const RowLayout& layout, const char* row) {
  return mix(hash_of(layout.dim * 4 + static_cast<int64_t>(layout.format), row, layout));
}

void check_distinct(const RowChanges& changes) {
  std::vector<int64_t> ids(changes.ids, changes.ids + changes.count);
  ids.insert(ids.end(), changes.removed, changes.removed + changes.removed_count);
  std::sort(ids.begin(), ids.end());
  if (std::adjacent_find(ids.begin(), ids.end()) != ids.end()) {
    throw InvalidArgument("the changes have an id more than once");
  }
}

// The whole huge pages of a range of memory.
struct HugePages {
  static constexpr uintptr_t kBytes = uintptr_t{2} << 20;
  uintptr_t begin;
  uintptr_t end;

  HugePages(const char* data, int64_t bytes)
      : begin((reinterpret_cast<uintptr_t>(data) + kBytes - 1) / kBytes * kBytes),
        end(std::max(begin, reinterpret_cast<uintptr_t>(data + bytes) / kBytes * kBytes)) {}
  void advise(int advice) const {
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
  }
};

// Asks the system to put memory that a file was read into on huge pages, because random reads of small pages wait for
// the translation of their addresses. The system copies the memory for it, which takes half as long as reading the
// file. So a thread of its own waits for the system, while the table answers. The system may refuse; then nothing
// changes.
void use_huge_pages(const HugePages& index, std::shared_ptr<void> index_owner, const HugePages& rows,
                    std::shared_ptr<void> rows_owner) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1, which the C library may not define
  if (index.begin == index.end && rows.begin == rows.end) return;
  index.advise(MADV_HUGEPAGE);
  rows.advise(MADV_HUGEPAGE);
  try {
    std::thread([index, rows, index_owner = std::move(index_owner), rows_owner = std::move(rows_owner)] {
      index.advise(kCollapse);
      rows.advise(kCollapse);
    }).detach();
  } catch (const std::system_error&) {  // there is no room for a thread
  }
}

uint64_t random_salt() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

void RowLayout::check() const {
  if (static_cast<int64_t>(format) < 0 || static_cast<int64_t>(format) > 3) {
    throw InvalidArgument("there is no such row format");
  }
  if (dim < 1 || dim > int64_t{1} << 24 || stride < least_bytes(*this) || stride > row_bytes ||
      row_bytes > int64_t{1} << 27) {
    throw InvalidArgument("rows of " + std::to_string(stride) + " bytes do not have " + std::to_string(dim) +
                          " columns of the format");
  }
}

RowLayout RowLayout::compact(RowFormat format, int64_t dim, int64_t row_bytes) {
  RowLayout layout{format, dim, row_bytes};
  layout.check();
  constexpr int64_t kAligned = 4;
  if (format != RowFormat::kFloat32) {
    layout.stride = std::min(row_bytes, (least_bytes(layout) + kAligned - 1) / kAligned * kAligned);
  }
  return layout;
}

void BaseRows::find(const int64_t* ids, int64_t n, const char* otherwise, const char** found) const {
  Slot slots_of[kFound];
  index->find(ids, n, slots_of);
  for (int64_t i = 0; i < n; ++i) {
    const bool has_row = slots_of[i] != 0 && slots_of[i] < slots;
    found[i] = has_row ? rows + slots_of[i] * layout.stride : otherwise;
  }
}

// The index, and the memory of the rows, of versions that share them.
struct ServedRows::Store {
  std::unique_ptr<IdIndex> index;
  std::shared_ptr<void> index_owner;
  RowMemory memory;
  int64_t memory_bytes = 0;

  std::mutex mutex;      // protects everything below, and inserts into the index
  uint64_t last = 0;     // number of the last version
  int64_t slots = 1;     // slots that the index refers to, also those of versions that were not kept
  char* free = nullptr;  // a list of chunks: each begins with the address of the next
  std::vector<Region> blocks;
  int64_t block_bytes = 0;

  char* take(int64_t bytes) {
    if (free == nullptr) {
      Region block;
      const int64_t chunks = std::max(kBlockChunks, block_bytes / bytes / kBlocks);
      block.reserve(static_cast<size_t>(chunks * bytes));
      blocks.reserve(blocks.size() + 1);
      for (int64_t c = chunks; c-- > 0;) give(block.data() + c * bytes);
      blocks.push_back(std::move(block));
      block_bytes += chunks * bytes;
    }
    char* chunk = free;
    std::memcpy(&free, chunk, sizeof(free));
    return chunk;
  }
  void give(char* chunk) noexcept {
    if (!memory.writable && chunk >= memory.data && chunk < memory.data + memory_bytes) return;
    std::memcpy(chunk, &free, sizeof(free));
    free = chunk;
  }
};

// Chunks that are free when all versions have ended that have them.
struct ServedRows::Retired {
  std::shared_ptr<Store> store;
  std::vector<char*> chunks;
  std::shared_ptr<Retired> next;  // the chunks of later versions, which this version has too

  explicit Retired(std::shared_ptr<Store> of) : store(std::move(of)) {}
  ~Retired() {
    {
      const std::lock_guard<std::mutex> lock(store->mutex);
      for (char* chunk : chunks) store->give(chunk);
    }
    // Without recursion, because the list may be long.
    for (auto after = std::move(next); after != nullptr && after.use_count() == 1;) {
      after = std::shared_ptr<Retired>(std::move(after->next));
    }
  }
};

ServedRows::ServedRows(const RowLayout& layout, std::shared_ptr<Store> store)
    : layout_(layout), store_(std::move(store)), retired_(std::make_shared<Retired>(store_)) {
  while ((layout_.stride << (chunk_bits_ + 1)) <= kChunkBytes) ++chunk_bits_;
  chunk_mask_ = (int64_t{1} << chunk_bits_) - 1;
}

ServedRows::ServedRows(const ServedRows& before, int64_t slots) : ServedRows(before.layout_, before.store_) {
  slots_ = slots;
  chunks_.reserve(static_cast<size_t>(slots >> chunk_bits_) + 1);
  chunks_ = before.chunks_;
  removed_ = before.removed_;
  removed_count_ = before.removed_count_;
  base_ = before.base_;
  hidden_ = before.hidden_;
  hidden_removed_ = before.hidden_removed_;
  checksum_ = before.checksum_;
  before_ = before.retired_;
}

ServedRows::~ServedRows() {
  if (before_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(store_->mutex);
  if (store_->last == number_) --store_->last;
  for (char* chunk : made_) store_->give(chunk);
}

void ServedRows::keep() noexcept {
  if (before_ == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(store_->mutex);
    before_->chunks = std::move(replaced_);
    before_->next = retired_;
  }
  before_.reset();
  made_ = {};
}

// Takes the chunks of the memory of the store. The last chunk is copied, because the memory may end within it.
void ServedRows::add_chunks() {
  const int64_t chunk_bytes = layout_.stride << chunk_bits_;
  const int64_t bytes = slots_ * layout_.stride;
  store_->memory_bytes = bytes;
  store_->slots = slots_;
  chunks_.reserve(static_cast<size_t>(slots_ >> chunk_bits_) + 1);
  for (int64_t at = 0; at + chunk_bytes <= bytes; at += chunk_bytes) chunks_.push_back(store_->memory.data + at);
  const int64_t bytes_of_last = bytes % chunk_bytes;
  if (bytes_of_last == 0) return;
  char* chunk = store_->take(chunk_bytes);
  std::memcpy(chunk, store_->memory.data + bytes - bytes_of_last, static_cast<size_t>(bytes_of_last));
  chunks_.push_back(chunk);
}

std::shared_ptr<ServedRows> ServedRows::build(const RowLayout& layout, const int64_t* ids, int64_t count,
                                              RowMemory memory) {
  layout.check();
  if (count + count / kRoom + kLeastRoom >= kMostSlots) throw InvalidArgument("a table holds fewer than 2**32 rows");
  auto store = std::make_shared<Store>();
  store->index = std::make_unique<IdIndex>(count + std::max(kLeastRoom, count / kRoom), random_salt());
  store->memory = std::move(memory);
  std::shared_ptr<ServedRows> version(new ServedRows(layout, store));
  version->slots_ = count + 1;
  version->add_chunks();
  version->checksum_ = hash_of_missing(layout, version->row(0));
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) store->index->prefetch(ids[i + kAhead]);
    if (!store->index->insert(ids[i], static_cast<Slot>(i + 1))) throw OutOfMemory("the index has no place for an id");
    version->checksum_ += hash_of(ids[i], version->row(i + 1), layout);
  }
  Slot slots[kFound];
  for (int64_t first = 0; first < count; first += kFound) {
    const int64_t n = std::min(kFound, count - first);
    store->index->find(ids + first, n, slots);
    for (int64_t i = 0; i < n; ++i) {
      if (slots[i] != first + i + 1) {
        throw InvalidArgument("the ids have " + std::to_string(ids[first + i]) + " more than once");
      }
    }
  }
  return version;
}

std::shared_ptr<const ServedRows> ServedRows::load(const RowLayout& layout, std::unique_ptr<IdIndex> index,
                                                   std::shared_ptr<void> index_owner, RowMemory memory, int64_t slots,
                                                   uint64_t checksum) {
  layout.check();
  if (slots < 1 || slots >= kMostSlots || index->size() + 1 != slots) {
    throw InvalidArgument("the rows of the file are damaged");
  }
  auto store = std::make_shared<Store>();
  store->index = std::move(index);
  store->index_owner = std::move(index_owner);
  store->memory = std::move(memory);
  use_huge_pages({store->index->data(), store->index->bytes()}, store->index_owner,
                 {store->memory.data, slots * layout.stride}, store->memory.owner);
  std::shared_ptr<ServedRows> version(new ServedRows(layout, store));
  version->slots_ = slots;
  version->add_chunks();
  version->checksum_ = checksum;
  return version;
}

std::shared_ptr<const ServedRows> ServedRows::over(std::shared_ptr<const BaseRows> base) {
  base->layout.check();
  if (base->slots < 1 || base->slots >= kMostSlots || base->index->size() + 1 != base->slots) {
    throw InvalidArgument("the rows of the file are damaged");
  }
  auto region = std::make_shared<Region>();
  region->reserve(static_cast<size_t>(base->layout.stride));
  std::memcpy(region->data(), base->rows, static_cast<size_t>(base->layout.stride));
  auto store = std::make_shared<Store>();
  store->index = std::make_unique<IdIndex>(kLeastRoom, random_salt());
  store->memory = {region->data(), true, region};
  std::shared_ptr<ServedRows> version(new ServedRows(base->layout, store));
  version->add_chunks();
  version->checksum_ = base->checksum;
  version->base_ = std::move(base);
  return version;
}

int64_t ServedRows::bytes() const {
  const std::lock_guard<std::mutex> lock(store_->mutex);
  const int64_t beneath = base_ == nullptr ? 0 : base_->index->bytes() + base_->slots * layout_.stride;
  return beneath + store_->index->bytes() + store_->memory_bytes + store_->block_bytes +
         static_cast<int64_t>(chunks_.size() * sizeof(char*));
}

template <class Visit>  // visit(id, row), for all rows in no particular order
void ServedRows::for_each_entry(const Visit& visit) const {
  if (base_ != nullptr) {
    int64_t ids[kFound] = {};
    int64_t count = 0;
    const char* rows[kFound];
    const auto visit_all = [&] {
      find_rows(ids, count, rows);
      for (int64_t i = 0; i < count; ++i) {
        if (rows[i] != nullptr) visit(ids[i], rows[i]);
      }
      count = 0;
    };
    base_->index->for_each([&](int64_t id, Slot) {
      ids[count++] = id;
      if (count == kFound) visit_all();
    });
    visit_all();
  }
  const std::lock_guard<std::mutex> lock(store_->mutex);
  store_->index->for_each([&](int64_t id, Slot slot) {
    if (slot >= slots_ || is_removed(slot)) return;
    const char* beneath = nullptr;
    if (base_ != nullptr) base_->find(&id, 1, nullptr, &beneath);
    if (beneath == nullptr) visit(id, row(slot));
  });
}

uint64_t ServedRows::recomputed_checksum() const {
  uint64_t sum = hash_of_missing(layout_, row(0));
  for_each_entry([&](int64_t id, const char* row) { sum += hash_of(id, row, layout_); });
  return sum;
}

// The slots of ids (n,), n at most kFound; 0 for an id without an entry in this version.
void ServedRows::find_slots(const int64_t* ids, int64_t n, Slot* slots) const {
  store_->index->find(ids, n, slots);
  const auto end = static_cast<Slot>(slots_);
  for (int64_t i = 0; i < n; ++i) slots[i] = slots[i] < end ? slots[i] : 0;
}

// The rows of ids (n,), n at most kFound; for an id without a row, the row for such ids.
void ServedRows::locate(const int64_t* ids, int64_t n, const char** rows) const {
  Slot slots[kFound];
  if (base_ != nullptr) base_->find(ids, n, row(0), rows);
  if (base_ != nullptr && slots_ == 1) return;
  find_slots(ids, n, slots);
  if (base_ == nullptr) {
    for (int64_t i = 0; i < n; ++i) rows[i] = row(slots[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      if (slots[i] != 0) rows[i] = row(slots[i]);
    }
  }
}

// The rows of ids (n,), n at most kFound; null for an id without a row.
void ServedRows::find_rows(const int64_t* ids, int64_t n, const char** rows) const {
  Slot slots[kFound];
  if (base_ != nullptr) {
    base_->find(ids, n, nullptr, rows);
  } else {
    std::fill_n(rows, n, nullptr);
  }
  find_slots(ids, n, slots);
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] != 0) rows[i] = is_removed(slots[i]) ? nullptr : row(slots[i]);
  }
}

RECSTORE_PREFETCHES inline void ServedRows::prefetch_row(const char* row) const {
  const char* const end = row + std::min(layout_.stride, kMostLines * kLine);
  // A row begins anywhere in a line. To prefetch a line twice would take longer than to find out whether it is another
  // one.
  for (const char* at = row - reinterpret_cast<uintptr_t>(row) % kLine; at < end; at += kLine) {
    __builtin_prefetch(at, 0, 3);
  }
}

template <class Visit>  // visit(position, row)
void ServedRows::for_each_row(const int64_t* ids, int64_t n, const Visit& visit) const {
  const char* rows[kFound];
  for (int64_t first = 0; first < n; first += kFound) {
    const int64_t count = std::min(kFound, n - first);
    const int64_t ahead = std::min(kAhead, count);
    locate(ids + first, count, rows);
    for (int64_t i = 0; i < ahead; ++i) prefetch_row(rows[i]);
    for (int64_t i = 0; i < count; ++i) {
      if (i + ahead < count) prefetch_row(rows[i + ahead]);
      visit(first + i, rows[i]);
    }
  }
}

void ServedRows::copy(const int64_t* ids, int64_t n, char* out) const {
  for_each_row(ids, n, [&](int64_t i, const char* row) {
    char* to = out + i * layout_.row_bytes;
    std::memcpy(to, row, static_cast<size_t>(layout_.stride));
    std::memset(to + layout_.stride, 0, static_cast<size_t>(layout_.row_bytes - layout_.stride));
  });
}

void ServedRows::lookup(const int64_t* ids, int64_t n, float* out) const {
  const int64_t dim = layout_.dim;
  switch (layout_.format) {
    case RowFormat::kFloat32:
      return for_each_row(ids, n, [&](int64_t i, const char* row) {
        std::memcpy(out + i * dim, row, static_cast<size_t>(dim) * sizeof(float));
      });
    case RowFormat::kFloat16: {
      const auto widen = row_loops().widen;
      return for_each_row(ids, n, [&](int64_t i, const char* row) {
        widen(RowType::kFloat16, reinterpret_cast<const float*>(row), dim, out + i * dim);
      });
    }
    case RowFormat::kInt8:
      return for_each_row(ids, n, [&](int64_t i, const char* row) {
        float* to = out + i * dim;
        for_each_column<RowFormat::kInt8>(row, dim, [to](int64_t c, float value) { to[c] = value; });
      });
    case RowFormat::kInt4:
      return for_each_row(ids, n, [&](int64_t i, const char* row) {
        float* to = out + i * dim;
        for_each_column<RowFormat::kInt4>(row, dim, [to](int64_t c, float value) { to[c] = value; });
      });
  }
}

void ServedRows::pool(const int64_t* ids, const int64_t* offsets, int64_t bags, const float* weights, bool mean,
                      float* out) const {
  const int64_t dim = layout_.dim;
  const int64_t begin = offsets[0];
  const int64_t n = offsets[bags] - begin;
  std::fill_n(out, bags * dim, 0.0f);
  int64_t bag = 0;
  // The rows of a bag are added in their order, and a weighted row is rounded before it is added: the bits of a lookup
  // in training.
  const auto pooled = [&](const auto& add) {
    for_each_row(ids + begin, n, [&](int64_t i, const char* row) {
      while (begin + i >= offsets[bag + 1]) ++bag;
      add(row, out + bag * dim, weights == nullptr ? 1.0f : weights[begin + i]);
    });
  };
  const auto of_format = [&](const auto& for_each) {
    if (weights == nullptr) {
      pooled([&](const char* row, float* sum, float) {
        for_each(row, [sum](int64_t c, float value) { sum[c] += value; });
      });
    } else {
      pooled([&](const char* row, float* sum, float weight) {
        for_each(row, [sum, weight](int64_t c, float value) { sum[c] += value * weight; });
      });
    }
  };
  switch (layout_.format) {
    case RowFormat::kFloat32:
      of_format([dim](const char* row, const auto& use) { for_each_column<RowFormat::kFloat32>(row, dim, use); });
      break;
    case RowFormat::kFloat16: {
      std::vector<float> wide(static_cast<size_t>(dim) + 16);
      const auto widen = row_loops().widen;
      of_format([&](const char* row, const auto& use) {
        widen(RowType::kFloat16, reinterpret_cast<const float*>(row), dim, wide.data());
        for (int64_t c = 0; c < dim; ++c) use(c, wide[static_cast<size_t>(c)]);
      });
      break;
    }
    case RowFormat::kInt8:
      of_format([dim](const char* row, const auto& use) { for_each_column<RowFormat::kInt8>(row, dim, use); });
      break;
    case RowFormat::kInt4:
      of_format([dim](const char* row, const auto& use) { for_each_column<RowFormat::kInt4>(row, dim, use); });
      break;
  }
  if (!mean) return;
  for (int64_t b = 0; b < bags; ++b) {
    const auto length = static_cast<float>(std::max<int64_t>(1, offsets[b + 1] - offsets[b]));
    for (int64_t c = 0; c < dim; ++c) out[b * dim + c] /= length;
  }
}

void ServedRows::contains(const int64_t* ids, int64_t n, bool* found) const {
  const char* rows[kFound];
  for (int64_t first = 0; first < n; first += kFound) {
    const int64_t count = std::min(kFound, n - first);
    find_rows(ids + first, count, rows);
    for (int64_t i = 0; i < count; ++i) found[first + i] = rows[i] != nullptr;
  }
}

std::vector<ServedRows::Entry> ServedRows::entries() const {
  std::vector<Entry> entries;
  entries.reserve(static_cast<size_t>(rows()));
  for_each_entry([&](int64_t id, const char* row) { entries.push_back({id, row}); });
  std::sort(entries.begin(), entries.end());
  return entries;
}

const IdIndex* ServedRows::whole_index(std::unique_lock<std::mutex>& hold) const {
  hold = std::unique_lock<std::mutex>(store_->mutex);
  const bool has_other_entries = base_ != nullptr || removed_count_ != 0 || store_->index->size() != slots_ - 1;
  return has_other_entries ? nullptr : store_->index.get();
}

const RowMemory* ServedRows::whole_memory() const {
  const bool is_whole = number_ == 0 && slots_ * layout_.stride == store_->memory_bytes;
  return is_whole ? &store_->memory : nullptr;
}

std::shared_ptr<const ServedRows> ServedRows::copied(int64_t more_rows) const {
  struct OwnEntry {
    int64_t id;
    Slot slot;
  };
  std::vector<OwnEntry> own_entries;
  own_entries.reserve(static_cast<size_t>(slots_ - 1 - removed_count_ + hidden_removed_));
  {
    const std::lock_guard<std::mutex> lock(store_->mutex);
    store_->index->for_each([&](int64_t id, Slot slot) {
      const char* beneath = nullptr;
      if (slot >= slots_) return;
      if (is_removed(slot) && base_ != nullptr) base_->find(&id, 1, nullptr, &beneath);
      if (!is_removed(slot) || beneath != nullptr) own_entries.push_back({id, slot});
    });
  }
  std::sort(own_entries.begin(), own_entries.end(), [](const OwnEntry& a, const OwnEntry& b) { return a.id < b.id; });
  const auto count = static_cast<int64_t>(own_entries.size());
  // A table over base rows begins empty and is small.
  const int64_t room_to_grow = base_ == nullptr ? count / kRoomToGrow : count / 2;
  const int64_t capacity = count + std::max({kLeastRoom, more_rows, room_to_grow});
  if (capacity >= kMostSlots) throw OutOfMemory("a table holds fewer than 2**32 rows");
  auto region = std::make_shared<Region>();
  region->reserve(static_cast<size_t>((count + 1) * layout_.stride));
  auto store = std::make_shared<Store>();
  store->index = std::make_unique<IdIndex>(capacity, random_salt());
  store->memory = {region->data(), true, region};
  std::shared_ptr<ServedRows> version(new ServedRows(layout_, store));
  version->removed_.resize(static_cast<size_t>(count + 64) / 64);
  const auto put = [&](int64_t slot, int64_t from) {
    std::memcpy(region->data() + slot * layout_.stride, row(from), static_cast<size_t>(layout_.stride));
  };
  put(0, 0);
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const OwnEntry& coming = own_entries[static_cast<size_t>(i + kAhead)];
      store->index->prefetch(coming.id);
      __builtin_prefetch(row(coming.slot), 0, 3);
    }
    const OwnEntry& entry = own_entries[static_cast<size_t>(i)];
    put(i + 1, entry.slot);
    if (is_removed(entry.slot)) version->removed_[static_cast<size_t>(i + 1) / 64] |= uint64_t{1} << ((i + 1) % 64);
    if (!store->index->insert(entry.id, static_cast<Slot>(i + 1))) {
      throw OutOfMemory("the index has no place for an id");
    }
  }
  version->slots_ = count + 1;
  version->add_chunks();
  version->checksum_ = checksum_;
  version->base_ = base_;
  version->hidden_ = hidden_;
  version->removed_count_ = hidden_removed_;
  version->hidden_removed_ = hidden_removed_;
  return version;
}

uint64_t ServedRows::checksum_with(const RowChanges& changes) const {
  check_distinct(changes);
  uint64_t sum = checksum_;
  const auto leave = [&](const int64_t* ids, int64_t n) {
    const char* rows[kFound];
    for (int64_t first = 0; first < n; first += kFound) {
      const int64_t count = std::min(kFound, n - first);
      find_rows(ids + first, count, rows);
      for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count && rows[i + kAhead] != nullptr) prefetch_row(rows[i + kAhead]);
        if (rows[i] != nullptr) sum -= hash_of(ids[first + i], rows[i], layout_);
      }
    }
  };
  leave(changes.ids, changes.count);
  leave(changes.removed, changes.removed_count);
  for (int64_t i = 0; i < changes.count; ++i) {
    sum += hash_of(changes.ids[i], changes.rows + i * layout_.row_bytes, given_layout(layout_));
  }
  return sum;
}

std::shared_ptr<ServedRows> ServedRows::with(const RowChanges& changes) const {
  check_distinct(changes);
  if (auto version = extended(changes)) return version;
  return copied(changes.count)->with(changes);
}

// Returns null if the rows have to be copied first.
std::shared_ptr<ServedRows> ServedRows::extended(const RowChanges& changes) const {
  std::shared_ptr<ServedRows> version;  // it is destroyed without the lock
  const std::lock_guard<std::mutex> lock(store_->mutex);
  std::vector<Slot> slots(static_cast<size_t>(changes.count + changes.removed_count));
  std::vector<const char*> beneath(slots.size());  // the rows of the base, or null
  const auto search = [&](const int64_t* ids, int64_t n, int64_t to) {
    for (int64_t first = 0; first < n; first += kFound) {
      const int64_t count = std::min(kFound, n - first);
      store_->index->find(ids + first, count, slots.data() + to + first);
      if (base_ != nullptr) base_->find(ids + first, count, nullptr, beneath.data() + to + first);
    }
  };
  search(changes.ids, changes.count, 0);
  search(changes.removed, changes.removed_count, changes.count);
  int64_t added = std::count(slots.begin(), slots.begin() + changes.count, kNoSlot);
  for (size_t i = static_cast<size_t>(changes.count); i < slots.size(); ++i) {
    added += slots[i] == kNoSlot && beneath[i] != nullptr;
  }
  const int64_t left = store_->slots - slots_;  // the slots of versions that were not kept, which must not hide a base
  const bool extends = store_->last == number_ && store_->index->room() >= added &&
                       store_->slots + added < kMostSlots && (base_ == nullptr || left == 0) &&
                       removed_count_ - hidden_removed_ + left <= std::max(kLeastRoom, (slots_ - 1) / kMostRemoved);
  if (!extends) return nullptr;
  version = std::shared_ptr<ServedRows>(new ServedRows(*this, store_->slots + added));
  version->number_ = ++store_->last;
  version->removed_.resize(static_cast<size_t>(version->slots_ + 63) / 64);
  const auto changed = static_cast<size_t>(changes.count + changes.removed_count + left);
  version->replaced_.reserve(changed);
  version->made_.reserve(changed);
  const auto remove = [&](int64_t slot) {
    version->removed_[static_cast<size_t>(slot / 64)] |= uint64_t{1} << (slot % 64);
    ++version->removed_count_;
    std::memcpy(version->own_row(*this, slot), row(0), static_cast<size_t>(layout_.stride));
  };
  // Makes the entry of an id that has none, and returns its slot.
  const auto add = [&](int64_t id, const char* hidden) {
    const auto slot = static_cast<Slot>(store_->slots);
    version->own_row(*this, slot);
    if (!store_->index->insert(id, slot)) throw OutOfMemory("the index has no place for an id");
    ++store_->slots;
    if (hidden != nullptr) {
      ++version->hidden_;
      version->checksum_ -= hash_of(id, hidden, layout_);
    }
    return slot;
  };
  // Versions that were not kept have left these slots, and entries that refer to them.
  for (int64_t slot = slots_, end = store_->slots; slot < end; ++slot) remove(slot);
  for (int64_t i = 0; i < changes.count; ++i) {
    const int64_t id = changes.ids[i];
    const char* hidden = beneath[static_cast<size_t>(i)];
    Slot slot = slots[static_cast<size_t>(i)];
    if (slot == kNoSlot) {
      slot = add(id, hidden);
    } else if (version->is_removed(slot)) {
      version->removed_[slot / 64] &= ~(uint64_t{1} << (slot % 64));
      --version->removed_count_;
      version->hidden_removed_ -= hidden != nullptr;
    } else {
      version->checksum_ -= hash_of(id, row(slot), layout_);
    }
    const char* from = changes.rows + i * layout_.row_bytes;
    std::memcpy(version->own_row(*this, slot), from, static_cast<size_t>(layout_.stride));
    version->checksum_ += hash_of(id, from, given_layout(layout_));
  }
  for (int64_t i = 0; i < changes.removed_count; ++i) {
    const char* hidden = beneath[static_cast<size_t>(changes.count + i)];
    Slot slot = slots[static_cast<size_t>(changes.count + i)];
    if (slot == kNoSlot && hidden == nullptr) continue;
    if (slot == kNoSlot) {
      slot = add(changes.removed[i], hidden);
    } else if (version->is_removed(slot)) {
      continue;
    } else {
      version->checksum_ -= hash_of(changes.removed[i], row(slot), layout_);
    }
    remove(slot);
    version->hidden_removed_ += hidden != nullptr;
  }
  return version;
}

// The row of a slot, in a chunk that the version before does not have. The caller holds the lock of the store.
char* ServedRows::own_row(const ServedRows& before, int64_t slot) {
  const auto number = static_cast<size_t>(slot >> chunk_bits_);
  const int64_t bytes = layout_.stride << chunk_bits_;
  if (number >= chunks_.size()) {
    made_.push_back(store_->take(bytes));
    chunks_.push_back(made_.back());
  } else if (number < before.chunks_.size() && chunks_[number] == before.chunks_[number]) {
    made_.push_back(store_->take(bytes));
    std::memcpy(made_.back(), chunks_[number], static_cast<size_t>(bytes));
    replaced_.push_back(chunks_[number]);
    chunks_[number] = made_.back();
  }
  return chunks_[number] + (slot & chunk_mask_) * layout_.stride;
}

}  // namespace recstore
