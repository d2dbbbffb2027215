#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "row_messages.h"
#include "tls.h"

namespace recstore_service {

// The ids and arrays of a call, each aligned to kAlignment bytes.
using Arrays = std::array<char*, 4>;

// The writes of a server that has a backup, in one order, and the connection over which the backup gets them.
//
// A write has a turn, in which it is carried out and sent. So the backup gets all writes in the order in which they
// were carried out. After its turn, the write waits until the backup has carried it out too. Which server is the
// primary, and whether the backup may take over, is decided by Python: see pair.py.
class Replica {
 public:
  enum class Role : int {
    kSingle,     // the server is not replicated
    kStandby,    // it carries out nothing: its rows may be old
    kFollowing,  // it carries out the writes of the primary only
    kAlone,      // the primary, without a backup
    kJoining,    // the primary; a backup gets the writes since its copy was made, and no write waits for it
    kSynced,     // the primary; each write waits for the backup
    kLost,       // the primary has lost its backup, and each write waits for Python to set the next role
  };

  ~Replica() { drop(); }

  Role role() const { return role_.load(); }
  // Sets a role other than kSynced and kLost. Any role but kJoining ends the connection to a backup.
  void set_role(Role role);

  // Returns a lock during which no other write has its turn. Throws CallFailed if the server does not carry out the
  // writes of a client, or those of a primary.
  std::unique_lock<std::mutex> turn(bool from_primary);
  // Takes a write that was carried out in this turn. It does not throw.
  void send(const std::string& message, const Arrays& arrays, const std::array<uint64_t, 4>& sizes) noexcept;
  // The number of the last write that was sent.
  uint64_t sent();
  // Waits until the backup, if there is one, has carried out the writes up to a number. Throws CallFailed.
  void wait(uint64_t number);

  // Connects to the rows' port of a backup, and sends what has been sent since kJoining began, and more while writes
  // come. Returns when the backup has everything; each write waits for it from then on. tls: null for no encryption.
  // Throws std::runtime_error. The role is still kJoining then if the backup was not reached at this address, so that
  // it can be called at another one; otherwise it is kAlone, unless it is another than kJoining.
  void follow(const std::string& host, int port, const std::string& secret, const std::string& name, TlsContext* tls);
  // Notes that the backup has not done what the primary has done, or that it has not been reached.
  void lose();
  // Why the backup was lost, after wait_lost() and until the next role is set.
  const char* reason() const { return reason_.c_str(); }
  // Waits until the backup is lost, for so many seconds at most. Returns whether it is.
  bool wait_lost(double seconds);

 private:
  struct Frame {
    std::string message;
    std::vector<char> arrays;
  };
  struct Socket;

  void drop();
  void lose_locked(const char* reason);

  std::mutex order_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::atomic<Role> role_{Role::kSingle};
  std::shared_ptr<Socket> socket_;
  std::deque<Frame> queue_;
  uint64_t queued_bytes_ = 0;
  uint64_t sent_ = 0, acknowledged_ = 0;
  std::string reason_;
  bool reading_ = false;  // a thread reads the replies of the backup, for all that wait
};

}  // namespace recstore_service
