// Ops on rows that travel between a client and a server: bytes in memory that the two share, or in a message.

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mix.h"
#include "base/slots.h"
#include "lookup/group.h"
#include "ops/tensors.h"

namespace recstore {
namespace {

// Returns uninitialised memory for n rows of row_bytes bytes, (n, row_bytes) uint8. A buffer of the pool has its pages
// already, which costs less than the copy of the rows into new pages.
Tensor rows_empty(int64_t n, int64_t row_bytes) {
  if (n < 0 || row_bytes < 0) throw InvalidArgument("n and row_bytes must not be negative");
  return recycled({n, row_bytes}, ScalarType::Byte);
}

constexpr int64_t kMostOwners = 1 << 16;

// From this size on, rows that are written to places far apart are written past the caches: other stores first read the
// lines that they replace. 50,000 rows of 256 bytes took 1.2 ms of processor time, and take 0.6 ms in this way.
constexpr size_t kStreamedBytes = size_t{1} << 20;
constexpr size_t kLine = 64;  // bytes of a line of a cache. Parts of a line take longer past the caches.

#if defined(__SSE2__)
// Copies `bytes` bytes, a multiple of 16, to an address that is a multiple of 16.
inline void copy_past_caches(char* to, const char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
}
inline void end_of_streamed_rows() { _mm_sfence(); }
#else
inline void copy_past_caches(char* to, const char* from, size_t bytes) { std::memcpy(to, from, bytes); }
inline void end_of_streamed_rows() {}
#endif

// Whether rows of `bytes` bytes, which have `all` bytes together, are written past the caches to memory that begins at
// `to`.
bool is_streamed(const char* to, size_t bytes, size_t all) {
  return all >= kStreamedBytes && bytes % kLine == 0 && reinterpret_cast<uintptr_t>(to) % kLine == 0;
}

// A row of `bytes` bytes. The usual sizes are constants, so that the compiler copies a row with a few wide moves.
template <class Copy>
void with_row_size(size_t bytes, const Copy& copy) {
  switch (bytes) {
    case 64: return copy([](char* to, const char* from) { std::memcpy(to, from, 64); });
    case 128: return copy([](char* to, const char* from) { std::memcpy(to, from, 128); });
    case 256: return copy([](char* to, const char* from) { std::memcpy(to, from, 256); });
    case 512: return copy([](char* to, const char* from) { std::memcpy(to, from, 512); });
    default: return copy([bytes](char* to, const char* from) { std::memcpy(to, from, bytes); });
  }
}

// The rows of several tables, and a window of the stream in which they travel. The stream has the rows of one table
// after the other. The rows of each table begin at a multiple of 4 bytes.
class Stream {
 public:
  // rows: for each table, (n, row bytes) uint8, contiguous. places: the index of each row of the stream in the rows of
  // all tables together, table by table; none means all rows in their order. counts: the number of rows of each table
  // in the stream. window: (bytes,) uint8, which begins at the byte `at` of the stream. It begins and ends between two
  // rows.
  Stream(std::vector<Tensor>& rows, const std::optional<Tensor>& places, const std::vector<int64_t>& counts,
         Tensor& window, int64_t at)
      : begin_(at) {
    if (rows.size() != counts.size()) throw InvalidArgument("counts must have one entry for each table");
    if (places.has_value()) places_ = checked(*places, "places", ScalarType::Long, 1);
    window = checked(window, "window", ScalarType::Byte, 1);
    end_ = at + window.size(0);
    int64_t next = 0;   // in the stream
    int64_t first = 0;  // in the rows of all tables
    int64_t entry = 0;  // in places
    for (size_t t = 0; t < rows.size(); ++t) {
      rows[t] = checked(rows[t], "rows", ScalarType::Byte, 2);
      const int64_t n = rows[t].size(0);
      const int64_t bytes = rows[t].size(1);
      if (counts[t] < 0 || (!places.has_value() && counts[t] != n)) {
        throw InvalidArgument("counts must have the number of rows of each table");
      }
      next = (next + 3) / 4 * 4;
      tables_.push_back({next, counts[t], static_cast<size_t>(bytes), first, n, entry});
      next += counts[t] * bytes;
      first += n;
      entry += counts[t];
    }
    if (places.has_value() && places_->size(0) != entry) {
      throw InvalidArgument("places must have an entry for each row of the stream");
    }
    if (at < 0 || end_ > next) throw InvalidArgument("window must lie in the stream");
    for (const Part& part : tables_) check_part(part);
  }

  // Calls copy(table, row of the table, place in the window, bytes) for each run of rows that lie together in both.
  template <class Copy>
  void each_run(const Copy& copy) const {
    for (size_t t = 0; t < tables_.size(); ++t) {
      const auto [from, to] = rows_in_window(tables_[t]);
      if (from == to || tables_[t].bytes == 0) continue;
      copy(t, tables_[t].bytes,
           static_cast<size_t>(tables_[t].begin - begin_) + static_cast<size_t>(from) * tables_[t].bytes, from, to,
           places_.has_value() ? id_data(*places_) + tables_[t].entry : nullptr, tables_[t].first);
    }
  }

 private:
  struct Part {
    int64_t begin;  // in the stream
    int64_t count;
    size_t bytes;   // of a row
    int64_t first;  // the index of the first row of the table in the rows of all tables
    int64_t rows;
    int64_t entry;  // the first entry of the table in places
  };
  // The rows of a part that lie in the window: [from, to).
  std::pair<int64_t, int64_t> rows_in_window(const Part& part) const {
    const auto bytes = static_cast<int64_t>(part.bytes);
    if (bytes == 0) return {0, 0};
    const auto bound = [&](int64_t place) { return std::clamp<int64_t>((place - part.begin) / bytes, 0, part.count); };
    return {bound(std::max(begin_, part.begin)), bound(std::max(end_, part.begin))};
  }
  void check_part(const Part& part) const {
    const auto bytes = static_cast<int64_t>(part.bytes);
    const int64_t end = part.begin + part.count * bytes;
    for (const int64_t edge : {begin_, end_}) {
      if (edge > part.begin && edge < end && (edge - part.begin) % bytes != 0) {
        throw InvalidArgument("window must begin and end between two rows");
      }
    }
    if (!places_.has_value()) return;
    const auto [from, to] = rows_in_window(part);
    const int64_t* place = id_data(*places_) + part.entry;
    for (int64_t i = from; i < to; ++i) {
      if (place[i] < part.first || place[i] >= part.first + part.rows) {
        throw InvalidArgument("places must be from " + std::to_string(part.first) + " to " +
                              std::to_string(part.first + part.rows - 1));
      }
    }
  }

  int64_t begin_;
  int64_t end_ = 0;
  std::optional<Tensor> places_;
  std::vector<Part> tables_;
};

void check_contiguous(const std::vector<Tensor>& tensors, const char* name) {
  for (const Tensor& tensor : tensors) {
    if (!tensor.is_contiguous()) throw InvalidArgument(std::string(name) + " must be contiguous");
  }
}

// Writes the rows that lie in a window of a stream to the rows of the tables. See Stream. Runs on the calling thread:
// client and server share the cores, and idle threads of a team would spin on them.
void rows_put(std::vector<Tensor> out, std::optional<Tensor> places, std::vector<int64_t> counts, Tensor window,
              int64_t at) {
  check_contiguous(out, "out");
  const Stream stream(out, places, counts, window, at);
  const auto* from = static_cast<const char*>(window.const_data_ptr());
  stream.each_run(
      [&](size_t t, size_t bytes, size_t place, int64_t begin, int64_t end, const int64_t* rows, int64_t first) {
        auto* to = static_cast<char*>(out[t].mutable_data_ptr());
        const char* source = from + place;
        const auto all = static_cast<size_t>(end - begin) * bytes;
        if (rows == nullptr) {
          std::memcpy(to + static_cast<size_t>(begin) * bytes, source, all);
          return;
        }
        const auto put = [&](auto copy) {
          for (int64_t i = begin; i < end; ++i, source += bytes) {
            copy(to + static_cast<size_t>(rows[i] - first) * bytes, source);
          }
        };
        if (!is_streamed(to, bytes, all)) return with_row_size(bytes, put);
        put([bytes](char* row, const char* content) { copy_past_caches(row, content, bytes); });
        end_of_streamed_rows();
      });
}

// Writes the rows of tables that lie in a window of a stream to the window. See rows_put.
void rows_take(std::vector<Tensor> rows, std::optional<Tensor> places, std::vector<int64_t> counts, Tensor window,
               int64_t at) {
  check_contiguous({window}, "window");
  const Stream stream(rows, places, counts, window, at);
  auto* to = static_cast<char*>(window.mutable_data_ptr());
  stream.each_run(
      [&](size_t t, size_t bytes, size_t place, int64_t begin, int64_t end, const int64_t* of, int64_t first) {
        const auto* from = static_cast<const char*>(rows[t].const_data_ptr());
        char* target = to + place;
        if (of == nullptr) {
          std::memcpy(target, from + static_cast<size_t>(begin) * bytes, static_cast<size_t>(end - begin) * bytes);
          return;
        }
        with_row_size(bytes, [&](auto copy) {
          for (int64_t i = begin; i < end; ++i, target += bytes) {
            copy(target, from + static_cast<size_t>(of[i] - first) * bytes);
          }
        });
      });
}

// Splits the ids of several tables among n owners by the slot of each id. counts: the number of ids of each table;
// owners: (slots,), the owner of each slot. Returns the ids, owner by owner, their positions in `ids`, ascending for
// each owner, and the number of ids of each owner and table, (n, tables).
std::tuple<Tensor, Tensor, Tensor> ids_split(Tensor ids, std::vector<int64_t> tables, Tensor owners, int64_t n) {
  ids = checked_ids(ids);
  owners = checked(owners, "owners", ScalarType::Long, 1);
  const int64_t slots = owners.size(0);
  if (n < 1 || n >= kMostOwners) throw InvalidArgument("n must be from 1 to " + std::to_string(kMostOwners - 1));
  if (slots < 1) throw InvalidArgument("owners must have an entry");
  check_counts(tables, static_cast<int64_t>(tables.size()), "table", ids.size(0));
  const int64_t* id = id_data(ids);
  const int64_t* owner_of = id_data(owners);
  const int64_t n_ids = ids.size(0);
  for (int64_t i = 0; i < slots; ++i) {
    if (owner_of[i] < 0 || owner_of[i] >= n) throw InvalidArgument("owners must be from 0 to " + std::to_string(n - 1));
  }
  const auto width = static_cast<int64_t>(tables.size());
  Tensor sorted = empty({n_ids}, ScalarType::Long);
  Tensor places = empty({n_ids}, ScalarType::Long);
  Tensor counts = empty({n, width}, ScalarType::Long);
  std::vector<uint16_t> owner(static_cast<size_t>(n_ids));
  std::vector<int64_t> begins(static_cast<size_t>(n) + 1, 0);
  auto* out = mutable_data<int64_t>(sorted);
  auto* place = mutable_data<int64_t>(places);
  auto* count = mutable_data<int64_t>(counts);
  std::fill(count, count + n * width, 0);
  int64_t i = 0;
  for (int64_t t = 0; t < width; ++t) {
    const int64_t end = i + tables[t];
    for (; i < end; ++i) {
      owner[i] = static_cast<uint16_t>(owner_of[slot_of(id[i], slots)]);
      ++count[owner[i] * width + t];
      ++begins[owner[i] + 1];
    }
  }
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  for (int64_t position = 0; position < n_ids; ++position) {
    const int64_t p = begins[owner[position]]++;
    out[p] = id[position];
    place[p] = position;
  }
  return {std::move(sorted), std::move(places), std::move(counts)};
}

// Returns the distinct ids of each table, in the order in which they first occur, the position of each id among those
// of its table, and the number of distinct ids of each table. counts: the number of ids of each table.
std::tuple<Tensor, Tensor, Tensor> ids_distinct(Tensor ids, std::vector<int64_t> counts) {
  ids = checked_ids(ids);
  const int64_t n_ids = ids.size(0);
  const auto tables = static_cast<int64_t>(counts.size());
  check_counts(counts, tables, "table", n_ids);
  if (n_ids >= int64_t{1} << 31) throw InvalidArgument("ids must have fewer than 2**31 entries");
  Tensor places = empty({n_ids}, ScalarType::Long);
  Tensor sizes = empty({tables}, ScalarType::Long);
  std::vector<int64_t> distinct_ids(static_cast<size_t>(n_ids));  // those of a table lie where its ids lie in `ids`
  std::vector<int64_t> begins(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), begins.begin() + 1);
  auto* place = mutable_data<int64_t>(places);
  auto* size = mutable_data<int64_t>(sizes);
  const int64_t* id = id_data(ids);
  for_each_task(executor(), tables, [&](int64_t t) {
    int64_t* distinct = distinct_ids.data() + begins[t];
    int bits = 4;
    while ((int64_t{1} << bits) < 2 * counts[t]) ++bits;
    std::vector<uint32_t> buckets(size_t{1} << bits, 0);  // the position of an id among the distinct ones, plus 1
    uint32_t n = 0;
    for (int64_t i = begins[t]; i < begins[t + 1]; ++i) {
      size_t bucket = mix(static_cast<uint64_t>(id[i])) >> (64 - bits);
      while (buckets[bucket] != 0 && distinct[buckets[bucket] - 1] != id[i]) {
        bucket = (bucket + 1) & (buckets.size() - 1);
      }
      if (buckets[bucket] == 0) {
        distinct[n] = id[i];
        buckets[bucket] = ++n;
      }
      place[i] = buckets[bucket] - 1;
    }
    size[t] = n;
  });
  Tensor distinct = empty({std::accumulate(size, size + tables, int64_t{0})}, ScalarType::Long);
  auto* out = mutable_data<int64_t>(distinct);
  for (int64_t t = 0; t < tables; ++t) out = std::copy_n(distinct_ids.data() + begins[t], size[t], out);
  return {std::move(distinct), std::move(places), std::move(sizes)};
}

}  // namespace
}  // namespace recstore

STABLE_TORCH_LIBRARY_FRAGMENT(recstore_ops, m) {
  m.def("rows_empty(int n, int row_bytes) -> Tensor");
  m.def("rows_put(Tensor(a!)[] out, Tensor? places, int[] counts, Tensor window, int at) -> ()");
  m.def("rows_take(Tensor[] rows, Tensor? places, int[] counts, Tensor(a!) window, int at) -> ()");
  m.def("ids_split(Tensor ids, int[] tables, Tensor owners, int n) -> (Tensor, Tensor, Tensor)");
  m.def("ids_distinct(Tensor ids, int[] counts) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CompositeExplicitAutograd, m) {
  m.impl("rows_empty", RECSTORE_ALLOCATING_OP(rows_empty));
}

STABLE_TORCH_LIBRARY_IMPL(recstore_ops, CPU, m) {
  m.impl("rows_put", RECSTORE_OP(rows_put));
  m.impl("rows_take", RECSTORE_OP(rows_take));
  m.impl("ids_split", RECSTORE_OP(ids_split));
  m.impl("ids_distinct", RECSTORE_ALLOCATING_OP(ids_distinct));
}
