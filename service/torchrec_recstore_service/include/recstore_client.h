// A client of parameter servers for programs without Python: tables by name, which a Python client has made.
//
//   recstore::Client client({"127.0.0.1:7700", "127.0.0.1:7701"});
//   std::vector<float> rows = client.pull("user", {7, -1});  // (2, dim)
//   client.update("user", {7, -1}, gradients);               // the servers apply the table's optimizer
//
// It needs C++17, gRPC and protobuf, and the code that protoc generates from
// torchrec_recstore_service/wire/recstore.proto. See docs/service.md, "Programs in C++", and examples/service_cpp.
#pragma once

#include <google/protobuf/util/message_differencer.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "recstore/connection.h"
#include "recstore/error.h"
#include "recstore/options.h"
#include "recstore/set_state.h"
#include "recstore/slots.h"
#include "recstore/values.h"

namespace recstore {

// What a client has to know of a table.
struct TableInfo {
  int64_t dim = 0;    // the number of columns
  std::string dtype;  // the type in which the servers store rows: "float32", "float16", "bfloat16" or "int8"
};

// A client of the servers of a set. Several threads may call one client at the same time. A client belongs to the
// process that has made it: make a client in each process.
//
// A call goes to all servers at the same time. It is repeated as long as a server cannot be reached, for timeout_s in
// total. Writes are numbered, and a server does not apply a number twice. A write that fails on one server may have
// been applied on others. All methods throw Error.
class Client {
  using Connection = detail::Connection;
  using Part = detail::Part;
  using States = std::vector<detail::pb::DescribeReply>;

 public:
  // servers: The address of each server of a set, HOST:PORT, in any order. HOST:PORT/HOST:PORT for a pair of servers
  // that is replicated.
  explicit Client(std::vector<std::string> servers, Options options = {}) : process_(getpid()), name_(new_name()) {
    detail::check(servers, options);
    for (std::string& address : servers) {
      connections_.push_back(std::make_unique<detail::Connection>(std::move(address), options));
    }
  }

  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Returns what the servers know of a table, or an Error of the kind "ValueError" if there is no such table.
  TableInfo describe(const std::string& table) {
    check_process();
    States states;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const bool has_written = requests_ > 0;
      lock.unlock();
      const std::string epoch = join(table, !has_written, &states)->epoch;
      if (epoch != detail::label_of(states[0])) {
        check_nothing_lost(
            Error("ServerRestartedError", "", table, "the servers " + addresses() + " have begun another epoch"),
            has_written);
      }
    }
    std::vector<size_t> lacking;
    for (size_t i = 0; i < states.size(); ++i) {
      if (states[i].tables().count(table) == 0) {
        lacking.push_back(i);
      }
    }
    if (lacking.size() == states.size()) {
      throw Error("ValueError", "", table, "there is no table '" + table + "' on the servers " + addresses());
    }
    if (!lacking.empty()) {
      throw connections_[lacking[0]]->error("ValueError", table,
                                            " is missing, but other servers have the table: call init_data again");
    }
    TableInfo info;
    for (size_t i = 0; i < states.size(); ++i) info = checked(table, states[i], i);
    const std::lock_guard<std::mutex> lock(mutex_);
    return tables_[table] = info;
  }

  // Reads rows. An id without a row reads as its initial row, and gets none.
  // ids: (n,). rows: (n, dim), the memory to write to. Rows of 16 bits are converted; that is exact.
  void pull(const std::string& table, const int64_t* ids, int64_t n, float* rows) {
    const TableInfo info = known(table);
    const int bits = info.dtype == "float16" || info.dtype == "bfloat16" ? 16 : 32;
    const bool brain = info.dtype == "bfloat16";
    const int64_t dim = info.dim;
    read(table, detail::pb::PullHeader::ROWS, ids, n, static_cast<size_t>(dim * bits / 8),
         [=](const char* entry, int64_t place) {
           float* row = rows + place * dim;
           if (bits == 32) {
             std::memcpy(row, entry, static_cast<size_t>(dim) * 4);
           } else {
             for (int64_t i = 0; i < dim; ++i) row[i] = detail::of_16_bits(entry + 2 * i, brain);
           }
         });
  }

  // The same. Returns (n, dim), row after row.
  std::vector<float> pull(const std::string& table, const std::vector<int64_t>& ids) {
    std::vector<float> rows(ids.size() * static_cast<size_t>(known(table).dim));
    pull(table, ids.data(), static_cast<int64_t>(ids.size()), rows.data());
    return rows;
  }

  // Returns for each id whether it has a row: 1 or 0.
  std::vector<uint8_t> exists(const std::string& table, const std::vector<int64_t>& ids) {
    std::vector<uint8_t> found(ids.size());
    known(table);
    read(table, detail::pb::PullHeader::FOUND, ids.data(), static_cast<int64_t>(ids.size()), 1,
         [&](const char* entry, int64_t place) { found[static_cast<size_t>(place)] = static_cast<uint8_t>(*entry); });
    return found;
  }

  // Writes rows (n, dim) as the weights of ids (n,). The optimizer's state stays. Of equal ids, the last one counts.
  void push(const std::string& table, const int64_t* ids, int64_t n, const float* rows) {
    const int64_t dim = known(table).dim;
    in_pieces(n, dim * 4, [&](int64_t first, int64_t count) {
      write(table, detail::pb::WriteHeader::PUSH, ids + first, count, rows + first * dim);
    });
  }
  void push(const std::string& table, const std::vector<int64_t>& ids, const std::vector<float>& rows) {
    check_size(table, "rows", ids.size(), rows.size());
    push(table, ids.data(), static_cast<int64_t>(ids.size()), rows.data());
  }

  // Applies the table's optimizer to the rows of ids (n,), with gradients (n, dim). Makes the rows that are missing.
  // The gradients of equal ids are added. One call is one step of the table, and a server takes up to 128 MiB of it.
  void update(const std::string& table, const int64_t* ids, int64_t n, const float* gradients) {
    write(table, detail::pb::WriteHeader::UPDATE, ids, n, gradients);
  }
  void update(const std::string& table, const std::vector<int64_t>& ids, const std::vector<float>& gradients) {
    check_size(table, "gradients", ids.size(), gradients.size());
    update(table, ids.data(), static_cast<int64_t>(ids.size()), gradients.data());
  }

  // Deletes the rows of ids. Returns how many rows there were.
  int64_t erase(const std::string& table, const std::vector<int64_t>& ids) {
    int64_t deleted = 0;
    in_pieces(static_cast<int64_t>(ids.size()), 0, [&](int64_t first, int64_t count) {
      deleted += write(table, detail::pb::WriteHeader::DELETE, ids.data() + first, count, nullptr);
    });
    return deleted;
  }

 private:
  // The state of the set that calls are for.
  struct Joined {
    std::string epoch;              // its label
    std::vector<std::string> runs;  // the run of each server
    std::vector<uint32_t> owners;   // for each slot, the index of the connection to the server of its ids

    std::string run(size_t i) const { return epoch + "/" + runs[i]; }  // the name of a run in calls
  };

  // The ids of a call, server by server. One server needs no copy.
  struct Split {
    std::vector<int64_t> ids, places;
    std::vector<Part> parts;
  };

  // A number of a write, as long as the write may be repeated.
  class Number {
   public:
    explicit Number(Client& client) : client_(client) {
      const std::lock_guard<std::mutex> lock(client.mutex_);
      value = ++client.requests_;
      client.pending_.insert(value);
    }
    ~Number() {
      const std::lock_guard<std::mutex> lock(client_.mutex_);
      client_.pending_.erase(value);
    }
    Number(const Number&) = delete;
    Number& operator=(const Number&) = delete;

    uint64_t value;

   private:
    Client& client_;
  };

  static constexpr int kAttempts = 4;  // after the first, while other clients change the states of the servers

  static std::string new_name() {
    std::random_device random;
    std::string name;
    for (int i = 0; i < 32; ++i) name += "0123456789abcdef"[random() % 16];
    return name;
  }

  void check_process() const {
    if (getpid() != process_) throw detail::invalid("the client was made in another process; make one in each process");
  }

  std::string addresses() const { return detail::joined(connections_, ", "); }

  // Calls every server at the same time. `call` gets the index of a connection. No call is running any more when it
  // returns or throws the first error.
  template <class Call>
  void each(const Call& call) {
    std::vector<std::future<void>> others;
    std::exception_ptr error;
    for (size_t i = 1; i < connections_.size(); ++i) others.push_back(std::async(std::launch::async, call, i));
    const auto keep_error = [&](const auto& run) {
      try {
        run();
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    };
    keep_error([&] { call(size_t{0}); });
    for (std::future<void>& other : others) keep_error([&] { other.get(); });
    if (error) std::rethrow_exception(error);
  }

  States describe_all(const std::string& table) {
    States states(connections_.size());
    each([&](size_t i) { states[i] = connections_[i]->describe(table); });
    return states;
  }

  // Notes the epoch in which all servers are, and their runs. Servers that wait are resumed.
  // follow: Whether the client may go on in another epoch than before. If not, the epoch of before is returned.
  // described: Gets the states of the servers.
  std::shared_ptr<const Joined> join(const std::string& table, bool follow, States* described = nullptr) {
    const std::shared_ptr<const Joined> known = noted();
    States before;
    for (int left = kAttempts;; --left) {
      States states = describe_all(table);
      try {
        detail::check_one_epoch(table, connections_, states);
      } catch (const Error&) {  // the states may be of different moments, if another client changes them meanwhile
        if (left == 0 || same(states, before)) throw;
        before = std::move(states);
        continue;
      }
      auto joined = std::make_shared<Joined>();
      joined->epoch = detail::label_of(states[0]);
      for (size_t i = 0; known && i < states.size(); ++i) {
        if (detail::has_lost(states[i], known->epoch, known->runs[i])) {
          throw connections_[i]->error("ServerRestartedError", table,
                                       " has older rows than this client has seen, because its data directory was "
                                       "rolled back or is a copy: only a new client continues with them");
        }
      }
      try {
        for (size_t i = 0; i < states.size(); ++i) {
          joined->runs.push_back(states[i].waits() ? resume(table, states[i], i) : detail::run_of(states[i]));
        }
      } catch (const Error& error) {  // another client has begun an epoch or resumed a server meanwhile
        if (left == 0 || error.kind() != "ServerRestartedError") throw;
        continue;
      }
      std::map<uint32_t, uint32_t> index;
      for (uint32_t i = 0; i < states.size(); ++i) index[states[i].member()] = i;
      for (const uint32_t member : states[0].slots()) joined->owners.push_back(index.at(member));
      if (described != nullptr) *described = std::move(states);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (joined_ && joined_->owners != joined->owners) {  // calls in progress have split their ids by the map of slots
        throw Error("ServerSetError", "", table,
                    "the rows of the servers " + addresses() + " were distributed anew: make a new client");
      }
      if (joined_ && joined_->epoch != joined->epoch && !follow) return joined_;
      return joined_ = joined;
    }
  }

  static bool same(const States& one, const States& other) {
    return std::equal(one.begin(), one.end(), other.begin(), other.end(), [](const auto& a, const auto& b) {
      return google::protobuf::util::MessageDifferencer::Equals(a, b);
    });
  }

  // Lets a server that was stopped go on in its epoch. Returns its next run.
  std::string resume(const std::string& table, const detail::pb::DescribeReply& state, size_t waits) {
    detail::pb::ResumeRequest request;
    request.set_phase(detail::pb::ResumeRequest::PREPARE);
    request.set_epoch(detail::label_of(state));
    request.set_member(state.member());
    request.set_before(detail::run_of(state));
    request.set_run(connections_[waits]->resume(table, request).run());
    request.set_phase(detail::pb::ResumeRequest::NOTE);
    each([&](size_t i) {
      if (i != waits) connections_[i]->resume(table, request);
    });
    request.set_phase(detail::pb::ResumeRequest::COMMIT);
    connections_[waits]->resume(table, request);
    return request.run();
  }

  std::shared_ptr<const Joined> noted() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return joined_;
  }

  // Makes the attempts of a call in one epoch, until no server refuses it as one for an earlier run.
  template <class Attempt>
  void in_runs(const std::string& table, const Attempt& attempt) {
    std::shared_ptr<const Joined> now = noted();
    if (now == nullptr) now = join(table, true);
    for (int left = kAttempts;; --left) {
      try {
        return attempt(*now);
      } catch (const Error& error) {
        if (error.kind() != detail::kServerResumed) throw;
        if (left == 0) throw Error("ServiceError", error.server(), error.table(), error.what());
      }
      // Another thread may have found the runs. A call for an epoch that has ended is refused as such.
      const std::shared_ptr<const Joined> found = noted();
      now = found != now && found->epoch == now->epoch ? found : join(table, false);
    }
  }

  TableInfo known(const std::string& table) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = tables_.find(table);
      if (found != tables_.end()) return found->second;
    }
    return describe(table);
  }

  TableInfo checked(const std::string& table, const detail::pb::DescribeReply& state, size_t i) const {
    const detail::Spec spec = detail::spec_of(state.tables().at(table));
    const auto n = static_cast<int64_t>(connections_.size());
    if (spec.dim < 1) {
      throw connections_[i]->error("ServiceError", table, ": the specification of the table cannot be read");
    }
    if (spec.shard != state.member() || spec.shards != n) {
      throw connections_[i]->error("ValueError", table,
                                   " holds part " + std::to_string(spec.shard + 1) + " of " +
                                       std::to_string(spec.shards) + ", and is server " +
                                       std::to_string(state.member() + 1) + " of " + std::to_string(n) + " in its set");
    }
    if (spec.dtype != "float32" && spec.dtype != "float16" && spec.dtype != "bfloat16" && spec.dtype != "int8") {
      throw connections_[i]->error("ValueError", table,
                                   " has rows of the type " + spec.dtype + ", which this client does not know");
    }
    return {spec.dim, spec.dtype};
  }

  void check_size(const std::string& table, const char* name, size_t ids, size_t values) {
    const auto dim = static_cast<size_t>(known(table).dim);
    if (values != ids * dim) {
      throw Error("ValueError", "", table,
                  "table '" + table + "': " + name + " must have " + std::to_string(ids) + " x " + std::to_string(dim) +
                      " values, got " + std::to_string(values));
    }
  }

  Split split(const Joined& joined, const int64_t* ids, int64_t n) const {
    Split made;
    const size_t servers = connections_.size();
    if (servers == 1) {
      made.parts.push_back({ids, n, nullptr});
      return made;
    }
    const auto all = static_cast<size_t>(n);
    const auto slots = static_cast<int64_t>(joined.owners.size());
    std::vector<uint32_t> owner(all);
    std::vector<size_t> begins(servers + 1, 0);
    for (size_t i = 0; i < all; ++i) {
      owner[i] = joined.owners[static_cast<size_t>(slot_of(ids[i], slots))];
      ++begins[owner[i] + 1];
    }
    for (size_t s = 0; s < servers; ++s) begins[s + 1] += begins[s];
    made.ids.resize(all);
    made.places.resize(all);
    for (size_t s = 0; s < servers; ++s) {
      made.parts.push_back({made.ids.data() + begins[s], static_cast<int64_t>(begins[s + 1] - begins[s]),
                            made.places.data() + begins[s]});
    }
    for (size_t i = 0; i < all; ++i) {
      const size_t place = begins[owner[i]]++;
      made.ids[place] = ids[i];
      made.places[place] = static_cast<int64_t>(i);
    }
    return made;
  }

  template <class Put>
  void read(const std::string& table, detail::pb::PullHeader::Want want, const int64_t* ids, int64_t n,
            size_t entry_bytes, const Put& put) {
    check_call(table, n);
    const auto attempt = [&](const Joined& now) {
      const Split parts = split(now, ids, n);
      detail::pb::PullHeader header;
      header.set_table(table);
      header.set_want(want);
      each([&](size_t i) {
        detail::pb::PullHeader own = header;
        own.set_epoch(now.run(i));
        connections_[i]->pull(own, {parts.parts[i], entry_bytes, put});
      });
    };
    try {
      return in_runs(table, attempt);
    } catch (const Error& error) {
      if (error.kind() != "ServerRestartedError") throw;
      const std::lock_guard<std::mutex> lock(mutex_);
      check_nothing_lost(error, requests_ > 0);
    }
    join(table, true);
    in_runs(table, attempt);  // all rows again, so that they are of one epoch
  }

  int64_t write(const std::string& table, detail::pb::WriteHeader::Kind kind, const int64_t* ids, int64_t n,
                const float* rows) {
    const int64_t dim = known(table).dim;
    check_call(table, n);
    const Number number(*this);
    std::atomic<size_t> sent{0};
    std::atomic<bool> applied{false};
    std::atomic<uint64_t> deleted{0};
    const auto attempt = [&](const Joined& now) {
      const Split parts = split(now, ids, n);
      deleted = 0;  // a server that is asked again repeats its answer
      each([&](size_t i) {
        const auto header = [&] {
          ++sent;
          detail::pb::WriteHeader made;
          made.set_table(table);
          made.set_epoch(now.run(i));
          made.set_client(name_);
          made.set_request(number.value);
          made.set_kind(kind);
          made.set_ids(static_cast<uint64_t>(parts.parts[i].n));
          made.set_float32(rows != nullptr);
          const std::lock_guard<std::mutex> lock(mutex_);
          made.set_done_before(*pending_.begin());
          return made;
        };
        deleted += connections_[i]->write(table, header, parts.parts[i], rows, dim);
        applied = true;
      });
    };
    try {
      in_runs(table, attempt);
      return static_cast<int64_t>(deleted);
    } catch (const Error& error) {
      if (error.kind() != "ServerRestartedError") throw;
      // A repeated attempt means that the reply to one was lost.
      check_nothing_lost(error, number.value > 1 || applied || sent > connections_.size());
    }
    join(table, true);
    in_runs(table, attempt);
    return static_cast<int64_t>(deleted);
  }

  // Calls `call` for pieces of n ids that a server writes in one call each. Other calls on the table wait for a write.
  template <class Call>
  static void in_pieces(int64_t n, int64_t row_bytes, const Call& call) {
    const int64_t most = std::max<int64_t>(1, (int64_t{1} << 27) / std::max<int64_t>(128, 8 + row_bytes));
    int64_t first = 0;
    do {
      call(first, std::min(most, n - first));
      first += most;
    } while (first < n);
  }

  void check_call(const std::string& table, int64_t n) const {
    check_process();
    if (n < 0) throw Error("ValueError", "", table, "table '" + table + "': n must not be negative");
  }

  // Throws the error of a client whose writes may be lost, for the error of a server that is in another epoch.
  static void check_nothing_lost(const Error& error, bool has_written) {
    if (has_written) {
      throw Error(error.kind(), error.server(), error.table(),
                  std::string(error.what()) + "; this client's writes are lost: continue with a new client");
    }
  }

  const pid_t process_;
  const std::string name_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::mutex mutex_;
  std::shared_ptr<const Joined> joined_;
  std::map<std::string, TableInfo> tables_;
  uint64_t requests_ = 0;
  std::set<uint64_t> pending_;
};

}  // namespace recstore
