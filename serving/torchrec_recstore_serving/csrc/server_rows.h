#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace recstore {

class RowLink;

// A table on parameter servers, as the file of a model names it.
struct ServerTable {
  std::string name;  // on the servers
  int64_t dim;
  std::string dtype;  // of its weights: float32, float16, bfloat16 or int8
};

// The servers of a set, which have the rows of tables. All tables of a process with the same servers share the
// connections. A call goes to all servers that have some of its ids at the same time: by shared memory to a server of
// the same host and user, otherwise by TCP. See recstore.proto.
//
// Calls only read. A call that fails because a server was started again, cannot be reached or is not the primary of its
// pair asks all servers for their state anew and is repeated, for 5 s, or 10 s if servers are pairs. Any number of
// threads may call.
//
// The environment of the process says how it may call servers: RECSTORE_TOKEN_FILE names the file of the token;
// RECSTORE_TLS_CA, RECSTORE_TLS_CERT and RECSTORE_TLS_KEY name PEM files. They are read for each new connection.
// RECSTORE_SHARED_MEMORY=0 lets all calls go by TCP.
class RowServers {
 public:
  // servers: the address of the port for rows of each server, host:port, with commas between them; host:port/host:port
  // for a pair. tls: whether connections are encrypted. Throws InvalidArgument.
  static std::shared_ptr<RowServers> of(const std::string& servers, bool tls);
  ~RowServers();
  RowServers(const RowServers&) = delete;
  RowServers& operator=(const RowServers&) = delete;

  // Writes the rows of ids (n,) to out (n, dim); zeros for an id without a row. Throws std::runtime_error, which names
  // the table, the server and what to do.
  void lookup(const ServerTable& table, const int64_t* ids, int64_t n, float* out);
  // Writes whether each of ids (n,) has a row. Throws likewise.
  void contains(const ServerTable& table, const int64_t* ids, int64_t n, bool* found);

 private:
  struct Agreed;
  struct Flow;
  struct Process;

  // What a server sends for each id, and the function that stores it: the entry, the position of the id in the call,
  // and the number of ids that follow one another there and in the entries.
  struct Entries {
    int64_t bytes;
    std::function<void(const char* entries, int64_t place, int64_t n)> put;
  };

  RowServers(const std::string& servers, bool tls);
  void call(const ServerTable& table, bool rows, const int64_t* ids, int64_t n, const Entries& entries);
  static void check_table(const Agreed& agreed, const ServerTable& table);
  static void divide(const Agreed& agreed, const int64_t* ids, int64_t n, std::vector<Flow>& flows,
                     std::vector<int64_t>& sorted, std::vector<int64_t>& places);
  void attempt(Process& process, const ServerTable& table, bool rows, const int64_t* ids, int64_t n,
               const Entries& entries);
  void exchange(std::vector<Flow>& flows);
  Process& process();
  std::shared_ptr<const Agreed> agreed(Process& process);
  Agreed described(Process& process);
  std::string ask(std::unique_ptr<RowLink>& link, size_t server, int field);
  std::unique_ptr<RowLink> idle(Process& process, size_t server, bool by_memory);
  std::unique_ptr<RowLink> take(Process& process, size_t server);
  std::unique_ptr<RowLink> take_tcp(Process& process, size_t server);
  void give_back(Process& process, size_t server, std::unique_ptr<RowLink> link);
  const std::string& address(Process& process, size_t server) const;

  const bool tls_;
  std::vector<std::vector<std::string>> servers_;  // for each server, its address, or those of its pair
  std::atomic<Process*> process_{nullptr};
};

}  // namespace recstore
