#include "server_rows.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/slots.h"
#include "message_fields.h"
#include "row_links.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

using recstore_service::CallFailed;
using recstore_service::Reader;
using Seconds = std::chrono::duration<double>;

constexpr Seconds kPatience{5.0};  // in which a call is repeated, and after which a silent server has failed
// Likewise for a pair, whose backup becomes the primary when a lease of 3 s has ended.
constexpr Seconds kPairPatience{10.0};
constexpr Seconds kPairHangs{2.0};
// Between two attempts of a call.
constexpr Seconds kFirstPause{0.02};
constexpr Seconds kLongestPause{0.25};
constexpr Seconds kMemoryAgain{10.0};  // until shared memory is asked for again, which a server has refused
constexpr int kMostByMemory = 8;       // connections by shared memory to a server; further calls go by TCP

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  size_t end = text.find(separator);
  while (end != std::string::npos) {
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
    end = text.find(separator, begin);
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::string nested(int field, const std::string& message) {
  std::string out;
  recstore_service::put_varint(out, static_cast<uint64_t>(field) << 3 | 2);
  recstore_service::put_varint(out, message.size());
  return out + message;
}

// A SegmentRequest for the rows of ids, or for which of them have one.
std::string request_of(const std::string& table, const std::string& run, bool rows, int64_t ids) {
  using namespace recstore_service;
  std::string of_table;
  std::string header;
  std::string sizes;
  if (rows) {
    put_text(of_table, 1, table);
    put_number(of_table, 2, static_cast<uint64_t>(ids));
    put_number(of_table, 3, 1);  // ids without a row read as zeros
  } else {
    put_text(header, 1, table);
  }
  put_text(header, 2, run);
  if (rows) {
    header += nested(4, of_table);
  } else {
    put_number(header, 3, static_cast<uint64_t>(Want::kFound));
  }
  put_number(sizes, 3, static_cast<uint64_t>(ids) * 8);
  return nested(1, header) + sizes;
}

// A DescribeReply.
struct State {
  std::string set;
  std::string token;
  uint64_t member = 0;
  uint64_t members = 0;
  uint64_t epoch = 0;
  bool live = false;
  bool waits = false;
  std::vector<uint64_t> slots;
  std::vector<std::string> runs;
  std::map<std::string, std::string> tables;

  // Throws CallFailed.
  explicit State(const std::string& message) {
    for (Reader reader(message.data(), message.size()); reader.next();) {
      switch (reader.field("-20000222222220")) {
        case 1: set = reader.text(); break;
        case 2: member = reader.number(); break;
        case 3: members = reader.number(); break;
        case 4: epoch = reader.number(); break;
        case 5: live = reader.number() != 0; break;
        case 6:
          for (Reader packed = reader.message(); !packed.at_end();) slots.push_back(packed.number());
          break;
        case 10: add_table(reader.message()); break;
        case 11: token = reader.text(); break;
        case 12: runs.push_back(reader.text()); break;
        case 14: waits = reader.number() != 0; break;
        default: reader.skip();
      }
    }
  }
  std::string label() const { return set + "/" + std::to_string(epoch) + (token.empty() ? "" : "/" + token); }

 private:
  void add_table(Reader reader) {
    std::string name;
    std::string spec;
    while (reader.next()) {
      switch (reader.field("-22")) {
        case 1: name = reader.text(); break;
        case 2: spec = reader.text(); break;
        default: reader.skip();
      }
    }
    tables.emplace(std::move(name), std::move(spec));
  }
};

// Makes a step of a call on a server, whose number its errors get.
template <class Step>
auto of_server(size_t server, const Step& step) {
  try {
    return step();
  } catch (Passing& error) {
    error.server = server;
    throw;
  } catch (Refused& error) {
    error.server = server;
    throw;
  }
}

}  // namespace

// How all servers of the set are called, until one of them begins another run.
struct RowServers::Agreed {
  std::vector<std::string> runs;   // of each server
  std::vector<std::string> names;  // of each server: RowLink::server of its connections
  // For each slot, the server; empty for a set of one server.
  std::vector<uint32_t> owner;
  std::vector<std::map<std::string, std::string>> tables;  // of each server: the JSON of a TableSpec by name
};

// What a process has of the servers. A forked process makes its own and leaves that of its parent alone, whose locks
// may be held for ever there.
struct RowServers::Process {
  struct Peer {
    std::atomic<size_t> side{0};  // the server of the pair that is called
    std::vector<std::unique_ptr<RowLink>> idle;
    std::atomic<int> by_memory{0};
    Clock::time_point memory_not_before;
  };

  explicit Process(size_t servers) : peers(servers) {}
  ~Process() {
    for (Peer& peer : peers) peer.idle.clear();
  }

  const pid_t pid = getpid();
  std::vector<Peer> peers;
  std::mutex mutex;
  std::condition_variable changed;
  std::shared_ptr<const Agreed> agreed;  // null: the servers have to be described
  bool describing = false;
  uint64_t failures = 0;  // of descriptions
  // The last failure is one of these; an exception itself is not for two threads.
  std::shared_ptr<const Passing> passing;
  std::shared_ptr<const Refused> refused;
};

// The part of a call that one server gets.
struct RowServers::Flow {
  size_t server = 0;
  std::unique_ptr<RowLink> link;
  const int64_t* ids = nullptr;     // (n,)
  const int64_t* places = nullptr;  // (n,): the positions of the ids in the call; null: the order of the ids
  int64_t n = 0;
  int64_t entry_bytes = 1;
  std::function<std::string(int64_t n)> message;
  RowLink::Sink sink;
  int64_t begun = 0;  // ids that were sent
  int64_t done = 0;   // ids whose entries have arrived
  bool is_over = false;

  void begin() {
    const int64_t count = std::min(n - begun, link->most_ids(entry_bytes));
    link->begin(message(count), ids == nullptr ? nullptr : ids + begun, count);
    begun += count;
  }
  // Moves what can be moved without waiting. Returns the events to wait for.
  short advance() {
    while (!is_over) {
      const short events = link->advance(sink);
      if (events != 0) return events;
      if (done != begun) throw Passing("the server has answered with a wrong number of rows");
      if (begun == n) {
        is_over = true;
      } else {
        begin();
      }
    }
    return 0;
  }
};

std::shared_ptr<RowServers> RowServers::of(const std::string& servers, bool tls) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, bool>, std::weak_ptr<RowServers>> sets;
  [[maybe_unused]] static const int registered =
      pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<RowServers>& known = sets[{servers, tls}];
  std::shared_ptr<RowServers> set = known.lock();
  if (set == nullptr) {
    set = std::shared_ptr<RowServers>(new RowServers(servers, tls));
    known = set;
  }
  return set;
}

RowServers::RowServers(const std::string& servers, bool tls) : tls_(tls) {
  for (const std::string& server : split(servers, ',')) {
    servers_.push_back(split(server, '/'));
    for (const std::string& side : servers_.back()) {
      const size_t colon = side.rfind(':');
      const int port = colon == std::string::npos ? 0 : std::atoi(side.c_str() + colon + 1);
      if (colon == 0 || port < 1 || port > 65535 || servers_.back().size() > 2) {
        throw InvalidArgument("servers must be host:port, or host:port/host:port for a pair, got " + server);
      }
    }
  }
}

RowServers::~RowServers() {
  Process* process = process_;
  if (process != nullptr && process->pid == getpid()) delete process;
}

RowServers::Process& RowServers::process() {
  Process* present = process_;
  if (present != nullptr && present->pid == getpid()) return *present;
  auto process = std::make_unique<Process>(servers_.size());
  if (process_.compare_exchange_strong(present, process.get())) return *process.release();
  return *present;  // another thread was first
}

const std::string& RowServers::address(Process& process, size_t server) const {
  return servers_[server][process.peers[server].side];
}

void RowServers::lookup(const ServerTable& table, const int64_t* ids, int64_t n, float* out) {
  const int64_t dim = table.dim;
  if (table.dtype != "float16" && table.dtype != "bfloat16") {
    const int64_t bytes = dim * static_cast<int64_t>(sizeof(float));
    return call(table, true, ids, n, {bytes, [=](const char* rows, int64_t place, int64_t count) {
                                        std::memcpy(out + place * dim, rows, static_cast<size_t>(count * bytes));
                                      }});
  }
  const RowType type = table.dtype == "float16" ? RowType::kFloat16 : RowType::kBfloat16;
  const int64_t bytes = dim * 2;
  const auto widen = row_loops().widen;
  const std::vector<float> row(static_cast<size_t>(dim) + 16);
  call(table, true, ids, n,
       {bytes, [=, aligned = row, wide = row](const char* rows, int64_t place, int64_t count) mutable {
          for (int64_t i = 0; i < count; ++i) {
            std::memcpy(aligned.data(), rows + i * bytes, static_cast<size_t>(bytes));
            widen(type, aligned.data(), dim, wide.data());
            std::copy_n(wide.data(), dim, out + (place + i) * dim);
          }
        }});
}

void RowServers::contains(const ServerTable& table, const int64_t* ids, int64_t n, bool* found) {
  call(table, false, ids, n, {1, [=](const char* bytes, int64_t place, int64_t count) {
                                for (int64_t i = 0; i < count; ++i) found[place + i] = bytes[i] != 0;
                              }});
}

void RowServers::call(const ServerTable& table, bool rows, const int64_t* ids, int64_t n, const Entries& entries) {
  if (n == 0) return;
  Process& process = this->process();
  const bool pairs = std::any_of(servers_.begin(), servers_.end(), [](const auto& sides) { return sides.size() > 1; });
  const Seconds patience = pairs ? kPairPatience : kPatience;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(patience);
  const auto named = [&](size_t server) {
    return "table '" + table.name + "' on server " + address(process, server) + ": ";
  };
  for (Seconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    std::vector<size_t> sides;
    for (const Process::Peer& peer : process.peers) sides.push_back(peer.side);
    try {
      return attempt(process, table, rows, ids, n, entries);
    } catch (const Refused& error) {
      throw std::runtime_error(named(error.server) + error.what());
    } catch (const Passing& error) {
      if (Clock::now() + pause > end) {
        throw std::runtime_error(named(error.server) + error.what() + " (repeated for " +
                                 std::to_string(static_cast<int>(patience.count())) + " s)");
      }
      const size_t server = error.server;
      size_t side = sides[server];
      if (servers_[server].size() > 1 && process.peers[server].side.compare_exchange_strong(side, 1 - side)) {
        const std::lock_guard<std::mutex> lock(process.mutex);
        process.peers[server].idle.clear();
      }
    }
    std::this_thread::sleep_for(pause);
  }
}

// Throws Passing or Refused if a server does not have the table as the exported model knows it.
void RowServers::check_table(const Agreed& agreed, const ServerTable& table) {
  const std::string spec = "{\"dim\": " + std::to_string(table.dim) + ", \"dtype\": \"" + table.dtype + "\",";
  for (size_t s = 0; s < agreed.tables.size(); ++s) {
    const auto entry = agreed.tables[s].find(table.name);
    if (entry == agreed.tables[s].end()) {
      throw Passing("the server has no such table: a model that trains creates it, or a save has it", s);
    }
    if (entry->second.compare(0, spec.size(), spec) != 0) {
      throw Refused("the table has another dim or data type than the exported model: export the model anew", s);
    }
  }
}

// Divides ids among several servers by their slots. sorted: receives the ids in the order of their servers; places:
// their positions in `ids`. Both must outlive the flows.
void RowServers::divide(const Agreed& agreed, const int64_t* ids, int64_t n, std::vector<Flow>& flows,
                        std::vector<int64_t>& sorted, std::vector<int64_t>& places) {
  const auto slots = static_cast<int64_t>(agreed.owner.size());
  std::vector<uint32_t> server_of(static_cast<size_t>(n));
  std::vector<int64_t> ends(flows.size() + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t server = agreed.owner[static_cast<size_t>(slot_of(ids[i], slots))];
    server_of[static_cast<size_t>(i)] = server;
    ++ends[server + 1];
  }
  for (size_t s = 0; s < flows.size(); ++s) ends[s + 1] += ends[s];
  sorted.resize(static_cast<size_t>(n));
  places.resize(static_cast<size_t>(n));
  for (size_t s = 0; s < flows.size(); ++s) {
    flows[s].ids = sorted.data() + ends[s];
    flows[s].places = places.data() + ends[s];
    flows[s].n = ends[s + 1] - ends[s];
  }
  for (int64_t i = 0; i < n; ++i) {
    const auto place = static_cast<size_t>(ends[server_of[static_cast<size_t>(i)]]++);
    sorted[place] = ids[i];
    places[place] = i;
  }
}

void RowServers::attempt(Process& process, const ServerTable& table, bool rows, const int64_t* ids, int64_t n,
                         const Entries& entries) {
  const std::shared_ptr<const Agreed> agreed = this->agreed(process);
  std::vector<Flow> flows(servers_.size());
  std::vector<int64_t> sorted;
  std::vector<int64_t> places;
  try {
    check_table(*agreed, table);
    for (size_t s = 0; s < flows.size(); ++s) {
      flows[s].server = s;
      flows[s].ids = ids;
      flows[s].n = n;
    }
    if (flows.size() > 1) divide(*agreed, ids, n, flows, sorted, places);
    for (Flow& flow : flows) {
      flow.entry_bytes = entries.bytes;
      if (flow.n == 0) {
        flow.is_over = true;
        continue;
      }
      flow.message = [&](int64_t count) { return request_of(table.name, agreed->runs[flow.server], rows, count); };
      flow.sink = [&](const char* bytes, uint64_t size) {
        const auto count = static_cast<int64_t>(size) / entries.bytes;
        if (static_cast<int64_t>(size) % entries.bytes != 0 || count > flow.begun - flow.done) {
          throw Passing("the server has answered with a wrong number of rows");
        }
        if (flow.places == nullptr) {
          entries.put(bytes, flow.done, count);
        } else {
          for (int64_t i = 0; i < count; ++i) entries.put(bytes + i * entries.bytes, flow.places[flow.done + i], 1);
        }
        flow.done += count;
      };
      flow.link = take(process, flow.server);
      if (flow.link->server == agreed->names[flow.server]) continue;
      {
        const std::lock_guard<std::mutex> lock(process.mutex);
        process.peers[flow.server].idle.clear();  // others of these may be to the same server
      }
      unreached("a connection has reached another server than the connections before", flow.server);
    }
    exchange(flows);
  } catch (const Passing&) {
    const std::lock_guard<std::mutex> lock(process.mutex);
    if (process.agreed == agreed) process.agreed = nullptr;
    throw;
  }
  for (Flow& flow : flows) {
    if (flow.link != nullptr) give_back(process, flow.server, std::move(flow.link));
  }
}

// Makes the calls of all flows at the same time.
void RowServers::exchange(std::vector<Flow>& flows) {
  Seconds quiet = kPatience;
  for (Flow& flow : flows) {
    if (flow.is_over) continue;
    if (servers_[flow.server].size() > 1) quiet = kPairHangs;
    of_server(flow.server, [&] { flow.begin(); });
  }
  std::vector<pollfd> waiting;
  while (true) {
    waiting.clear();
    size_t first = 0;
    for (Flow& flow : flows) {
      const short events = of_server(flow.server, [&] { return flow.advance(); });
      if (flow.is_over) continue;
      if (waiting.empty()) first = flow.server;
      waiting.push_back({flow.link->fd, events, 0});
    }
    if (waiting.empty()) return;
    const int ready =
        poll(waiting.data(), waiting.size(), milliseconds(std::chrono::duration_cast<Clock::duration>(quiet)));
    if (ready == 0) unreached("the server does not answer", first);
  }
}

std::shared_ptr<const RowServers::Agreed> RowServers::agreed(Process& process) {
  std::unique_lock<std::mutex> lock(process.mutex);
  const uint64_t failures = process.failures;
  process.changed.wait(lock, [&] { return process.agreed != nullptr || !process.describing; });
  if (process.agreed != nullptr) return process.agreed;
  if (process.failures != failures) {  // another thread has asked meanwhile
    if (process.refused != nullptr) throw Refused(process.refused->what(), process.refused->server);
    throw Passing(process.passing->what(), process.passing->server);
  }
  process.describing = true;
  lock.unlock();
  std::shared_ptr<const Agreed> agreed;
  std::shared_ptr<const Passing> passing;
  std::shared_ptr<const Refused> refused;
  try {
    agreed = std::make_shared<const Agreed>(described(process));
  } catch (const Refused& error) {
    refused = std::make_shared<const Refused>(error.what(), error.server);
  } catch (const Passing& error) {
    passing = std::make_shared<const Passing>(error.what(), error.server);
  } catch (const std::exception& error) {
    passing = std::make_shared<const Passing>(error.what());
  }
  lock.lock();
  process.describing = false;
  process.changed.notify_all();
  if (agreed != nullptr) {
    process.agreed = agreed;
    return agreed;
  }
  ++process.failures;
  process.refused = refused;
  process.passing = passing;
  if (refused != nullptr) throw Refused(refused->what(), refused->server);
  throw Passing(passing->what(), passing->server);
}

RowServers::Agreed RowServers::described(Process& process) {
  const size_t n = servers_.size();
  std::vector<Flow> flows(n);
  std::vector<std::string> messages(n);
  for (size_t s = 0; s < n; ++s) {
    flows[s].server = s;
    flows[s].message = [](int64_t) { return nested(7, ""); };
    flows[s].sink = [&, s](const char* bytes, uint64_t size) { messages[s].append(bytes, size); };
    flows[s].link = take_tcp(process, s);
  }
  exchange(flows);
  Agreed agreed;
  for (Flow& flow : flows) {
    agreed.names.push_back(flow.link->server);
    give_back(process, flow.server, std::move(flow.link));
  }
  std::vector<State> states;
  for (size_t s = 0; s < n; ++s) {
    try {
      states.emplace_back(messages[s]);
    } catch (const CallFailed&) {
      throw Passing("the state of the server cannot be read", s);
    }
  }
  std::vector<uint32_t> server_of(n, UINT32_MAX);  // by the number of a server in its set
  for (size_t s = 0; s < n; ++s) {
    const State& state = states[s];
    if (state.set.empty()) {
      throw Passing("the server has no tables and is in no set yet: a client that trains begins", s);
    }
    if (state.members != n || state.member >= n || state.set != states[0].set ||
        server_of[state.member] != UINT32_MAX) {
      throw Refused("the servers that the exported model names are not all servers of one set: export the model anew",
                    s);
    }
    if (state.waits) {
      throw Passing(
          "the server was stopped and started again, and waits for a client that trains, which lets the set go on", s);
    }
    if (!state.live) {
      throw Passing("the server was killed and started again, and waits for a client that brings the set to one save",
                    s);
    }
    if (state.label() != states[0].label()) {
      throw Passing("the servers are in different epochs: a client that trains brings them to one save", s);
    }
    const bool fits = n == 1 || (!state.slots.empty() && state.slots == states[0].slots &&
                                 *std::max_element(state.slots.begin(), state.slots.end()) < n);
    if (!fits) throw Passing("the servers have different maps of slots", s);
    server_of[state.member] = static_cast<uint32_t>(s);
    agreed.runs.push_back(state.label() + "/" + (state.member < state.runs.size() ? state.runs[state.member] : ""));
    agreed.tables.push_back(state.tables);
  }
  if (n > 1) {
    for (const uint64_t member : states[0].slots) agreed.owner.push_back(server_of[member]);
  }
  return agreed;
}

// Makes a call about the server: `field` is its field in SegmentRequest. Returns the array of the reply.
std::string RowServers::ask(std::unique_ptr<RowLink>& link, size_t server, int field) {
  std::vector<Flow> flows(1);
  std::string reply;
  flows[0].server = server;
  flows[0].link = std::move(link);
  flows[0].message = [field](int64_t) { return nested(field, ""); };
  flows[0].sink = [&](const char* bytes, uint64_t size) { reply.append(bytes, size); };
  exchange(flows);
  link = std::move(flows[0].link);
  return reply;
}

// Returns a connection that waits for a call; null if there is none.
std::unique_ptr<RowLink> RowServers::idle(Process& process, size_t server, bool by_memory) {
  const std::lock_guard<std::mutex> lock(process.mutex);
  auto& idle = process.peers[server].idle;
  for (size_t i = idle.size(); i-- > 0;) {
    if (idle[i]->is_by_memory() != by_memory) continue;
    std::unique_ptr<RowLink> link = std::move(idle[i]);
    idle.erase(idle.begin() + static_cast<std::ptrdiff_t>(i));
    if (link->is_alive()) return link;
  }
  return nullptr;
}

std::unique_ptr<RowLink> RowServers::take(Process& process, size_t server) {
  if (environment("RECSTORE_SHARED_MEMORY") == "0") return take_tcp(process, server);
  if (std::unique_ptr<RowLink> link = idle(process, server, true)) return link;
  Process::Peer& peer = process.peers[server];
  bool asks;
  {
    const std::lock_guard<std::mutex> lock(process.mutex);
    asks = peer.by_memory < kMostByMemory && Clock::now() >= peer.memory_not_before;
  }
  std::unique_ptr<RowLink> link = take_tcp(process, server);
  if (!asks) return link;
  const std::string offer = ask(link, server, 8);
  std::unique_ptr<RowLink> by_memory = memory_link(offer, link->side, peer.by_memory);
  if (by_memory == nullptr) {
    const std::lock_guard<std::mutex> lock(process.mutex);
    peer.memory_not_before = Clock::now() + std::chrono::duration_cast<Clock::duration>(kMemoryAgain);
    return link;
  }
  by_memory->server = link->server;
  give_back(process, server, std::move(link));
  return by_memory;
}

std::unique_ptr<RowLink> RowServers::take_tcp(Process& process, size_t server) {
  if (std::unique_ptr<RowLink> link = idle(process, server, false)) return link;
  const size_t side = process.peers[server].side;
  const auto quiet = std::chrono::duration_cast<Clock::duration>(servers_[server].size() > 1 ? kPairHangs : kPatience);
  return of_server(server, [&] { return tcp_link(servers_[server][side], side, tls_, Clock::now() + quiet); });
}

void RowServers::give_back(Process& process, size_t server, std::unique_ptr<RowLink> link) {
  const std::lock_guard<std::mutex> lock(process.mutex);
  Process::Peer& peer = process.peers[server];
  if (link->is_idle && link->side == peer.side) peer.idle.push_back(std::move(link));
}

}  // namespace recstore
