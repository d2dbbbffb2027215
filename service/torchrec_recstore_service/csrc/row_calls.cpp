#include "row_calls.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <utility>

namespace recstore_service {
namespace {

constexpr int64_t kPartIds = int64_t{1} << 16;
constexpr size_t kMostNameBytes = 1000;  // of tables in an error, about
constexpr const char* kInvalid = "recstore invalid argument: ";
constexpr const char* kNoMemory = "recstore out of memory: ";

int64_t aligned(int64_t place) { return (place + 3) / 4 * 4; }

std::string without(const std::string& text, const std::string& prefix) {
  return text.rfind(prefix, 0) == 0 ? text.substr(prefix.size()) : text;
}

}  // namespace

bool Pull::is_done() const {
  if (table_ >= static_cast<int64_t>(tables_.size())) return true;
  if (begin_ < counts_[table_]) return false;
  return std::all_of(counts_.begin() + table_ + 1, counts_.end(), [](int64_t count) { return count == 0; });
}

int64_t Pull::bytes() const {
  int64_t bytes = 0;
  for (Pull rest = *this; !rest.is_done();) bytes = aligned(bytes) + rest.next().bytes;
  return bytes;
}

Pull::Part Pull::next() {
  Part part;
  int64_t ids = 0;
  while (table_ < static_cast<int64_t>(tables_.size())) {
    const int64_t count = counts_[table_];
    if (begin_ >= count) {
      ++table_;
      begin_ = 0;
      continue;
    }
    const int64_t bytes = tables_[table_]->dim * tables_[table_]->value_bytes;
    const int64_t least = bytes % 4 == 0 ? 1 : 2;  // rows, so that the next part begins at an aligned place
    const int64_t begin = aligned(part.bytes);
    int64_t room = std::min(begin < part_bytes_ ? (part_bytes_ - begin) / bytes : 0, kPartIds - ids);
    if (room < count - begin_) room -= room % least;
    if (!part.pieces.empty() && room <= 0) return part;
    const int64_t end = std::min(count, begin_ + std::max(room, least));
    part.pieces.push_back({table_, begin_, end});
    part.bytes = begin + (end - begin_) * bytes;
    ids += end - begin_;
    begin_ = end;
    if (begin_ < count) return part;
  }
  return part;
}

void RowCalls::add(ServedTable table) {
  auto added = std::make_shared<const ServedTable>(std::move(table));
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_[added->name] = std::move(added);
}

void RowCalls::remove(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_.erase(name);
}

// Returns the tables of a request; none if one of them is not served here.
std::vector<TableRef> RowCalls::tables_of(const RowRequest& request) {
  std::vector<TableRef> found;
  if (!request.table.empty() && !request.tables.empty()) return found;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto add = [&](const std::string& name) {
    const auto there = tables_.find(name);
    if (there == tables_.end()) return false;
    found.push_back(there->second);
    return true;
  };
  const bool all = request.tables.empty() ? add(request.table)
                                          : std::all_of(request.tables.begin(), request.tables.end(),
                                                        [&](const TableIds& each) { return add(each.table); });
  if (!all) found.clear();
  return found;
}

std::unique_ptr<Pull> RowCalls::pull(const RowRequest& request, const Arrays& arrays, int64_t part_bytes) {
  if (request.want != Want::kRows || request.sizes[0] % 8 != 0) return nullptr;
  std::vector<TableRef> tables = tables_of(request);
  if (tables.empty() || !gate_.is_in(request.epoch)) return nullptr;
  const auto n = static_cast<int64_t>(request.sizes[0] / 8);
  std::vector<int64_t> counts;
  std::vector<bool> zeros;
  if (request.tables.empty()) {
    counts = {n};
    zeros = {false};
  } else {
    for (const TableIds& each : request.tables) {
      if (each.ids > static_cast<uint64_t>(n)) return nullptr;
      counts.push_back(static_cast<int64_t>(each.ids));
      zeros.push_back(each.zeros);
    }
    if (std::accumulate(counts.begin(), counts.end(), int64_t{0}) != n) return nullptr;
  }
  return std::make_unique<Pull>(std::move(tables), std::move(counts), std::move(zeros), request.epoch,
                                reinterpret_cast<const int64_t*>(arrays[0]), part_bytes);
}

void RowCalls::read(const Pull& pull, const Pull::Part& part, char* out) {
  std::vector<recstore::RowsOfTable> rows;
  std::vector<TableRef> tables;
  std::vector<int64_t> firsts(pull.counts_.size() + 1, 0);
  std::partial_sum(pull.counts_.begin(), pull.counts_.end(), firsts.begin() + 1);
  int64_t place = 0;
  for (const Pull::Piece& piece : part.pieces) {
    const ServedTable& table = *pull.tables_[piece.table];
    const int64_t n = piece.end - piece.begin;
    std::fill(out + place, out + aligned(place), '\0');  // no old bytes of the memory go to the client
    place = aligned(place);
    rows.push_back({table.table, table.group, pull.ids_ + firsts[piece.table] + piece.begin, n, out + place,
                    table.value_bytes != 4, pull.zeros_[piece.table], 0.0});
    tables.push_back(pull.tables_[piece.table]);
    place += n * table.dim * table.value_bytes;
    counts_.ids("pull", table.name, n);
  }
  recstore::RowError error;
  const int status = api_.read(rows.data(), static_cast<int64_t>(rows.size()), &error);
  check_still_in(pull.run_);
  if (status != recstore::kRowsDone) fail(status, error, tables);
}

bool RowCalls::run(const RowRequest& request, const std::string& message, bool from_primary, const Arrays& arrays,
                   RowReply& reply, std::vector<char>& found) {
  const std::vector<TableRef> tables = tables_of(request);
  if (tables.empty() || request.sizes[0] % 8 != 0 || !gate_.is_in(request.epoch)) return false;
  if (request.is_write()) return write(request, message, from_primary, tables, arrays, reply);
  if (request.want != Want::kFound || !request.tables.empty()) return false;
  const auto n = static_cast<int64_t>(request.sizes[0] / 8);
  found.resize(static_cast<size_t>(n));
  recstore::RowError error;
  const int status = api_.contains(tables[0]->table, reinterpret_cast<const int64_t*>(arrays[0]), n,
                                   reinterpret_cast<bool*>(found.data()), &error);
  if (status == recstore::kRowsClosed) return false;
  if (status != recstore::kRowsDone) fail(status, error, tables);
  check_still_in(request.epoch);
  reply.found = static_cast<uint64_t>(n);
  return true;
}

bool RowCalls::write(const RowRequest& request, const std::string& message, bool from_primary,
                     const std::vector<TableRef>& tables, const Arrays& arrays, RowReply& reply) {
  const auto n = static_cast<int64_t>(request.sizes[0] / 8);
  const bool several = !request.tables.empty();
  if (request.kind != Kind::kUpdate && (several || (request.kind != Kind::kPush && request.kind != Kind::kDelete))) {
    return false;
  }
  if (request.bytes() > most_write_bytes_ || request.sizes[0] / 8 > most_write_ids_) return false;
  if (static_cast<uint64_t>(n) != request.ids || request.sizes[2] != 0 || request.sizes[3] != 0) return false;
  std::vector<recstore::RowsOfTable> rows;
  std::set<std::string> names;
  int64_t place = 0, first = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    const ServedTable& table = *tables[t];
    const int64_t count = several ? static_cast<int64_t>(std::min<uint64_t>(request.tables[t].ids, n + 1)) : n;
    const auto& rate = several ? request.tables[t].learning_rate : std::optional<double>{};
    if (first + count > n || !names.insert(table.name).second) return false;
    if (rate.has_value() && !(std::isfinite(*rate) && *rate >= 0)) return false;
    const bool narrow = !request.float32 && table.value_bytes != 4;
    place = aligned(place);
    rows.push_back({table.table, table.group, reinterpret_cast<const int64_t*>(arrays[0]) + first, count,
                    arrays[1] + place, narrow, false, rate.value_or(table.learning_rate)});
    if (request.kind != Kind::kDelete) place += count * table.dim * (narrow ? table.value_bytes : 4);
    first += count;
  }
  if (first != n || (request.kind != Kind::kDelete && static_cast<uint64_t>(place) != request.sizes[1])) return false;
  uint64_t deleted = 0;
  {
    const RunGate::Inside inside(gate_);
    if (!gate_.is_in(request.epoch)) return false;
    const Applied::Mine mine = applied_.begin(request.client, request.request, request.done_before, deleted);
    if (mine != nullptr) {
      recstore::RowError error;
      int status = recstore::kRowsClosed;
      try {
        const std::unique_lock<std::mutex> turn = replica_.turn(from_primary);
        status = apply(request, tables, rows, deleted, error);
        if (status == recstore::kRowsDone) replica_.send(message, arrays, request.sizes);
      } catch (...) {
        applied_.finish(request.client, request.request, mine, true, 0);
        throw;
      }
      applied_.finish(request.client, request.request, mine, status != recstore::kRowsDone, deleted);
      if (status == recstore::kRowsClosed) return false;
      if (status != recstore::kRowsDone) fail(status, error, tables);
    }
  }
  replica_.wait(replica_.sent());  // also for a write that was carried out before, but perhaps not by the backup
  const char* operation = request.kind == Kind::kPush ? "push" : request.kind == Kind::kUpdate ? "update" : "delete";
  for (size_t t = 0; t < tables.size(); ++t) counts_.ids(operation, tables[t]->name, rows[t].n);
  reply.deleted = deleted;
  return true;
}

int RowCalls::apply(const RowRequest& request, const std::vector<TableRef>& tables,
                    const std::vector<recstore::RowsOfTable>& rows, uint64_t& deleted, recstore::RowError& error) {
  if (request.kind == Kind::kUpdate) return api_.update(rows.data(), static_cast<int64_t>(rows.size()), &error);
  if (request.kind == Kind::kPush) return api_.insert(rows.data(), &error);
  int64_t removed = 0;
  const int status = api_.remove(tables[0]->table, rows[0].ids, rows[0].n, &removed, &error);
  deleted = static_cast<uint64_t>(removed);
  return status;
}

// Throws if the server has begun another run while rows were read, which may be those of either.
void RowCalls::check_still_in(const std::string& run) {
  if (gate_.is_in(run)) return;
  throw CallFailed({kUnavailable, "the server has begun another run: repeat the call", ""});
}

// Throws what native_errors in ops.py raises for the same error.
void RowCalls::fail(int status, const recstore::RowError& error, const std::vector<TableRef>& tables) const {
  std::string who = tables.size() == 1 ? "table '" + tables[0]->name + "'" : "tables ";
  for (size_t t = 0; tables.size() > 1 && t < tables.size(); ++t) {
    if (who.size() > kMostNameBytes) {
      who += " and others";
      break;
    }
    who += (t == 0 ? "" : ", ") + tables[t]->name;
  }
  if (status == recstore::kRowsNoMemory) {
    throw CallFailed({kResourceExhausted, who + ": out of memory: " + without(error.text, kNoMemory), "MemoryError"});
  }
  if (status == recstore::kRowsClosed) invalid(who + " is closed");
  std::string text = without(error.text, kInvalid);
  while (!is_utf8(text.data(), text.size())) text.pop_back();  // the end of a long message may be within a character
  invalid(text.rfind("table '", 0) == 0 ? text : who + ": " + text);
}

}  // namespace recstore_service
