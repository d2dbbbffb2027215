#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "row_calls.h"
#include "tls.h"

namespace recstore_service {

// Counts the bytes of the requests of all running calls, also of those that Python answers.
class RequestMemory {
 public:
  explicit RequestMemory(uint64_t limit) : limit_(limit) {}
  uint64_t limit() const { return limit_; }
  uint64_t held() const { return held_.load(); }
  // Adds bytes. Returns false, and adds nothing, if that is too much.
  bool take(uint64_t bytes) {
    uint64_t held = held_.load();
    do {
      if (bytes > limit_ || held > limit_ - bytes) {
        ++refusals_;
        return false;
      }
    } while (!held_.compare_exchange_weak(held, held + bytes));
    return true;
  }
  void give_back(uint64_t bytes) { held_ -= bytes; }
  // How often take() has returned false: a call somewhere waits for memory, or was refused, if the number grows.
  uint64_t refusals() const { return refusals_.load(); }

 private:
  const uint64_t limit_;
  std::atomic<uint64_t> held_{0}, refusals_{0};
};

// A call that Python answers.
struct PythonCall {
  int64_t connection;
  const char* message;  // a SegmentRequest
  int64_t message_bytes;
  const char* arrays[4];
  int64_t sizes[4];
  int from_primary;
  int64_t room;  // the largest size in bytes of the arrays of the reply; 0: any size
};

struct Connection;

// The rules for slow clients of a full server, which also hold for the calls by gRPC: see calls.py.
constexpr double kPatienceS = 0.25;     // the time for which a full server waits for a client before it ends the call
constexpr double kBytesPerS = 1 << 20;  // the bytes that a call must at least transfer in a second, in the long run

// Takes the calls on rows of clients, each of which has a TCP connection for one call at a time. The first bytes of a
// connection are "RECSTORE", the version of the protocol for rows (uint32), the sizes of the token and of the name of
// the server that the connection is for (uint32), the token, and the name, or no name for a connection to any server.
// The server answers with a reply that names it, and refuses a connection for another server. A request is the size of
// a SegmentRequest (uint32), the SegmentRequest, and its arrays one after the other. A reply is the size of a
// SegmentReply, the SegmentReply, and its arrays. Numbers are little-endian.
//
// Clients of the same host and user share memory with the server instead, which has the arrays of requests and replies:
// see SegmentRequest in recstore.proto. A client can change them at any time. Ids are therefore copied before they are
// used; the values of rows can be anything.
//
// A thread never waits for a client: any thread goes on with a connection that has something to do. So a slow client
// takes no thread, and only as much memory as its request.
class RowServer {
 public:
  // threads: the calls that run at the same time. Throws std::system_error.
  RowServer(RowCalls& calls, Counts& counts, RequestMemory& memory, int threads, int64_t most_connections,
            uint64_t most_write_bytes);
  // No thread may be in next() or reply(), or have a call of next(), any more.
  ~RowServer();

  // Listens on an address, and returns the port. token: empty, or what clients must send. Throws std::runtime_error.
  int listen(const std::string& host, int port);
  // Takes connections by shared memory, of segment_bytes each, whose messages have at most packet_bytes. Throws
  // std::runtime_error if the system has none.
  void listen_memory(size_t segment_bytes, size_t packet_bytes);
  // The name of the socket for it, and what a client has to send first; empty if there is none.
  std::pair<std::string, std::string> memory_offer();
  // The name of this start of the server, which is random.
  const std::string& name() const { return name_; }
  // A connection whose token was replaced is closed at its next call.
  void set_token(std::string token);
  // secret: what the primary sends instead of a token. The server then takes the calls of the primary only. Empty: the
  // server takes the calls of clients.
  void set_backup(bool backup, std::string secret);
  // New connections use the context. Null: no encryption.
  void set_tls(std::shared_ptr<TlsContext> tls);

  // Waits for a call for Python. Returns false when the server stops.
  bool next(PythonCall& call);
  // Sends a reply of a call, and waits until the client has read it. Returns false if the client has gone; the call has
  // ended then. found and rows: the arrays, of the sizes in the reply.
  bool reply(int64_t connection, const RowReply& reply, const char* found, const char* rows);

  // Takes no more calls, waits for the running ones, and ends all connections after `seconds` at the latest. The calls
  // that next() has returned can be answered until the destructor runs.
  void stop(double seconds);

  // The numbers of connections by TCP, and by shared memory.
  int64_t connections();
  int64_t memory_connections();
  // The size in bytes of the memory that clients share with the server and that pages were used of.
  int64_t memory_bytes();
  // The number of connections that wait for memory.
  int64_t waiting();
  int64_t running(bool by_memory) const { return running_[by_memory].load(); }
  int64_t ended() const { return ended_.load(); }

 private:
  enum class Step { kAgain, kWaitRead, kWaitWrite, kAway, kEnd };

  void work();
  void watch();
  void accept();
  void accept_memory();
  void handle(Connection& connection);
  Step shake(Connection& c);
  Step hello(Connection& c);
  Step hello_memory(Connection& c);
  Step framed(Connection& c);
  Step packet(Connection& c);
  Step message(Connection& c);
  Step memory(Connection& c);
  Step body(Connection& c);
  Step run(Connection& c);
  Step send_out(Connection& c);
  Step fill(Connection& c, size_t wanted);
  Step refuse(Connection& c, const Status& status, bool close);
  void finish(Connection& c);
  void put(Connection& c, const RowReply& reply, const char* found, const char* rows);
  void arm(Connection& c, uint32_t events);
  void end(Connection& c);
  void make_room();
  void wake_waiters();
  Status check(const Connection& c);
  uint64_t most_request_bytes(const RowRequest& request) const;

  const std::string name_;
  RowCalls& calls_;
  Counts& counts_;
  RequestMemory& memory_;
  const int64_t most_connections_;
  const uint64_t most_write_bytes_;
  int epoll_ = -1;
  int wake_ = -1;
  int listener_ = -1;
  int memory_listener_ = -1;
  size_t segment_bytes_ = 0;
  size_t packet_bytes_ = 0;
  std::string memory_name_;
  std::mutex settings_;
  std::string token_;
  std::string secret_;
  std::string memory_secret_;
  bool backup_ = false;
  std::shared_ptr<TlsContext> tls_;
  std::mutex mutex_;  // guards the connections, the calls for Python, and those that wait for memory
  std::condition_variable changed_;
  std::unordered_map<int64_t, std::shared_ptr<Connection>> connections_;
  std::deque<int64_t> for_python_;
  std::deque<int64_t> for_memory_;
  int64_t next_ = 1;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> stopped_{false};
  int64_t by_memory_ = 0;  // of the connections
  std::array<std::atomic<int64_t>, 2> running_{};
  std::atomic<int64_t> ended_{0};
  std::vector<std::thread> threads_;
  std::thread watcher_;
};

}  // namespace recstore_service
