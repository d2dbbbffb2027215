#include "row_links.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "message_fields.h"
#include "tcp.h"
#include "tls.h"

namespace recstore {
namespace {

using recstore_service::CallFailed;
using recstore_service::Io;
using recstore_service::Reader;

constexpr int kConnectMs = 1000;
constexpr int64_t kMostIds = int64_t{1} << 20;  // of a request
constexpr size_t kMessageBytes = size_t{1} << 16;
constexpr uint64_t kMostArray = uint64_t{1} << 30;

struct Reply {
  uint64_t code = 0;
  uint64_t found = 0;
  uint64_t rows = 0;
  std::string details;
  std::string error;
  std::string server;
  bool last = false;
};

// A SegmentReply without an error. Throws Passing and Refused.
Reply parsed(const char* data, size_t size, bool is_new) {
  Reply reply;
  try {
    for (Reader reader(data, size); reader.next();) {
      switch (reader.field("-02200002")) {
        case 1: reply.code = reader.number(); break;
        case 2: reply.details = reader.text(); break;
        case 3: reply.error = reader.text(); break;
        case 4: reply.found = reader.number(); break;
        case 5: reply.rows = reader.number(); break;
        case 7: reply.last = reader.number() != 0; break;
        case 8: reply.server = reader.text(); break;
        default: reader.skip();
      }
    }
  } catch (const CallFailed&) {
    throw Passing("the reply cannot be read");
  }
  if (reply.found > kMostArray || reply.rows > kMostArray) throw Passing("the reply is too large");
  if (reply.code == 0) return reply;
  const bool denied = reply.code == recstore_service::kUnauthenticated;
  if (denied && is_new) throw Refused(reply.details + ": RECSTORE_TOKEN_FILE must name the file of the servers' token");
  if (is_new && reply.code == recstore_service::kFailedPrecondition) {
    throw Refused(reply.details + ": the server and the library that reads the model must be of the same release");
  }
  const bool passes = denied || reply.code == recstore_service::kUnavailable || reply.error == "ServerRestartedError";
  if (passes) throw Passing(reply.details);
  throw Refused(reply.details);
}

std::string token() {
  const std::string path = environment("RECSTORE_TOKEN_FILE");
  if (path.empty()) return "";
  std::ifstream file(path);
  std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw Refused("the file " + path + " of RECSTORE_TOKEN_FILE cannot be read");
  constexpr const char* kBlanks = " \t\r\n";
  const auto begin = content.find_first_not_of(kBlanks);
  if (begin == std::string::npos) return "";
  return content.substr(begin, content.find_last_not_of(kBlanks) - begin + 1);
}

bool is_loopback(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return false;
  if (address.ss_family == AF_INET) {
    return (ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24) == 127;
  }
  const in6_addr& host = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&host) || (IN6_IS_ADDR_V4MAPPED(&host) && host.s6_addr[12] == 127);
}

class TcpLink final : public RowLink {
 public:
  TcpLink(int socket, size_t side) : RowLink(side) { fd = socket; }

  void shake(recstore_service::TlsContext& context, const std::string& host, Clock::time_point end) {
    tls_ = context.stream(fd, host);
    if (tls_ == nullptr) throw Passing("OpenSSL has no memory for a connection");
    for (Io io = tls_->connect(); io != Io::kDone; io = tls_->connect()) {
      pollfd ready{fd, static_cast<short>(io == Io::kWantRead ? POLLIN : POLLOUT), 0};
      if (io == Io::kEnd) {
        throw Passing("the server has refused the TLS connection, or its certificate is not of RECSTORE_TLS_CA");
      }
      if (poll(&ready, 1, milliseconds(end - Clock::now())) == 0) unreached("the server does not answer");
    }
  }

  void hello(const std::string& token, Clock::time_point end) {
    // The connection is for any server, which names itself: the caller knows which one it has to be.
    const uint32_t numbers[] = {recstore_service::kVersion, static_cast<uint32_t>(token.size()), 0};
    is_new_ = true;
    start({recstore_service::kMagic, 8}, nullptr, 0);
    head_.append(reinterpret_cast<const char*>(numbers), sizeof numbers) += token;
    while (const short events = advance([](const char*, uint64_t) {})) {
      pollfd ready{fd, events, 0};
      if (poll(&ready, 1, milliseconds(end - Clock::now())) == 0) unreached("the server does not answer");
    }
    is_new_ = false;
    server = reply_.server;
    if (server.empty()) unreached("another program answers at its address");
  }

  void begin(const std::string& message, const int64_t* ids, int64_t n) override {
    const auto size = static_cast<uint32_t>(message.size());
    start(std::string(reinterpret_cast<const char*>(&size), sizeof size) + message, ids, n);
  }

  short advance(const Sink& sink) override {
    while (sent_ < head_.size() + ids_bytes_) {
      const bool in_head = sent_ < head_.size();
      const size_t sent_ids = in_head ? 0 : sent_ - head_.size();
      const char* from = in_head ? head_.data() + sent_ : ids_ + sent_ids;
      const size_t bytes = in_head ? head_.size() - sent_ : ids_bytes_ - sent_ids;
      size_t moved = 0;
      const Io io = transmit(from, bytes, moved);
      if (io == Io::kEnd) break;  // a server that refuses a request says why before it closes the connection
      if (io != Io::kDone) return io == Io::kWantRead ? POLLIN : POLLOUT;
      sent_ += moved;
    }
    while (true) {
      if (to_ - from_ >= wanted_) {
        const bool has_ended = step_ == Step::kArrays && reply_.last;
        use(sink);
        if (!has_ended) continue;
        is_idle = true;
        return 0;
      }
      if (from_ + wanted_ > in_.size()) {
        std::memmove(in_.data(), in_.data() + from_, to_ - from_);
        to_ -= std::exchange(from_, 0);
        if (wanted_ > in_.size()) in_.resize(wanted_);
      }
      size_t moved = 0;
      const Io io = receive(in_.data() + to_, in_.size() - to_, moved);
      if (io == Io::kEnd) unreached("the server has closed the connection");
      if (io != Io::kDone) return io == Io::kWantRead ? POLLIN : POLLOUT;
      to_ += moved;
    }
  }

  int64_t most_ids(int64_t) const override { return kMostIds; }
  bool is_by_memory() const override { return false; }

 private:
  enum class Step { kSize, kMessage, kArrays };

  void start(std::string head, const int64_t* ids, int64_t n) {
    head_ = std::move(head);
    ids_ = reinterpret_cast<const char*>(ids);
    ids_bytes_ = static_cast<size_t>(n) * sizeof(int64_t);
    sent_ = 0;
    is_idle = false;
    expect(Step::kSize, sizeof(uint32_t));
  }
  void expect(Step step, uint64_t bytes) {
    step_ = step;
    wanted_ = bytes;
  }
  // Uses the bytes that were expected.
  void use(const Sink& sink) {
    const char* received = in_.data() + from_;
    from_ += wanted_;
    switch (step_) {
      case Step::kSize: {
        uint32_t size;
        std::memcpy(&size, received, sizeof size);
        if (size > kMessageBytes) throw Passing("the reply is too long");
        return expect(Step::kMessage, size);
      }
      case Step::kMessage:
        reply_ = parsed(received, wanted_, is_new_);
        return expect(Step::kArrays, reply_.found + reply_.rows);
      case Step::kArrays:
        if (wanted_ > 0) sink(received, wanted_);
        return expect(Step::kSize, sizeof(uint32_t));
    }
  }
  Io transmit(const char* from, size_t size, size_t& moved) {
    if (tls_ != nullptr) return tls_->write(from, size, moved);
    const ssize_t n = ::send(fd, from, size, MSG_NOSIGNAL);
    if (n < 0) return errno == EAGAIN || errno == EINTR ? Io::kWantWrite : Io::kEnd;
    moved = static_cast<size_t>(n);
    return Io::kDone;
  }
  Io receive(char* to, size_t size, size_t& moved) {
    if (tls_ != nullptr) return tls_->read(to, size, moved);
    const ssize_t n = recv(fd, to, size, 0);
    if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR) ? Io::kWantRead : Io::kEnd;
    moved = static_cast<size_t>(n);
    return Io::kDone;
  }

  std::unique_ptr<recstore_service::TlsStream> tls_;
  std::string head_;
  const char* ids_ = nullptr;
  size_t ids_bytes_ = 0;
  size_t sent_ = 0;  // bytes of the head and the ids
  std::vector<char> in_ = std::vector<char>(kMessageBytes);
  // The bytes of in_ that were received and not used are [from_, to_).
  size_t from_ = 0;
  size_t to_ = 0;
  Step step_ = Step::kSize;
  uint64_t wanted_ = 0;
  Reply reply_;
  bool is_new_ = false;
};

class MemoryLink final : public RowLink {
 public:
  MemoryLink(size_t side, std::atomic<int>& open) : RowLink(side), open_(open) { ++open_; }
  ~MemoryLink() override {
    if (memory_ != nullptr) munmap(memory_, size_);
    --open_;
  }

  // Returns false if the server does not take the connection.
  bool connect(const std::string& name, const std::string& secret) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (name.empty() || name.size() >= sizeof address.sun_path) return false;
    std::memcpy(address.sun_path + 1, name.data(), name.size());  // an abstract name begins with \0
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    const timeval patience{kConnectMs / 1000, 0};
    if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) != 0) return false;
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) != 0) return false;
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), length) != 0) return false;
    ucred peer{};
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) return false;
    if (::send(fd, secret.data(), secret.size(), MSG_NOSIGNAL) < 0) return false;
    const int file = receive_file();
    if (file < 0) return false;
    struct stat about{};
    // Memory that the server could make smaller could end this process by a signal.
    const bool fixed = fstat(file, &about) == 0 && static_cast<uint64_t>(about.st_size) >= size_ &&
                       (fcntl(file, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
    void* memory = MAP_FAILED;
    if (fixed && size_ > kMessageBytes) {
      memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    if (memory == MAP_FAILED) return false;
    memory_ = static_cast<char*>(memory);
    madvise(memory_, size_, MADV_DONTFORK);
    return true;
  }

  void begin(const std::string& message, const int64_t* ids, int64_t n) override {
    if (n > 0) std::memcpy(memory_, ids, static_cast<size_t>(n) * sizeof(int64_t));
    is_idle = false;
    place_ = 0;
    // The socket has room: the server has taken the request before.
    if (::send(fd, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
      unreached("the server has closed the connection");
    }
  }

  short advance(const Sink& sink) override {
    while (true) {
      std::array<char, kMessageBytes> message;
      const ssize_t n = recv(fd, message.data(), message.size(), MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) return POLLIN;
      if (n <= 0) unreached("the server has closed the connection");
      const Reply reply = parsed(message.data(), static_cast<size_t>(n), false);
      const uint64_t bytes = reply.found + reply.rows;
      place_ = (place_ + 3) / 4 * 4;
      if (place_ > size_ || bytes > size_ - place_) {
        throw Passing("the server has answered with a wrong number of rows");
      }
      if (bytes > 0) sink(memory_ + place_, bytes);
      place_ += bytes;
      if (reply.last) {
        is_idle = true;
        return 0;
      }
    }
  }

  int64_t most_ids(int64_t entry_bytes) const override {
    const auto id_bytes =
        std::max<int64_t>(entry_bytes, sizeof(int64_t));  // the ids and their entries share the memory
    return std::max<int64_t>(1, static_cast<int64_t>(size_ - kMessageBytes) / id_bytes);
  }
  bool is_by_memory() const override { return true; }

 private:
  // Receives the size of the memory and its file descriptor. Returns -1 if the server has closed the connection.
  int receive_file() {
    char text[32] = {};
    iovec content{text, sizeof text - 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(fd, &message, MSG_CMSG_CLOEXEC) <= 0) return -1;
    const cmsghdr* part = CMSG_FIRSTHDR(&message);
    if (part == nullptr || part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS ||
        part->cmsg_len != CMSG_LEN(sizeof(int))) {
      return -1;
    }
    int file;
    std::memcpy(&file, CMSG_DATA(part), sizeof file);
    size_ = std::strtoull(text, nullptr, 10);
    return file;
  }

  std::atomic<int>& open_;
  char* memory_ = nullptr;
  size_t size_ = 0;
  size_t place_ = 0;  // where the next rows lie
};

}  // namespace

void unreached(const std::string& reason, size_t server) {
  throw Passing(
      reason + ". Start the server with the same --rows-port, or export the model anew if its address has changed",
      server);
}

int milliseconds(Clock::duration left) {
  return static_cast<int>(
      std::clamp<int64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1, 0, 1 << 30));
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

RowLink::~RowLink() {
  if (fd < 0) return;
  shutdown(fd, SHUT_RDWR);  // a forked process may hold the socket too
  close(fd);
}

bool RowLink::is_alive() const {
  char byte;
  return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR);
}

std::unique_ptr<RowLink> tcp_link(const std::string& address, size_t side, bool tls, Clock::time_point end) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  std::unique_ptr<TcpLink> link;
  try {
    link = std::make_unique<TcpLink>(
        recstore_service::tcp_socket(host, std::atoi(address.c_str() + colon + 1), kConnectMs), side);
  } catch (const std::runtime_error& error) {
    unreached("the server cannot be reached: " + std::string(error.what()));
  }
  if (tls) {
    const std::string ca = environment("RECSTORE_TLS_CA");
    if (ca.empty()) {
      throw Refused(
          "its connections are encrypted: RECSTORE_TLS_CA must name the PEM file of the authority that signs its "
          "certificate");
    }
    std::shared_ptr<recstore_service::TlsContext> context;
    try {
      context = recstore_service::tls_context("", true, environment("RECSTORE_TLS_CERT"),
                                              environment("RECSTORE_TLS_KEY"), ca);
    } catch (const std::runtime_error& error) {
      throw Refused(std::string(error.what()) + " (RECSTORE_TLS_CA, RECSTORE_TLS_CERT, RECSTORE_TLS_KEY)");
    }
    link->shake(*context, host, end);
  }
  const std::string secret = token();
  if (!secret.empty() && !tls && !is_loopback(link->fd)) {
    throw Refused(
        "the token of RECSTORE_TOKEN_FILE would be sent unencrypted to another machine: export the model with a client "
        "of TLS (tls_ca)");
  }
  link->hello(secret, end);
  return link;
}

std::unique_ptr<RowLink> memory_link(const std::string& offer, size_t side, std::atomic<int>& open) {
  std::string name;
  std::string secret;
  try {
    for (Reader reader(offer.data(), offer.size()); reader.next();) {
      switch (reader.field("-22")) {
        case 1: name = reader.text(); break;
        case 2: secret = reader.text(); break;
        default: reader.skip();
      }
    }
  } catch (const CallFailed&) {
    return nullptr;
  }
  auto link = std::make_unique<MemoryLink>(side, open);
  if (!link->connect(name, secret)) return nullptr;
  return link;
}

}  // namespace recstore
