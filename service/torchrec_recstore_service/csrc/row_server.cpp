#include "row_server.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "base/buffer_pool.h"

namespace recstore_service {
namespace {

constexpr size_t kHelloBytes = 16;
constexpr size_t kMostTokenBytes = 4096;
constexpr size_t kMostNameBytes = 64;
constexpr uint32_t kMostMessageBytes = uint32_t{1} << 20;
constexpr uint64_t kMostPullBytes = uint64_t{8} << 22;
constexpr size_t kChunk = size_t{1} << 16;  // bytes that are read at once before the size of a request is known
constexpr size_t kAlignment = 64;
// Bytes of rows that are read at once, for a connection by TCP and for one by shared memory.
constexpr int64_t kTcpPart = int64_t{1} << 19;
constexpr int64_t kMemoryPart = int64_t{1} << 21;
constexpr int64_t kMostByMemory = 64;  // connections by shared memory
// The names of the values of Call, in the metrics.
constexpr const char* kCallNames[] = {"Write", "Pull", "Describe", "Attach"};
// What epoll reports for the sockets that are no connection.
constexpr int64_t kListener = 0;
constexpr int64_t kWake = -1;
constexpr int64_t kMemoryListener = -2;
// The seconds after which the server ends a connection that does not begin, a call that waits for memory, and a
// connection whose last bytes it discards.
constexpr double kHelloS = 10;
constexpr double kMemoryS = 10;
constexpr double kDiscardS = 2;
constexpr int kMostAccepted = 64;   // connections that a thread takes before it looks for other work
constexpr int kMostDiscarded = 16;  // chunks, likewise
constexpr auto kWatchPause = std::chrono::milliseconds(25);

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string random_text() {
  std::array<unsigned char, 16> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw std::runtime_error("the system has no random numbers");
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

size_t rounded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

using Buffer = recstore::BufferPool::Buffer;

// Throws std::bad_alloc.
Buffer new_buffer(size_t bytes) {
  try {
    return recstore::BufferPool::instance().take(bytes);
  } catch (const recstore::OutOfMemory&) {
    throw std::bad_alloc();
  }
}

// kRun: the server works, so that the client is not late.
enum class State { kShake, kHello, kMessage, kMemory, kBody, kRun, kPython, kReply, kDiscard };

bool same(const std::string& one, const std::string& other) {
  unsigned char difference = one.size() == other.size() ? 0 : 1;
  for (size_t i = 0; i < one.size() && i < other.size(); ++i) {
    difference |= static_cast<unsigned char>(one[i] ^ other[i]);
  }
  return difference == 0;
}

// Lets epoll report once that a socket can be read. number: kListener, kMemoryListener, or the number of a connection.
bool add_to_epoll(int epoll, int fd, int64_t number) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.u64 = static_cast<uint64_t>(number);
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

// Whether the next client can be accepted at once, after accept4() has failed. Waits if the system lacks resources.
bool accepts_next() {
  if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return errno == ECONNABORTED || errno == EINTR;
}

// A client that is gone is found after half a minute.
void set_options(int fd) {
  const int on = 1;
  const int idle = 20;
  const int interval = 5;
  const int probes = 2;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

}  // namespace

struct Connection {
  ~Connection() {
    if (segment != nullptr) munmap(segment, segment_bytes);
    if (memory >= 0) ::close(memory);
    if (fd >= 0) ::close(fd);
  }

  int64_t number = 0;
  int fd = -1;
  // What a thread does before it arms the connection happens before what the next thread does with it. The kernel sees
  // to that; the memory model of C++, and so ThreadSanitizer, knows it of an atomic alone.
  std::atomic<bool> armed{false};
  bool leaves = false;     // it was shut down to make room; guarded by the mutex of the server
  bool by_memory = false;  // a socket of messages beside a segment of memory
  int memory = -1;         // the file of the segment
  char* segment = nullptr;
  size_t segment_bytes = 0;
  size_t written = 0;  // bytes of the segment that the replies of this call take
  std::unique_ptr<TlsStream> tls;
  std::atomic<State> state{State::kHello};
  std::atomic<double> since{0};    // the time at which the present state began
  std::atomic<uint64_t> moved{0};  // bytes that have been transferred in it
  std::string token;
  bool from_primary = false;
  std::string in;  // bytes that have arrived and were not used yet
  std::string message;
  RowRequest request;
  Buffer arrays;
  Arrays at{};  // the arrays of the request, in `arrays` or in the segment
  uint64_t held = 0;
  uint64_t got = 0;  // bytes of the arrays that have arrived
  double begin = 0;
  std::string outcome;
  std::unique_ptr<Pull> pull;
  Buffer out;
  size_t out_size = 0;
  // The bytes of `out` that were not sent yet are [out_at, out_end).
  size_t out_at = 0;
  size_t out_end = 0;
  bool close = false;
  bool in_call = false;

  void enter(State next) {
    since = now();
    moved = 0;
    state = next;
  }
  // The time in seconds by which the client is late, as Call.late_s in calls.py.
  double late_s() const { return now() - since.load() - static_cast<double>(moved.load()) / kBytesPerS; }
  // Whether the client has done its part, and the server has not come to it.
  bool is_ready(short events) const {
    pollfd ready{fd, events, 0};
    return ::poll(&ready, 1, 0) > 0;
  }
  // Whether arrays lie in the segment, one after the other.
  bool fit(std::initializer_list<uint64_t> sizes) const {
    uint64_t end = 0;
    for (const uint64_t size : sizes) {
      if (size > segment_bytes) return false;
      end += rounded(size);
      if (end > segment_bytes) return false;
    }
    return true;
  }
  Status unfit() const {
    return {kInvalidArgument,
            "the arrays do not fit into the " + std::to_string(segment_bytes) + " bytes of the shared memory",
            "ValueError"};
  }
  // Returns memory for a reply of so many bytes. Throws std::bad_alloc.
  char* reply_memory(size_t bytes) {
    if (out_size < bytes) {
      out = new_buffer(bytes);
      out_size = bytes;
    }
    return static_cast<char*>(out.data());
  }
  Io receive(char* to, size_t size, size_t& got_now) {
    if (tls != nullptr) return tls->read(to, size, got_now);
    const ssize_t n = recv(fd, to, size, 0);
    if (n > 0) {
      got_now = static_cast<size_t>(n);
      return Io::kDone;
    }
    return n < 0 && (errno == EAGAIN || errno == EINTR) ? Io::kWantRead : Io::kEnd;
  }
  Io transmit(const char* from, size_t size, size_t& sent) {
    if (tls != nullptr) return tls->write(from, size, sent);
    const ssize_t n = send(fd, from, size, MSG_NOSIGNAL);
    if (n >= 0) {
      sent = static_cast<size_t>(n);
      return Io::kDone;
    }
    return errno == EAGAIN || errno == EINTR ? Io::kWantWrite : Io::kEnd;
  }
};

RowServer::RowServer(RowCalls& calls, Counts& counts, RequestMemory& memory, int threads, int64_t most_connections,
                     uint64_t most_write_bytes)
    : name_(random_text()),
      calls_(calls),
      counts_(counts),
      memory_(memory),
      most_connections_(most_connections),
      most_write_bytes_(most_write_bytes) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) throw std::system_error(errno, std::generic_category());
  epoll_event event{};
  event.events = EPOLLIN;  // not once: it wakes all threads
  event.data.u64 = static_cast<uint64_t>(kWake);
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  try {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    watcher_ = std::thread([this] { watch(); });
  } catch (const std::exception&) {  // the system has no more threads
    stop(0);
    ::close(epoll_);
    ::close(wake_);
    throw;
  }
}

RowServer::~RowServer() {
  stop(0);
  ::close(epoll_);
  ::close(wake_);
}

void RowServer::listen_memory(size_t segment_bytes, size_t packet_bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = "recstore-" + random_text();
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a name that begins with \0 is in no folder
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) throw std::runtime_error(std::strerror(errno));
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0 || ::listen(fd, kMostByMemory) != 0) {
    const std::string why = std::strerror(errno);
    ::close(fd);
    throw std::runtime_error(why);
  }
  segment_bytes_ = segment_bytes;
  packet_bytes_ = packet_bytes;
  memory_name_ = name;
  memory_listener_ = fd;
  {
    const std::lock_guard<std::mutex> lock(settings_);
    memory_secret_ = random_text();
  }
  add_to_epoll(epoll_, fd, kMemoryListener);
}

std::pair<std::string, std::string> RowServer::memory_offer() {
  const std::lock_guard<std::mutex> lock(settings_);
  if (memory_name_.empty() || stopping_) return {};
  return {memory_name_, memory_secret_};
}

int RowServer::listen(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* addresses = nullptr;
  const int failed = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &addresses);
  if (failed != 0) throw std::runtime_error(gai_strerror(failed));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(addresses, freeaddrinfo);
  std::string why = "the host has no address";
  for (const addrinfo* info = addresses; info != nullptr; info = info->ai_next) {
    const int fd = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    const int on = 1;
    const int off = 0;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (info->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, info->ai_addr, info->ai_addrlen) != 0 || ::listen(fd, 1024) != 0) {
      why = std::strerror(errno);
      ::close(fd);
      continue;
    }
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
    listener_ = fd;
    add_to_epoll(epoll_, fd, kListener);
    if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6*>(&address)->sin6_port);
    return ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
  }
  throw std::runtime_error(why);
}

void RowServer::set_token(std::string token) {
  const std::lock_guard<std::mutex> lock(settings_);
  if (token != token_ && !memory_secret_.empty()) memory_secret_ = random_text();
  token_ = std::move(token);
}

void RowServer::set_backup(bool backup, std::string secret) {
  const std::lock_guard<std::mutex> lock(settings_);
  backup_ = backup;
  secret_ = std::move(secret);
}

// Returns whether the server takes calls of a connection with this token now.
Status RowServer::check(const Connection& c) {
  const std::lock_guard<std::mutex> lock(settings_);
  if (backup_ && !secret_.empty() && same(c.token, secret_)) return {};
  if (c.from_primary || !same(c.token, token_)) return {kUnauthenticated, "the token is missing or wrong", ""};
  if (backup_) return not_primary();
  return {};
}

void RowServer::set_tls(std::shared_ptr<TlsContext> tls) {
  const std::lock_guard<std::mutex> lock(settings_);
  tls_ = std::move(tls);
}

void RowServer::work() {
  while (!stopped_) {
    epoll_event event{};
    const int n = epoll_wait(epoll_, &event, 1, -1);
    const auto number = static_cast<int64_t>(event.data.u64);
    if (n <= 0 || number == kWake) continue;
    const bool by_memory = number == kMemoryListener;
    if (by_memory || number == kListener) {
      try {
        if (by_memory) {
          accept_memory();
        } else {
          accept();
        }
      } catch (const std::exception&) {  // no memory for the connection
      }
      if (!stopping_) {
        event.events = EPOLLIN | EPOLLONESHOT;
        epoll_ctl(epoll_, EPOLL_CTL_MOD, by_memory ? memory_listener_ : listener_, &event);
      }
      continue;
    }
    std::shared_ptr<Connection> connection;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto entry = connections_.find(number);
      if (entry != connections_.end()) connection = entry->second;
    }
    if (connection != nullptr) handle(*connection);
  }
}

void RowServer::accept() {
  for (int accepted = 0; accepted < kMostAccepted && !stopping_; ++accepted) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (accepts_next()) continue;
      return;
    }
    std::shared_ptr<Connection> connection;
    try {
      connection = std::make_shared<Connection>();
    } catch (const std::bad_alloc&) {
      ::close(fd);
      throw;
    }
    connection->fd = fd;  // closed with the connection
    set_options(fd);
    std::shared_ptr<TlsContext> tls;
    {
      const std::lock_guard<std::mutex> lock(settings_);
      tls = tls_;
    }
    if (tls != nullptr) {
      connection->tls = tls->stream(fd);
      if (connection->tls == nullptr) continue;
    }
    connection->enter(tls == nullptr ? State::kHello : State::kShake);
    make_room();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || static_cast<int64_t>(connections_.size()) - by_memory_ >= 2 * most_connections_) continue;
    connection->number = next_++;
    connections_[connection->number] = connection;
    if (!add_to_epoll(epoll_, fd, connection->number)) connections_.erase(connection->number);
  }
}

void RowServer::accept_memory() {
  for (int accepted = 0; accepted < kMostAccepted && !stopping_; ++accepted) {
    auto connection = std::make_shared<Connection>();
    connection->fd = accept4(memory_listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection->fd < 0) {
      if (accepts_next()) continue;
      return;
    }
    ucred peer{};
    socklen_t size = sizeof peer;
    if (getsockopt(connection->fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) continue;
    connection->by_memory = true;
    connection->enter(State::kHello);
    std::string token;
    {
      const std::lock_guard<std::mutex> lock(settings_);
      token = token_;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) continue;
    if (by_memory_ >= std::min<int64_t>(kMostByMemory, static_cast<int64_t>(memory_.limit() / segment_bytes_))) {
      // Makes room for the next client: the connections that have an old token and no call leave.
      for (const auto& [number, other] : connections_) {
        if (other->by_memory && other->state == State::kMessage && !same(other->token, token)) {
          ::shutdown(other->fd, SHUT_RDWR);
        }
      }
      continue;
    }
    connection->number = next_++;
    connections_[connection->number] = connection;
    if (add_to_epoll(epoll_, connection->fd, connection->number)) {
      ++by_memory_;
    } else {
      connections_.erase(connection->number);
    }
  }
}

// Ends the connection that has done nothing for the longest time if there are too many. One that has shown no token yet
// goes first.
void RowServer::make_room() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (static_cast<int64_t>(connections_.size()) - by_memory_ < most_connections_) return;
  std::shared_ptr<Connection> oldest;
  const auto rank = [](const Connection& c) { return std::make_pair(c.state == State::kMessage, c.since.load()); };
  for (const auto& [number, connection] : connections_) {
    const State state = connection->state;
    const bool is_idle = state == State::kShake || state == State::kHello || state == State::kMessage;
    if (connection->by_memory || connection->leaves || !is_idle) continue;
    if (oldest == nullptr || rank(*connection) < rank(*oldest)) oldest = connection;
  }
  if (oldest == nullptr) return;
  oldest->leaves = true;
  ::shutdown(oldest->fd, SHUT_RDWR);
}

void RowServer::handle(Connection& c) {
  c.armed.load(std::memory_order_acquire);
  Step step = Step::kAgain;
  try {
    while (step == Step::kAgain) {
      switch (c.state.load()) {
        case State::kShake: step = shake(c); break;
        case State::kHello: step = c.by_memory ? hello_memory(c) : hello(c); break;
        case State::kMessage: step = message(c); break;
        case State::kMemory: step = memory(c); break;
        case State::kBody: step = body(c); break;
        case State::kReply: step = send_out(c); break;
        case State::kRun:
        case State::kPython: return;  // another thread has the connection
        case State::kDiscard: step = fill(c, SIZE_MAX); break;
      }
    }
  } catch (const std::exception&) {  // no memory
    step = Step::kEnd;
  }
  // Another thread may go on with the connection as soon as it is armed.
  if (step == Step::kWaitRead) return arm(c, EPOLLIN);
  if (step == Step::kWaitWrite) return arm(c, EPOLLOUT);
  if (step == Step::kEnd) end(c);
}

void RowServer::arm(Connection& c, uint32_t events) {
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.u64 = static_cast<uint64_t>(c.number);
  c.armed.store(true, std::memory_order_release);
  epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &event);
}

// The caller has a reference to the connection, whose socket is closed with the last one.
void RowServer::end(Connection& c) {
  c.outcome = "cancelled";
  finish(c);
  const std::lock_guard<std::mutex> lock(mutex_);
  epoll_ctl(epoll_, EPOLL_CTL_DEL, c.fd, nullptr);
  if (c.tls != nullptr) c.tls->shutdown();
  ::shutdown(c.fd, SHUT_RDWR);
  if (connections_.erase(c.number) > 0 && c.by_memory) --by_memory_;
  changed_.notify_all();
}

RowServer::Step RowServer::shake(Connection& c) {
  switch (c.tls->accept()) {
    case Io::kDone: c.enter(State::kHello); return Step::kAgain;
    case Io::kWantRead: return Step::kWaitRead;
    case Io::kWantWrite: return Step::kWaitWrite;
    default: return Step::kEnd;
  }
}

// Reads until `in` has `wanted` bytes.
RowServer::Step RowServer::fill(Connection& c, size_t wanted) {
  thread_local std::array<char, kChunk> chunk;
  for (int discarded = 0; c.in.size() < wanted;) {
    size_t got = 0;
    switch (c.receive(chunk.data(), chunk.size(), got)) {
      case Io::kDone:
        if (c.state == State::kDiscard) {
          if (++discarded == kMostDiscarded) return Step::kWaitRead;
          break;
        }
        c.in.append(chunk.data(), got);
        c.moved += got;
        break;
      case Io::kWantRead: return Step::kWaitRead;
      case Io::kWantWrite: return Step::kWaitWrite;
      case Io::kEnd: return Step::kEnd;
    }
  }
  return Step::kAgain;
}

RowServer::Step RowServer::hello(Connection& c) {
  Step step = fill(c, kHelloBytes);
  if (step != Step::kAgain) return step;
  uint32_t version, token_bytes;
  std::memcpy(&version, c.in.data() + 8, 4);
  std::memcpy(&token_bytes, c.in.data() + 12, 4);
  if (c.in.compare(0, 8, kMagic) != 0 || token_bytes > kMostTokenBytes) return Step::kEnd;
  size_t head = kHelloBytes;
  uint32_t name_bytes = 0;
  if (version == kVersion) {
    head += sizeof name_bytes;
    step = fill(c, head);
    if (step != Step::kAgain) return step;
    std::memcpy(&name_bytes, c.in.data() + kHelloBytes, sizeof name_bytes);
    if (name_bytes > kMostNameBytes) return Step::kEnd;
  }
  step = fill(c, head + token_bytes + name_bytes);
  if (step != Step::kAgain) return step;
  c.token = c.in.substr(head, token_bytes);
  const std::string name = c.in.substr(head + token_bytes, name_bytes);
  c.in.erase(0, head + token_bytes + name_bytes);
  {
    const std::lock_guard<std::mutex> lock(settings_);
    c.from_primary = backup_ && !secret_.empty() && same(c.token, secret_);
  }
  // The secret of a primary is for this server alone. A primary of an earlier release knows no name of its backup.
  const bool is_known = version == kVersion || (version == kUnnamedVersion && c.from_primary);
  if (!is_known) {
    const std::string details = "the client speaks version " + std::to_string(version) +
                                " of the protocol for rows, the server version " + std::to_string(kVersion) +
                                ": install the same release on both";
    return refuse(c, {kFailedPrecondition, details, ""}, true);
  }
  // A wrong server may have another token, and says before that it is the wrong one.
  if (!name.empty() && name != name_) {
    const std::string shown = is_utf8(name.data(), name.size()) ? name : "?";
    const std::string details = "the connection is for the server " + shown + " and has reached another server";
    return refuse(c, {kFailedPrecondition, details, ""}, true);
  }
  const Status refused = check(c);
  if (refused.code != kOk) return refuse(c, refused, true);
  RowReply welcome;
  if (version == kVersion) welcome.server = name_;
  put(c, welcome, nullptr, nullptr);
  c.enter(State::kReply);
  return Step::kAgain;
}

// Sends the client the file of a new segment, whose size neither side can change: a process that could make it smaller
// could end the other one, at its next access, by a signal.
RowServer::Step RowServer::hello_memory(Connection& c) {
  std::array<char, 256> secret;
  const ssize_t n = recv(c.fd, secret.data(), secret.size(), 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Step::kWaitRead;
  {
    const std::lock_guard<std::mutex> lock(settings_);
    if (n <= 0 || !same(std::string(secret.data(), static_cast<size_t>(n)), memory_secret_)) return Step::kEnd;
    c.token = token_;
  }
  const int file = memfd_create("recstore", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  void* memory = MAP_FAILED;
  if (file >= 0 && ftruncate(file, static_cast<off_t>(segment_bytes_)) == 0 &&
      fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
    memory = mmap(nullptr, segment_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (memory == MAP_FAILED) {
    if (file >= 0) ::close(file);
    return Step::kEnd;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);  // for memory_bytes()
    c.memory = file;
    c.segment = static_cast<char*>(memory);
    c.segment_bytes = segment_bytes_;
  }
  const std::string size = std::to_string(segment_bytes_);
  iovec content{const_cast<char*>(size.data()), size.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* rights = CMSG_FIRSTHDR(&message);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof file);
  std::memcpy(CMSG_DATA(rights), &file, sizeof file);
  if (sendmsg(c.fd, &message, MSG_NOSIGNAL) < 0) return Step::kEnd;
  c.enter(State::kMessage);
  return Step::kAgain;
}

// Reads a request of a connection by shared memory.
RowServer::Step RowServer::packet(Connection& c) {
  thread_local std::vector<char> bytes;
  bytes.resize(packet_bytes_ + 1);
  const ssize_t n = recv(c.fd, bytes.data(), bytes.size(), 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Step::kWaitRead;
  if (n <= 0) return Step::kEnd;
  if (n > static_cast<ssize_t>(packet_bytes_)) {
    const std::string details = "a message may have at most " + std::to_string(packet_bytes_) + " bytes";
    return refuse(c, {kInvalidArgument, details, "ValueError"}, false);
  }
  c.message.assign(bytes.data(), static_cast<size_t>(n));
  return Step::kAgain;
}

// Reads a request of a connection by TCP.
RowServer::Step RowServer::framed(Connection& c) {
  Step step = fill(c, 4);
  if (step != Step::kAgain) return step;
  uint32_t size;
  std::memcpy(&size, c.in.data(), 4);
  if (size > kMostMessageBytes) {
    return refuse(c, {kInvalidArgument, "a message may have at most 1048576 bytes", "ValueError"}, true);
  }
  step = fill(c, 4 + size_t{size});
  if (step != Step::kAgain) return step;
  c.message = c.in.substr(4, size);
  c.in.erase(0, 4 + size_t{size});
  return Step::kAgain;
}

// The most bytes that the arrays of a request may have.
uint64_t RowServer::most_request_bytes(const RowRequest& request) const {
  return request.is_write() ? std::min<uint64_t>(memory_.limit(), most_write_bytes_) : kMostPullBytes;
}

RowServer::Step RowServer::message(Connection& c) {
  c.request = {};
  const Step step = c.by_memory ? packet(c) : framed(c);
  if (step != Step::kAgain || c.state != State::kMessage) return step;
  c.begin = now();
  c.in_call = true;
  ++running_[c.by_memory];
  c.outcome = "ok";
  try {
    if (stopping_) unavailable("the server stops");
    const Status refused = check(c);
    if (refused.code != kOk) return refuse(c, refused, true);
    c.request = parse_request(c.message.data(), c.message.size());
  } catch (const CallFailed& failed) {
    return refuse(c, failed.status(), !c.by_memory);  // the sizes of its arrays are not known
  }
  const auto& sizes = c.request.sizes;
  if (c.by_memory && !c.fit({sizes[0], sizes[1], sizes[2], sizes[3]})) return refuse(c, c.unfit(), false);
  const bool is_read_by_memory = c.by_memory && !c.request.is_write();
  const uint64_t most_bytes = most_request_bytes(c.request);
  // The sum of the sizes may overflow, so that each of them is compared, too.
  const uint64_t largest = *std::max_element(sizes.begin(), sizes.end());
  if (is_read_by_memory || (c.request.bytes() <= most_bytes && largest <= most_bytes)) {
    c.enter(State::kMemory);
    return Step::kAgain;
  }
  std::string limit = "a read may have at most 4194304 ids";
  if (c.request.is_write()) {
    const std::string bytes = std::to_string(most_bytes) + " bytes";
    limit = most_bytes < most_write_bytes_ ? "a request may have at most " + bytes + " (--max-request-memory)"
                                           : "a write may have at most " + std::to_string(most_bytes / 128) +
                                                 " ids and " + bytes + " (--max-write)";
  }
  return refuse(c, {kInvalidArgument, limit + ": split it", "ValueError"}, !c.by_memory);
}

RowServer::Step RowServer::memory(Connection& c) {
  const uint64_t bytes = c.request.bytes();
  if (!memory_.take(bytes)) {
    if (now() - c.since > kMemoryS || stopping_) {
      const char* details = "the running requests of all clients take --max-request-memory: repeat the call";
      return refuse(c, {kUnavailable, details, ""}, !c.by_memory);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!memory_.take(bytes)) {  // what is given back from now on wakes the connection
      for_memory_.push_back(c.number);
      return Step::kAway;
    }
  }
  c.held = bytes;
  const auto& sizes = c.request.sizes;
  const bool in_segment = c.by_memory && calls_.reads_once(c.request);  // the gradients of an update are only added
  const size_t copied_values = in_segment ? 0 : rounded(sizes[1]);
  try {
    c.arrays = new_buffer(rounded(sizes[0]) + copied_values + rounded(sizes[2]) + rounded(sizes[3]));
  } catch (const std::bad_alloc&) {
    return refuse(c, {kResourceExhausted, "out of memory", "MemoryError"}, !c.by_memory);
  }
  auto* to = static_cast<char*>(c.arrays.data());
  char* from = c.segment;
  for (size_t i = 0; i < 4; ++i) {
    c.at[i] = i == 1 && in_segment ? from : to;
    if (c.by_memory && c.at[i] == to && sizes[i] > 0) std::memcpy(to, from, sizes[i]);
    if (c.at[i] == to) to += rounded(sizes[i]);
    if (c.by_memory) from += rounded(sizes[i]);
  }
  if (c.by_memory) return run(c);
  c.got = 0;
  c.enter(State::kBody);
  return Step::kAgain;
}

RowServer::Step RowServer::body(Connection& c) {
  for (size_t i = 0, before = 0; i < 4; before += c.request.sizes[i], ++i) {
    const uint64_t size = c.request.sizes[i];
    while (c.got < before + size) {
      char* to = c.at[i] + (c.got - before);
      const size_t left = before + size - c.got;
      size_t got = 0;
      if (!c.in.empty()) {
        got = std::min(left, c.in.size());
        std::memcpy(to, c.in.data(), got);
        c.in.erase(0, got);
      } else {
        switch (c.receive(to, left, got)) {
          case Io::kDone: break;
          case Io::kWantRead: return Step::kWaitRead;
          case Io::kWantWrite: return Step::kWaitWrite;
          case Io::kEnd: return Step::kEnd;
        }
      }
      c.got += got;
      c.moved += got;
    }
  }
  return run(c);
}

RowServer::Step RowServer::run(Connection& c) {
  c.enter(State::kRun);
  try {
    if (c.request.call == Call::kPull &&
        (c.pull = calls_.pull(c.request, c.at, c.by_memory ? kMemoryPart : kTcpPart)) != nullptr) {
      if (c.by_memory && static_cast<uint64_t>(c.pull->bytes()) > c.segment_bytes) return refuse(c, c.unfit(), false);
      c.enter(State::kReply);
      return Step::kAgain;
    }
    RowReply reply;
    std::vector<char> found;
    if (calls_.run(c.request, c.message, c.from_primary, c.at, reply, found)) {
      put(c, reply, found.data(), nullptr);
      c.enter(State::kReply);
      return Step::kAgain;
    }
  } catch (const CallFailed& failed) {
    return refuse(c, failed.status(), false);
  } catch (const std::bad_alloc&) {
    if (c.request.is_write()) throw;  // the client asks again, because the write may have been carried out
    return refuse(c, {kResourceExhausted, "out of memory", "MemoryError"}, false);
  }
  c.enter(State::kPython);
  const std::lock_guard<std::mutex> lock(mutex_);
  for_python_.push_back(c.number);
  changed_.notify_all();
  return Step::kAway;
}

// Writes a reply into the connection's buffer, and its arrays after it or into the segment. Throws std::bad_alloc.
void RowServer::put(Connection& c, const RowReply& reply, const char* found, const char* rows) {
  const std::string message = reply.serialized();
  c.out_at = 0;
  if (c.by_memory) {
    std::memcpy(c.reply_memory(message.size() + 1), message.data(), message.size());
    c.out_end = message.size();
    if (reply.found > 0) std::memcpy(c.segment, found, reply.found);
    return;
  }
  const auto size = static_cast<uint32_t>(message.size());
  const size_t bytes = 4 + message.size() + reply.found + reply.rows;
  char* at = c.reply_memory(bytes);
  std::memcpy(at, &size, 4);
  std::memcpy(at + 4, message.data(), message.size());
  at += 4 + message.size();
  if (reply.found > 0) std::memcpy(at, found, reply.found);
  if (reply.rows > 0) std::memcpy(at + reply.found, rows, reply.rows);
  c.out_end = bytes;
}

RowServer::Step RowServer::refuse(Connection& c, const Status& status, bool close) {
  RowReply reply;
  reply.status = status;
  c.outcome = status.error.empty() ? "refused" : status.error;
  c.pull = nullptr;
  put(c, reply, nullptr, nullptr);
  c.close = close;
  c.enter(State::kReply);
  return Step::kAgain;
}

RowServer::Step RowServer::send_out(Connection& c) {
  while (true) {
    while (c.out_at < c.out_end) {
      size_t sent = 0;
      switch (c.transmit(static_cast<char*>(c.out.data()) + c.out_at, c.out_end - c.out_at, sent)) {
        case Io::kDone: break;
        case Io::kWantRead: return Step::kWaitRead;
        case Io::kWantWrite: return Step::kWaitWrite;
        case Io::kEnd: return Step::kEnd;
      }
      c.out_at += sent;
      c.moved += sent;
    }
    if (c.pull == nullptr) break;
    c.enter(State::kRun);
    try {
      const Pull::Part part = c.pull->next();
      RowReply reply;
      reply.rows = static_cast<uint64_t>(part.bytes);
      reply.last = c.pull->is_done();
      if (c.by_memory) {
        c.written = (c.written + 3) / 4 * 4;
        calls_.read(*c.pull, part, c.segment + c.written);
        c.written += reply.rows;
        put(c, reply, nullptr, nullptr);
        if (reply.last) c.pull = nullptr;
        c.enter(State::kReply);
        continue;
      }
      const std::string message = reply.serialized();
      const size_t head = 4 + message.size();
      // The rows begin at an aligned place, and the message ends there.
      const size_t place = rounded(head);
      const size_t bytes = place + reply.rows;
      char* rows = c.reply_memory(bytes) + place;
      calls_.read(*c.pull, part, rows);
      char* begin = rows - head;
      const auto size = static_cast<uint32_t>(message.size());
      std::memcpy(begin, &size, 4);
      std::memcpy(begin + 4, message.data(), message.size());
      c.out_at = place - head;
      c.out_end = bytes;
      if (reply.last) c.pull = nullptr;
      c.enter(State::kReply);
    } catch (const CallFailed& failed) {
      refuse(c, failed.status(), false);
    } catch (const std::bad_alloc&) {
      refuse(c, {kResourceExhausted, "out of memory", "MemoryError"}, false);
    }
  }
  const bool close = c.close;
  finish(c);
  if (close && c.by_memory) return Step::kEnd;
  if (close) {  // what the client still sends is read for a moment, because the system would drop the reply otherwise
    if (c.tls != nullptr) c.tls->shutdown();
    ::shutdown(c.fd, SHUT_WR);
    c.in.clear();
    c.enter(State::kDiscard);
  } else {
    c.enter(State::kMessage);
  }
  return Step::kAgain;
}

// Ends the call of a connection, if it has one, and gives its memory back.
void RowServer::finish(Connection& c) {
  if (c.in_call) {
    counts_.call(kCallNames[static_cast<size_t>(c.request.call)], c.outcome, now() - c.begin);
    c.in_call = false;
    --running_[c.by_memory];
  }
  c.pull = nullptr;
  c.out_at = c.out_end = c.written = 0;
  c.arrays = Buffer();
  if (c.out_size > kChunk) {
    c.out = Buffer();
    c.out_size = 0;
  }
  if (c.in.empty() && c.in.capacity() > kChunk) c.in = std::string();
  if (c.message.capacity() > kChunk) c.message = std::string();
  if (c.held == 0) return;
  memory_.give_back(std::exchange(c.held, 0));
  const std::lock_guard<std::mutex> lock(mutex_);
  wake_waiters();
}

// Lets the connections that wait for memory try again. The caller has the mutex.
void RowServer::wake_waiters() {
  for (const int64_t number : std::exchange(for_memory_, {})) {
    const auto entry = connections_.find(number);
    if (entry != connections_.end()) arm(*entry->second, EPOLLOUT);  // a socket that can be written wakes a thread
  }
}

bool RowServer::next(PythonCall& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopped_ || !for_python_.empty(); });
    if (stopped_) return false;
    const auto entry = connections_.find(for_python_.front());
    for_python_.pop_front();
    if (entry == connections_.end()) continue;
    const Connection& c = *entry->second;
    call.connection = c.number;
    call.message = c.message.data();
    call.message_bytes = static_cast<int64_t>(c.message.size());
    call.room = static_cast<int64_t>(c.segment_bytes);
    for (size_t i = 0; i < 4; ++i) {
      call.arrays[i] = c.at[i];
      call.sizes[i] = static_cast<int64_t>(c.request.sizes[i]);
    }
    call.from_primary = c.from_primary ? 1 : 0;
    return true;
  }
}

bool RowServer::reply(int64_t number, const RowReply& asked, const char* found, const char* rows) {
  std::shared_ptr<Connection> connection;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = connections_.find(number);
    if (entry == connections_.end()) return false;
    connection = entry->second;
  }
  Connection& c = *connection;
  RowReply reply = asked;
  if (c.by_memory) {
    const size_t place = reply.found > 0 ? rounded(reply.found) : (c.written + 3) / 4 * 4;
    if (reply.found > c.segment_bytes || place > c.segment_bytes || reply.rows > c.segment_bytes - place) {
      reply = {};
      reply.status = c.unfit();
    }
    if (reply.found > 0) std::memcpy(c.segment, found, reply.found);
    if (reply.rows > 0) std::memcpy(c.segment + place, rows, reply.rows);
    c.written = place + reply.rows;
  }
  if (reply.status.code != kOk) c.outcome = reply.status.error.empty() ? "refused" : reply.status.error;
  const std::string message = reply.serialized();
  const auto size = static_cast<uint32_t>(message.size());
  // A message by shared memory has its size, and the arrays lie in the segment.
  const size_t beside = c.by_memory ? 0 : 1;
  const std::pair<const char*, size_t> parts[] = {{reinterpret_cast<const char*>(&size), 4 * beside},
                                                  {message.data(), message.size()},
                                                  {found, beside * reply.found},
                                                  {rows, beside * reply.rows}};
  c.enter(State::kPython);
  for (const auto& [data, bytes] : parts) {
    for (size_t at = 0; at < bytes;) {
      size_t sent = 0;
      const Io io = c.transmit(data + at, bytes - at, sent);
      if (io == Io::kEnd) {
        end(c);
        return false;
      }
      if (io == Io::kDone) {
        at += sent;
        c.moved += sent;
        continue;
      }
      pollfd wanted{c.fd, static_cast<short>(io == Io::kWantRead ? POLLIN : POLLOUT), 0};
      ::poll(&wanted, 1, 1000);
    }
  }
  c.enter(State::kPython);  // Python reads the next rows, for which the client waits
  if (!reply.last) return true;
  finish(c);
  c.enter(State::kMessage);
  arm(c, EPOLLIN | EPOLLOUT);  // a thread looks whether the next request is there already
  return true;
}

// Ends what keeps others waiting: connections that do not begin, and clients that are late while others wait for memory
// or for Python. All other calls, too, take memory from the same RequestMemory.
void RowServer::watch() {
  uint64_t refusals = memory_.refusals();
  double refused = -kPatienceS;
  while (!stopped_) {
    std::this_thread::sleep_for(kWatchPause);
    const std::lock_guard<std::mutex> lock(mutex_);
    const double time = now();
    if (std::exchange(refusals, memory_.refusals()) != memory_.refusals()) refused = time;
    const bool for_memory = time - refused < kPatienceS || stopping_;
    const bool for_python = !for_python_.empty() || stopping_;
    for (const auto& [number, connection] : connections_) {
      const State state = connection->state;
      const double age = time - connection->since.load();
      const bool beginning = state == State::kShake || state == State::kHello;
      const short wanted = state == State::kBody ? POLLIN : POLLOUT;
      const bool holds_memory = state == State::kBody || state == State::kReply || state == State::kPython;
      const bool transfers = state != State::kPython || connection->moved > 0;
      const bool others_wait = (for_memory && holds_memory) || (for_python && state == State::kPython);
      if (stopping_ && (beginning || state == State::kMessage)) {
        ::shutdown(connection->fd, SHUT_RD);
      } else if ((beginning && age > kHelloS) || (state == State::kDiscard && age > kDiscardS)) {
        ::shutdown(connection->fd, SHUT_RDWR);
      } else if (others_wait && transfers && connection->late_s() > kPatienceS && !connection->is_ready(wanted)) {
        ++ended_;
        ::shutdown(connection->fd, SHUT_RDWR);
      }
    }
    wake_waiters();  // calls by gRPC do not say that they give memory back
  }
}

int64_t RowServer::waiting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::count_if(connections_.begin(), connections_.end(),
                       [](const auto& entry) { return entry.second->state == State::kMemory; });
}

int64_t RowServer::connections() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(connections_.size()) - by_memory_;
}

int64_t RowServer::memory_connections() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return by_memory_;
}

int64_t RowServer::memory_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [number, connection] : connections_) {
    struct stat about{};
    if (connection->memory >= 0 && fstat(connection->memory, &about) == 0) bytes += 512 * about.st_blocks;
  }
  return bytes;
}

void RowServer::stop(double seconds) {
  if (stopped_) return;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    for (const int listener : {listener_, memory_listener_}) {
      if (listener < 0) continue;
      epoll_ctl(epoll_, EPOLL_CTL_DEL, listener, nullptr);
      ::shutdown(listener, SHUT_RDWR);
    }
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return connections_.empty(); });
    for (const auto& [number, connection] : connections_) ::shutdown(connection->fd, SHUT_RDWR);
    stopped_ = true;
    changed_.notify_all();
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
  for (std::thread& thread : threads_) thread.join();
  if (watcher_.joinable()) watcher_.join();
  for (const int listener : {listener_, memory_listener_}) {
    if (listener >= 0) ::close(listener);
  }
}

}  // namespace recstore_service
