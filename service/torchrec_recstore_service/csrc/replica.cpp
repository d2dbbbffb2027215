#include "replica.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "message_fields.h"
#include "tcp.h"

namespace recstore_service {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kMostQueued = uint64_t{1} << 30;  // bytes of writes that a backup has not got yet while it joins
constexpr size_t kAtOnce = 64;                       // writes that are sent before their replies are read
constexpr auto kReply = std::chrono::seconds(8);     // after which a backup that does not answer is lost
// For which a write waits to learn whether the server may go on alone.
constexpr auto kDecision = std::chrono::seconds(5);
constexpr uint32_t kMostReplyBytes = uint32_t{1} << 16;

[[noreturn]] void fail(const char* what) { throw std::runtime_error(what); }

// Returns the name in a SegmentReply of the server that has sent it; empty if it has none.
std::string server_of(const std::string& message) {
  std::string server;
  try {
    for (Reader reader(message.data(), message.size()); reader.next();) {
      if (reader.field("-02200002") == 8) {
        server = reader.text();
      } else {
        reader.skip();
      }
    }
  } catch (const CallFailed&) {
    fail("the reply of the backup cannot be read");
  }
  return server;
}

}  // namespace

// A connection to the backup. One thread sends and one reads at a time. All functions throw std::runtime_error.
struct Replica::Socket {
  ~Socket() {
    if (fd >= 0) ::close(fd);
  }

  void connect(const std::string& host, int port, TlsContext* context) {
    try {
      fd = tcp_socket(host, port, 3000);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(std::string("the backup cannot be reached: ") + error.what());
    }
    // A backup whose host is gone is lost after 5 s, not after the many minutes of the system.
    const int on = 1, idle = 2, interval = 1, probes = 3, unacknowledged = 5000;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged, sizeof unacknowledged);
    if (context == nullptr) return;
    tls = context->stream(fd, host);
    if (tls == nullptr) fail("OpenSSL has no memory for a connection");
    const auto end = Clock::now() + kReply;
    for (Io io = tls->connect(); io != Io::kDone; io = tls->connect()) {
      wait(io, end, "the backup has refused the TLS connection");
    }
  }

  void send(std::vector<iovec> parts) {
    const auto end = Clock::now() + kReply;
    for (size_t at = 0; at < parts.size();) {
      if (parts[at].iov_len == 0) {
        ++at;
        continue;
      }
      size_t moved = 0;
      Io io = Io::kDone;
      if (tls != nullptr) {
        const std::lock_guard<std::mutex> lock(tls_mutex);
        io = tls->write(static_cast<const char*>(parts[at].iov_base), parts[at].iov_len, moved);
      } else {
        msghdr message{};
        message.msg_iov = &parts[at];
        message.msg_iovlen = std::min<size_t>(parts.size() - at, 64);
        const ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
        io = n >= 0 ? Io::kDone : errno == EAGAIN || errno == EINTR ? Io::kWantWrite : Io::kEnd;
        moved = n >= 0 ? static_cast<size_t>(n) : 0;
      }
      if (io != Io::kDone) wait(io, end, "the backup has closed the connection");
      for (; moved > 0; ++at) {
        const size_t of_part = std::min(moved, parts[at].iov_len);
        parts[at].iov_base = static_cast<char*>(parts[at].iov_base) + of_part;
        parts[at].iov_len -= of_part;
        moved -= of_part;
        if (parts[at].iov_len > 0) break;
      }
    }
  }

  void receive(char* to, size_t size) {
    const auto end = Clock::now() + kReply;
    while (size > 0) {
      size_t moved = 0;
      Io io = Io::kDone;
      if (tls != nullptr) {
        const std::lock_guard<std::mutex> lock(tls_mutex);
        io = tls->read(to, size, moved);
      } else {
        const ssize_t n = recv(fd, to, size, 0);
        io = n > 0 ? Io::kDone : n < 0 && (errno == EAGAIN || errno == EINTR) ? Io::kWantRead : Io::kEnd;
        moved = n > 0 ? static_cast<size_t>(n) : 0;
      }
      if (io != Io::kDone) wait(io, end, "the backup has closed the connection");
      to += moved;
      size -= moved;
    }
  }

  // Reads a reply, and returns its SegmentReply. Throws also if it is an error.
  std::string reply() {
    uint32_t size = 0;
    receive(reinterpret_cast<char*>(&size), 4);
    if (size > kMostReplyBytes) fail("the reply of the backup is too long");
    std::string message(size, '\0');
    receive(message.data(), size);
    // The reply to a write that has succeeded has no code, which would be its first field.
    if (!message.empty() && message[0] == 8) throw std::runtime_error("it has refused a write: " + message.substr(2));
    return message;
  }

  void wait(Io io, Clock::time_point end, const char* ended) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    if (io == Io::kEnd) fail(ended);
    if (left <= 0) fail("the backup does not answer");
    pollfd ready{fd, static_cast<short>(io == Io::kWantRead ? POLLIN : POLLOUT), 0};
    ::poll(&ready, 1, static_cast<int>(left));
  }

  int fd = -1;
  std::unique_ptr<TlsStream> tls;
  std::mutex tls_mutex;  // a stream of TLS does not send and receive at the same time
};

void Replica::set_role(Role role) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (role != Role::kJoining) drop();
  queue_.clear();
  queued_bytes_ = 0;
  role_ = role;
  changed_.notify_all();
}

// Ends the connection; a thread that uses it finds its end. The caller has the mutex.
void Replica::drop() {
  if (socket_ != nullptr) ::shutdown(socket_->fd, SHUT_RDWR);
  socket_ = nullptr;
}

// The caller has the mutex.
void Replica::lose_locked(const char* reason) {
  drop();
  queue_.clear();
  queued_bytes_ = 0;
  // No write has waited for a backup that was joining, so none waits for the decision of Python.
  if (role_ == Role::kJoining) role_ = Role::kAlone;
  if (role_ == Role::kSynced) {
    reason_ = reason;
    role_ = Role::kLost;
  }
  changed_.notify_all();
}

std::unique_lock<std::mutex> Replica::turn(bool from_primary) {
  if (role_ == Role::kSingle) return {};
  std::unique_lock<std::mutex> order(order_);
  const Role role = role_;
  if (role == Role::kStandby || (role == Role::kFollowing) != from_primary) throw CallFailed(not_primary());
  return order;
}

void Replica::send(const std::string& message, const Arrays& arrays, const std::array<uint64_t, 4>& sizes) noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  if (role_ == Role::kSingle) return;
  ++sent_;
  try {
    if (role_ == Role::kJoining) {
      Frame frame;
      frame.message = message;
      for (size_t i = 0; i < 4; ++i) frame.arrays.insert(frame.arrays.end(), arrays[i], arrays[i] + sizes[i]);
      queued_bytes_ += message.size() + frame.arrays.size();
      queue_.push_back(std::move(frame));
    } else if (role_ == Role::kSynced) {
      const std::shared_ptr<Socket> socket = socket_;
      const auto size = static_cast<uint32_t>(message.size());
      lock.unlock();
      std::vector<iovec> parts{{const_cast<uint32_t*>(&size), 4}, {const_cast<char*>(message.data()), message.size()}};
      for (size_t i = 0; i < 4; ++i) parts.push_back({arrays[i], sizes[i]});
      try {
        socket->send(std::move(parts));
      } catch (const std::exception& error) {
        lock.lock();
        if (socket_ == socket) lose_locked(error.what());
      }
    }
  } catch (const std::bad_alloc&) {  // the write was carried out, so it is the backup that does without it
    if (!lock.owns_lock()) lock.lock();
    lose_locked("the primary has no memory for the writes that wait");
  }
}

uint64_t Replica::sent() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sent_;
}

void Replica::wait(uint64_t number) {
  if (role_ == Role::kSingle) return;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto decision = Clock::now() + kDecision;
  while (true) {
    switch (role_.load()) {
      case Role::kSingle:
      case Role::kAlone:
      case Role::kFollowing: return;
      case Role::kStandby: throw CallFailed(not_primary());
      case Role::kJoining:
        if (queued_bytes_ <= kMostQueued) return;
        changed_.wait(lock);
        break;
      case Role::kLost:
        if (changed_.wait_until(lock, decision) == std::cv_status::timeout) {
          unavailable("the server has lost its backup");
        }
        break;
      case Role::kSynced: {
        if (acknowledged_ >= number) return;
        if (reading_) {
          changed_.wait(lock);
          break;
        }
        reading_ = true;
        const std::shared_ptr<Socket> socket = socket_;
        lock.unlock();
        std::string error;
        try {
          socket->reply();
        } catch (const std::exception& thrown) {
          error = thrown.what();
        }
        lock.lock();
        reading_ = false;
        if (socket == socket_ && error.empty()) ++acknowledged_;
        if (socket == socket_ && !error.empty()) lose_locked(error.c_str());
        changed_.notify_all();
      }
    }
  }
}

void Replica::follow(const std::string& host, int port, const std::string& secret, const std::string& name,
                     TlsContext* tls) {
  auto socket = std::make_shared<Socket>();
  socket->connect(host, port, tls);
  // A backup of an earlier release has no name.
  const uint32_t version = name.empty() ? kUnnamedVersion : kVersion;
  const uint32_t numbers[] = {version, static_cast<uint32_t>(secret.size()), static_cast<uint32_t>(name.size())};
  socket->send({{const_cast<char*>(kMagic), 8},
                {const_cast<uint32_t*>(numbers), name.empty() ? size_t{8} : size_t{12}},
                {const_cast<char*>(secret.data()), secret.size()},
                {const_cast<char*>(name.data()), name.size()}});
  if (server_of(socket->reply()) != name) fail("another server answers at the address for rows of the backup");
  try {
    while (true) {
      std::vector<Frame> frames;
      {
        // No write has its turn while the role changes: the ones before are all in the queue, and the next one is sent.
        const std::lock_guard<std::mutex> order(order_);
        const std::lock_guard<std::mutex> lock(mutex_);
        if (role_ != Role::kJoining) {
          fail("the server is not the primary any more, or has changed in another way than by writes");
        }
        if (queue_.empty()) {
          socket_ = socket;
          acknowledged_ = sent_;
          role_ = Role::kSynced;
          changed_.notify_all();
          return;
        }
        while (!queue_.empty() && frames.size() < kAtOnce) {
          queued_bytes_ -= queue_.front().message.size() + queue_.front().arrays.size();
          frames.push_back(std::move(queue_.front()));
          queue_.pop_front();
        }
        changed_.notify_all();
      }
      for (Frame& frame : frames) {
        auto size = static_cast<uint32_t>(frame.message.size());
        socket->send({{&size, 4}, {frame.message.data(), size}, {frame.arrays.data(), frame.arrays.size()}});
      }
      for (size_t i = 0; i < frames.size(); ++i) socket->reply();
    }
  } catch (const std::exception&) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (role_ == Role::kJoining) lose_locked("");
    throw;
  }
}

void Replica::lose() {
  const std::lock_guard<std::mutex> lock(mutex_);
  lose_locked("it has to copy the tables again");
}

bool Replica::wait_lost(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return role_ == Role::kLost; });
}

}  // namespace recstore_service
