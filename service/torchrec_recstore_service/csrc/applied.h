#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "status.h"

namespace recstore_service {

// The writes that have been carried out or are running, so that a repeated write is not carried out twice. Clients
// number their writes. With each write, a client sends the number below which it repeats none. AppliedRequests in
// applied.py explains the functions.
class Applied {
 public:
  struct Answer {
    bool done = false;
    bool failed = false;
    uint64_t deleted = 0;
  };
  using Mine = std::shared_ptr<Answer>;

  // most_clients: the clients that are remembered; kept_s: the time in seconds for which a client may repeat a write.
  explicit Applied(size_t most_clients = 10000, double kept_s = 300) : most_clients_(most_clients), kept_s_(kept_s) {}

  // Begins a write. Returns null, and sets `deleted`, if the write has been carried out. Otherwise the caller carries
  // it out and calls finish(). If the same write runs in another thread, the function waits for its end, and the caller
  // carries it out if it has failed there. Throws CallFailed.
  Mine begin(const std::string& client, uint64_t request, uint64_t done_before, uint64_t& deleted);
  // Ends a write that begin() has returned. A write that has failed may be repeated.
  void finish(const std::string& client, uint64_t request, const Mine& mine, bool failed, uint64_t deleted);

  // Begins and ends a change without a number. Throws CallFailed.
  void begin_change();
  void end_change();

  // Refuses new writes, and waits for the running ones.
  void close();
  void reopen();
  void check_open();
  int64_t clients();

  // Calls visit(client, done_before, request, deleted) for each write that has been carried out, and once with the
  // request -1 for each client. No write may run; those that wait for the gate do not.
  template <class Visit>
  void for_each(const Visit& visit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [name, client] : clients_) {
      visit(name.c_str(), client.done_before, int64_t{-1}, uint64_t{0});
      for (const auto& [request, answer] : client.answers) {
        if (answer->done) visit(name.c_str(), client.done_before, static_cast<int64_t>(request), answer->deleted);
      }
    }
  }
  // Forgets all clients, before add().
  void clear();
  // Adds a client, or a write that another server has carried out.
  void add(const std::string& client, uint64_t done_before, int64_t request, uint64_t deleted);

 private:
  struct Client {
    uint64_t done_before = 0;
    std::map<uint64_t, Mine> answers;
    double last_used = 0;
    std::list<std::string>::iterator place;
  };
  Client& client(const std::string& name);
  Client& known(const std::string& name);
  void check_open_locked() const;

  const size_t most_clients_;
  const double kept_s_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, Client> clients_;
  std::list<std::string> order_;  // the client that has not written for the longest time is the first
  int64_t running_ = 0;
  bool closed_ = false;
};

}  // namespace recstore_service
