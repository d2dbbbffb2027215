#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "applied.h"
#include "counts.h"
#include "ops/row_api.h"
#include "replica.h"
#include "row_messages.h"
#include "run_gate.h"

namespace recstore_service {

// A table whose rows this library reads and writes itself.
struct ServedTable {
  std::string name;
  int64_t table;  // the handles of the core
  int64_t group;
  int64_t dim;
  int64_t value_bytes;   // of a number in a reply, and in a write that does not say that its rows are float32
  double learning_rate;  // of an update that has none of its own
};
using TableRef = std::shared_ptr<const ServedTable>;

// A read of rows that is answered in parts.
class Pull {
 public:
  // The rows [begin, end) of one table.
  struct Piece {
    int64_t table, begin, end;
  };
  struct Part {
    std::vector<Piece> pieces;
    int64_t bytes = 0;
  };

  Pull(std::vector<TableRef> tables, std::vector<int64_t> counts, std::vector<bool> zeros, std::string run,
       const int64_t* ids, int64_t part_bytes)
      : tables_(std::move(tables)),
        counts_(std::move(counts)),
        zeros_(std::move(zeros)),
        run_(std::move(run)),
        ids_(ids),
        part_bytes_(part_bytes) {}

  // Returns the next part. Each part begins at a row whose place in the stream of rows is a multiple of 4 bytes. See
  // `pieces` in table_rows.py, which divides rows in the same way.
  Part next();
  bool is_done() const;
  // The size of all parts, each of which begins at a multiple of 4 bytes. For a read whose first part was not taken
  // yet.
  int64_t bytes() const;

 private:
  friend class RowCalls;
  std::vector<TableRef> tables_;
  std::vector<int64_t> counts_;
  std::vector<bool> zeros_;
  std::string run_;
  const int64_t* ids_;
  int64_t part_bytes_;  // of a part, about
  int64_t table_ = 0;   // where the next part begins
  int64_t begin_ = 0;
};

// The reads and writes of rows. What is not regular - a table that has a cold store, a request with an error or for
// another run - is left to Python, which has the functions and the errors for it.
class RowCalls {
 public:
  // most_write_bytes and most_write_ids: the limits of a write, beyond which Python answers it.
  RowCalls(const recstore::RowApi& api, Applied& applied, RunGate& gate, Replica& replica, Counts& counts,
           uint64_t most_write_bytes, uint64_t most_write_ids)
      : api_(api),
        applied_(applied),
        gate_(gate),
        replica_(replica),
        counts_(counts),
        most_write_bytes_(most_write_bytes),
        most_write_ids_(most_write_ids) {}

  // Whether a request only reads its rows once and at once, so that another process may change them meanwhile.
  bool reads_once(const RowRequest& request) const {
    return request.kind == Kind::kUpdate && replica_.role() == Replica::Role::kSingle;
  }
  void add(ServedTable table);
  void remove(const std::string& name);

  // Returns the read of a request for rows, in parts of about part_bytes; null if Python has to answer the request.
  // Throws CallFailed.
  std::unique_ptr<Pull> pull(const RowRequest& request, const Arrays& arrays, int64_t part_bytes);
  // Writes the rows of a part, whose tables lie at multiples of 4 bytes, to out, (part.bytes,).
  void read(const Pull& pull, const Pull::Part& part, char* out);
  // Answers a request that asks which ids have a row, or writes: sets the reply, and `found`. Returns false if Python
  // has to do it. message: the bytes of the request. from_primary: whether the server is the backup of the one that
  // sends it. Throws CallFailed.
  bool run(const RowRequest& request, const std::string& message, bool from_primary, const Arrays& arrays,
           RowReply& reply, std::vector<char>& found);

 private:
  std::vector<TableRef> tables_of(const RowRequest& request);
  bool write(const RowRequest& request, const std::string& message, bool from_primary,
             const std::vector<TableRef>& tables, const Arrays& arrays, RowReply& reply);
  int apply(const RowRequest& request, const std::vector<TableRef>& tables,
            const std::vector<recstore::RowsOfTable>& rows, uint64_t& deleted, recstore::RowError& error);
  void check_still_in(const std::string& run);
  [[noreturn]] void fail(int status, const recstore::RowError& error, const std::vector<TableRef>& tables) const;

  const recstore::RowApi& api_;
  Applied& applied_;
  RunGate& gate_;
  Replica& replica_;
  Counts& counts_;
  const uint64_t most_write_bytes_;
  const uint64_t most_write_ids_;
  std::mutex mutex_;
  std::unordered_map<std::string, TableRef> tables_;
};

}  // namespace recstore_service
