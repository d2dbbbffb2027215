#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>

namespace recstore {

using Clock = std::chrono::steady_clock;

// A call on servers has failed, and may succeed if it is repeated.
class Passing : public std::runtime_error {
 public:
  explicit Passing(const std::string& what, size_t server = 0) : std::runtime_error(what), server(server) {}
  size_t server;
};

// The call has failed for a reason that does not pass.
class Refused : public std::runtime_error {
 public:
  explicit Refused(const std::string& what, size_t server = 0) : std::runtime_error(what), server(server) {}
  size_t server;
};

// Throws Passing for a server that cannot be reached.
[[noreturn]] void unreached(const std::string& reason, size_t server = 0);

// The value of a variable of the environment; empty if it is not set.
std::string environment(const char* name);
// The time until `end`, for poll().
int milliseconds(Clock::duration left);

// A connection for rows to a server, for one call at a time. Functions throw Passing and Refused.
class RowLink {
 public:
  using Sink = std::function<void(const char* entries, uint64_t bytes)>;

  explicit RowLink(size_t side) : side(side) {}
  virtual ~RowLink();
  RowLink(const RowLink&) = delete;
  RowLink& operator=(const RowLink&) = delete;

  // Begins a call. The ids (n,) are read until the last reply.
  virtual void begin(const std::string& message, const int64_t* ids, int64_t n) = 0;
  // Moves what can be moved without waiting. Returns the events to wait for; 0 after the last reply of the call.
  virtual short advance(const Sink& sink) = 0;
  // The most ids of a call whose entries have so many bytes.
  virtual int64_t most_ids(int64_t entry_bytes) const = 0;
  virtual bool is_by_memory() const = 0;
  // Whether the server is still there. To be called between two calls.
  bool is_alive() const;

  const size_t side;   // of the pair
  std::string server;  // the name that the server has given itself, which is that of one start of it
  int fd = -1;
  bool is_idle = true;  // the last reply of the last call has arrived
};

// Connects to the port for rows of a server, host:port, in the time that is left: see RowServers for the environment
// that says how.
std::unique_ptr<RowLink> tcp_link(const std::string& address, size_t side, bool tls, Clock::time_point end);

// Connects to a server of the same host and user: see "Calls by shared memory" in recstore.proto. offer: an
// AttachReply. open: the number of such connections, which this one is counted in. Returns null if the server is on
// another host, runs as another user or has too many connections.
std::unique_ptr<RowLink> memory_link(const std::string& offer, size_t side, std::atomic<int>& open);

}  // namespace recstore
