// The functions of the library for Python's ctypes: see native.py. Objects are pointers, and no function throws.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "row_server.h"

using namespace recstore_service;

extern "C" {

// What a function reports besides its result: code is 0 if it has succeeded.
struct NativeStatus {
  int code;
  char details[4096];
  char error[64];
};

}  // extern "C"

namespace {

void set(NativeStatus* out, const Status& status) {
  out->code = status.code;
  std::snprintf(out->details, sizeof out->details, "%s", status.details.c_str());
  std::snprintf(out->error, sizeof out->error, "%s", status.error.c_str());
}

template <class Call>
auto guarded(NativeStatus* status, const Call& call) noexcept -> decltype(call()) {
  try {
    status->code = kOk;
    return call();
  } catch (const CallFailed& failed) {
    set(status, failed.status());
  } catch (const std::bad_alloc&) {
    set(status, {kResourceExhausted, "out of memory", "MemoryError"});
  } catch (const std::exception& failed) {
    set(status, {kInternal, failed.what(), "OSError"});
  }
  return decltype(call())();
}

}  // namespace

#define RECSTORE_EXPORT extern "C" __attribute__((visibility("default")))

RECSTORE_EXPORT Applied* recstore_applied_new(int64_t most_clients, double kept_s) {
  return new Applied(static_cast<size_t>(most_clients), kept_s);
}
RECSTORE_EXPORT void recstore_applied_delete(Applied* applied) { delete applied; }
// Returns the write that the caller has to carry out, for recstore_applied_finish; null if it has been carried out.
RECSTORE_EXPORT Applied::Mine* recstore_applied_begin(Applied* applied, const char* client, int64_t size,
                                                      uint64_t request, uint64_t done_before, uint64_t* deleted,
                                                      NativeStatus* status) {
  return guarded(status, [&]() -> Applied::Mine* {
    Applied::Mine mine = applied->begin(std::string(client, static_cast<size_t>(size)), request, done_before, *deleted);
    return mine == nullptr ? nullptr : new Applied::Mine(std::move(mine));
  });
}
RECSTORE_EXPORT void recstore_applied_finish(Applied* applied, const char* client, int64_t size, uint64_t request,
                                             Applied::Mine* mine, int failed, uint64_t deleted) {
  applied->finish(std::string(client, static_cast<size_t>(size)), request, *mine, failed != 0, deleted);
  delete mine;
}
RECSTORE_EXPORT void recstore_applied_begin_change(Applied* applied, NativeStatus* status) {
  guarded(status, [&] { applied->begin_change(); });
}
RECSTORE_EXPORT void recstore_applied_end_change(Applied* applied) { applied->end_change(); }
RECSTORE_EXPORT void recstore_applied_close(Applied* applied) { applied->close(); }
RECSTORE_EXPORT void recstore_applied_reopen(Applied* applied) { applied->reopen(); }
RECSTORE_EXPORT void recstore_applied_check_open(Applied* applied, NativeStatus* status) {
  guarded(status, [&] { applied->check_open(); });
}
RECSTORE_EXPORT int64_t recstore_applied_clients(Applied* applied) { return applied->clients(); }
RECSTORE_EXPORT void recstore_applied_each(Applied* applied, void (*visit)(const char*, uint64_t, int64_t, uint64_t)) {
  applied->for_each(visit);
}
RECSTORE_EXPORT void recstore_applied_clear(Applied* applied) { applied->clear(); }
RECSTORE_EXPORT void recstore_applied_add(Applied* applied, const char* client, uint64_t done_before, int64_t request,
                                          uint64_t deleted) {
  applied->add(client, done_before, request, deleted);
}

RECSTORE_EXPORT RunGate* recstore_gate_new() { return new RunGate; }
RECSTORE_EXPORT void recstore_gate_delete(RunGate* gate) { delete gate; }
RECSTORE_EXPORT void recstore_gate_set_run(RunGate* gate, const char* label) { gate->set_run(label); }
RECSTORE_EXPORT void recstore_gate_set_end(RunGate* gate, double in_seconds) {
  gate->set_end(RunGate::now() + in_seconds);
}
RECSTORE_EXPORT int recstore_gate_has_ended(RunGate* gate) { return gate->has_ended() ? 1 : 0; }
RECSTORE_EXPORT void recstore_gate_enter(RunGate* gate) { gate->enter(); }
RECSTORE_EXPORT void recstore_gate_leave(RunGate* gate) { gate->leave(); }
RECSTORE_EXPORT void recstore_gate_close(RunGate* gate) { gate->close(); }
RECSTORE_EXPORT void recstore_gate_open(RunGate* gate) { gate->open(); }

RECSTORE_EXPORT Replica* recstore_replica_new() { return new Replica; }
RECSTORE_EXPORT void recstore_replica_delete(Replica* replica) { delete replica; }
RECSTORE_EXPORT int recstore_replica_role(Replica* replica) { return static_cast<int>(replica->role()); }
RECSTORE_EXPORT void recstore_replica_set_role(Replica* replica, int role) {
  replica->set_role(static_cast<Replica::Role>(role));
}
RECSTORE_EXPORT void recstore_replica_lose(Replica* replica) { replica->lose(); }
RECSTORE_EXPORT const char* recstore_replica_reason(Replica* replica) { return replica->reason(); }
// Returns the lock of a turn, for recstore_replica_end_turn in the same thread.
RECSTORE_EXPORT std::unique_lock<std::mutex>* recstore_replica_begin_turn(Replica* replica, int from_primary,
                                                                          NativeStatus* status) {
  return guarded(status, [&] { return new std::unique_lock<std::mutex>(replica->turn(from_primary != 0)); });
}
RECSTORE_EXPORT void recstore_replica_end_turn(std::unique_lock<std::mutex>* turn) { delete turn; }
RECSTORE_EXPORT void recstore_replica_send(Replica* replica, const char* message, uint64_t size, char* const* arrays,
                                           const uint64_t* sizes) {
  replica->send(std::string(message, size), {arrays[0], arrays[1], arrays[2], arrays[3]},
                {sizes[0], sizes[1], sizes[2], sizes[3]});
}
RECSTORE_EXPORT void recstore_replica_wait(Replica* replica, NativeStatus* status) {
  guarded(status, [&] { replica->wait(replica->sent()); });
}
// library, ca, cert and key: see recstore_server_set_tls. ca: empty for no encryption.
// name: that of the backup, see recstore_server_name; empty for a backup of an earlier release.
RECSTORE_EXPORT void recstore_replica_follow(Replica* replica, const char* host, int port, const char* secret,
                                             const char* name, const char* library, const char* ca, const char* cert,
                                             const char* key, NativeStatus* status) {
  guarded(status, [&] {
    const auto tls = *ca == 0 ? nullptr : tls_context(library, true, cert, key, ca);
    replica->follow(host, port, secret, name, tls.get());
  });
}
RECSTORE_EXPORT int recstore_replica_wait_lost(Replica* replica, double seconds) {
  return replica->wait_lost(seconds) ? 1 : 0;
}

// Writes what a SegmentRequest says to `out`, which has at least eight times its size and 1000 bytes, for tests: texts
// in hexadecimal, and a learning rate as its bits.
RECSTORE_EXPORT void recstore_request_text(const char* message, int64_t size, char* out, NativeStatus* status) {
  guarded(status, [&] {
    const RowRequest request = parse_request(message, static_cast<size_t>(size));
    const auto number = [&](uint64_t value) {
      out += std::sprintf(out, "%llu ", static_cast<unsigned long long>(value));
    };
    const auto text = [&](const std::string& value) {
      for (const char c : value) out += std::sprintf(out, "%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      *out++ = ' ';
    };
    number(static_cast<uint64_t>(request.call));
    text(request.table);
    text(request.epoch);
    text(request.client);
    const bool is_pull = request.call == Call::kPull;
    number(is_pull ? static_cast<uint64_t>(request.want) : static_cast<uint64_t>(request.kind));
    number(request.request);
    number(request.done_before);
    number(request.ids);
    number(request.float32 ? 1 : 0);
    for (const uint64_t size_of_array : request.sizes) number(size_of_array);
    for (const TableIds& table : request.tables) {
      text(table.table);
      number(table.ids);
      number(table.zeros ? 1 : 0);
      uint64_t rate = 0;
      if (table.learning_rate.has_value()) std::memcpy(&rate, &*table.learning_rate, 8);
      number(table.learning_rate.has_value() ? 1 : 0);
      number(rate);
    }
    *out = 0;
  });
}

RECSTORE_EXPORT RequestMemory* recstore_memory_new(uint64_t limit) { return new RequestMemory(limit); }
RECSTORE_EXPORT void recstore_memory_delete(RequestMemory* memory) { delete memory; }
RECSTORE_EXPORT int recstore_memory_take(RequestMemory* memory, uint64_t bytes) { return memory->take(bytes) ? 1 : 0; }
RECSTORE_EXPORT void recstore_memory_give_back(RequestMemory* memory, uint64_t bytes) { memory->give_back(bytes); }
RECSTORE_EXPORT uint64_t recstore_memory_held(RequestMemory* memory) { return memory->held(); }

RECSTORE_EXPORT Counts* recstore_counts_new() { return new Counts; }
RECSTORE_EXPORT void recstore_counts_delete(Counts* counts) { delete counts; }
RECSTORE_EXPORT void recstore_counts_call(Counts* counts, const char* method, const char* outcome, double seconds) {
  counts->call(method, outcome, seconds);
}
RECSTORE_EXPORT void recstore_counts_ids(Counts* counts, const char* operation, const char* table, int64_t n) {
  counts->ids(operation, table, n);
}
RECSTORE_EXPORT void recstore_counts_each(Counts* counts,
                                          void (*visit)(const char*, const char*, const char*, double)) {
  counts->for_each([&](const char* kind, const std::string& label, const std::string& detail, double value) {
    visit(kind, label.c_str(), detail.c_str(), value);
  });
}

// api: what the op row_api of the core returns. Returns null if the core has another version of it.
RECSTORE_EXPORT RowCalls* recstore_calls_new(int64_t api, Applied* applied, RunGate* gate, Replica* replica,
                                             Counts* counts, uint64_t most_write_bytes, uint64_t most_write_ids) {
  const auto* functions = reinterpret_cast<const recstore::RowApi*>(api);
  if (functions->version != recstore::kRowApiVersion) return nullptr;
  return new RowCalls(*functions, *applied, *gate, *replica, *counts, most_write_bytes, most_write_ids);
}
RECSTORE_EXPORT void recstore_calls_delete(RowCalls* calls) { delete calls; }
RECSTORE_EXPORT void recstore_calls_add(RowCalls* calls, const char* name, int64_t table, int64_t group, int64_t dim,
                                        int64_t value_bytes, double learning_rate) {
  calls->add({name, table, group, dim, value_bytes, learning_rate});
}
RECSTORE_EXPORT void recstore_calls_remove(RowCalls* calls, const char* name) { calls->remove(name); }

// The rules for slow clients, which Python reads.
RECSTORE_EXPORT double recstore_patience_s() { return kPatienceS; }
RECSTORE_EXPORT double recstore_bytes_per_s() { return kBytesPerS; }

RECSTORE_EXPORT RowServer* recstore_server_new(RowCalls* calls, Counts* counts, RequestMemory* memory, int threads,
                                               int64_t most_connections, uint64_t most_write_bytes,
                                               NativeStatus* status) {
  return guarded(status,
                 [&] { return new RowServer(*calls, *counts, *memory, threads, most_connections, most_write_bytes); });
}
RECSTORE_EXPORT void recstore_server_delete(RowServer* server) { delete server; }
RECSTORE_EXPORT int recstore_server_listen(RowServer* server, const char* host, int port, NativeStatus* status) {
  return guarded(status, [&] { return server->listen(host, port); });
}
RECSTORE_EXPORT void recstore_server_listen_memory(RowServer* server, uint64_t segment_bytes, uint64_t packet_bytes,
                                                   NativeStatus* status) {
  guarded(status, [&] { server->listen_memory(segment_bytes, packet_bytes); });
}
// Returns the name of this start of the server, which lives as long as the server.
RECSTORE_EXPORT const char* recstore_server_name(RowServer* server) { return server->name().c_str(); }
// Writes the name of the socket for shared memory, a space and the secret to out; only a space if there is none.
RECSTORE_EXPORT void recstore_server_memory_offer(RowServer* server, char* out, uint64_t size) {
  const auto [name, secret] = server->memory_offer();
  std::snprintf(out, size, "%s %s", name.c_str(), secret.c_str());
}
RECSTORE_EXPORT void recstore_server_set_token(RowServer* server, const char* token) { server->set_token(token); }
RECSTORE_EXPORT void recstore_server_set_backup(RowServer* server, int backup, const char* secret) {
  server->set_backup(backup != 0, secret);
}
RECSTORE_EXPORT void recstore_server_set_tls(RowServer* server, const char* library, const char* cert, const char* key,
                                             const char* client_ca, NativeStatus* status) {
  guarded(status, [&] { server->set_tls(tls_context(library, false, cert, key, client_ca)); });
}
RECSTORE_EXPORT int recstore_server_next(RowServer* server, PythonCall* call) { return server->next(*call) ? 1 : 0; }
RECSTORE_EXPORT int recstore_server_reply(RowServer* server, int64_t connection, int code, const char* details,
                                          const char* error, const char* found, uint64_t found_bytes, const char* rows,
                                          uint64_t rows_bytes, uint64_t deleted, int last) {
  return server->reply(connection, {{code, details, error}, found_bytes, rows_bytes, deleted, last != 0}, found, rows)
             ? 1
             : 0;
}
RECSTORE_EXPORT void recstore_server_stop(RowServer* server, double seconds) { server->stop(seconds); }
RECSTORE_EXPORT int64_t recstore_server_connections(RowServer* server) { return server->connections(); }
RECSTORE_EXPORT int64_t recstore_server_running(RowServer* server) { return server->running(false); }
RECSTORE_EXPORT int64_t recstore_server_memory_connections(RowServer* server) { return server->memory_connections(); }
RECSTORE_EXPORT int64_t recstore_server_memory_running(RowServer* server) { return server->running(true); }
RECSTORE_EXPORT int64_t recstore_server_memory_bytes(RowServer* server) { return server->memory_bytes(); }
RECSTORE_EXPORT int64_t recstore_server_ended(RowServer* server) { return server->ended(); }
RECSTORE_EXPORT int64_t recstore_server_waiting(RowServer* server) { return server->waiting(); }
