// Reads and writes of rows by memory that a client shares with a server of the same host and user: see SegmentRequest
// in recstore.proto.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "call.h"

namespace recstore::detail {

// A connection to a server, for one call at a time.
class Segment {
 public:
  // Returns null if the server is on another host, runs as another user or has too many connections.
  static std::unique_ptr<Segment> open(const pb::AttachReply& offer) {
    std::unique_ptr<Segment> made(new Segment);
    return made->connect(offer) ? std::move(made) : nullptr;
  }

  ~Segment() {
    if (memory_ != nullptr) munmap(memory_, size_);
    if (socket_ >= 0) {
      shutdown(socket_, SHUT_RDWR);  // a forked process may hold the socket too
      close(socket_);
    }
  }

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Whether the last reply of the last call has arrived, so that the connection can be used again.
  bool is_idle() const { return idle_; }

  // Whether the server is still there. To be called between two calls.
  bool is_alive() const {
    char byte;
    return recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
           (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  }

  // Whether arrays of `bytes` bytes fit into the memory together.
  bool fits(int64_t bytes) const { return static_cast<uint64_t>(bytes) + 4 * kAlignment <= size_; }

  Outcome pull(const pb::PullHeader& header, Answer& answer, double left_s) {
    begin(left_s);
    const Part& part = answer.part;
    const auto most =
        std::max<int64_t>(1, static_cast<int64_t>((size_ - kMessageBytes) / std::max<size_t>(answer.entry_bytes, 8)));
    int64_t sent = 0;
    do {
      const int64_t first = sent, n = std::min(part.n - first, most);
      if (n > 0) std::memcpy(memory_, part.ids + first, static_cast<size_t>(n) * 8);
      sent += n;
      pb::SegmentRequest request;
      *request.mutable_pull() = header;
      request.set_ids(static_cast<uint64_t>(n) * 8);
      pb::SegmentReply reply;
      Outcome made = send(request);
      uint64_t place = 0;
      do {
        if (made.code == grpc::StatusCode::OK) made = receive(reply);
        if (made.code != grpc::StatusCode::OK) return made;
        const uint64_t bytes = header.want() == pb::PullHeader::ROWS ? reply.rows() : reply.found();
        if (bytes > size_ - place || bytes > static_cast<uint64_t>(sent - answer.done) * answer.entry_bytes ||
            !answer.add(memory_ + place, bytes)) {
          return unfit();
        }
        place = std::min<uint64_t>(size_, (place + bytes + 3) / 4 * 4);
      } while (!reply.last());
      if (answer.done != sent) return unfit();
    } while (sent < part.n);
    idle_ = true;
    return {};
  }

  // The arrays must fit.
  Outcome write(const pb::WriteHeader& header, const Part& part, const float* rows, int64_t row_bytes, double left_s,
                uint64_t& deleted) {
    begin(left_s);
    const size_t ids_bytes = static_cast<size_t>(part.n) * 8;
    if (part.n > 0) std::memcpy(memory_, part.ids, ids_bytes);
    copy_rows(part, 0, part.n, rows, row_bytes, memory_ + (ids_bytes + kAlignment - 1) / kAlignment * kAlignment);
    pb::SegmentRequest request;
    *request.mutable_write() = header;
    request.set_ids(ids_bytes);
    request.set_rows(static_cast<uint64_t>(part.n * row_bytes));
    pb::SegmentReply reply;
    Outcome made = send(request);
    if (made.code == grpc::StatusCode::OK) made = receive(reply);
    deleted = reply.deleted();
    idle_ = idle_ || made.code == grpc::StatusCode::OK;
    return made;
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kMessageBytes = 1 << 16;
  static constexpr time_t kHelloSeconds = 5;

  Segment() = default;

  bool connect(const pb::AttachReply& offer) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const size_t name_size = offer.socket().size();  // "recstore-" and 32 digits; a server names no other socket
    if (name_size != 9 + 32 || offer.socket().compare(0, 9, "recstore-") != 0) return false;
    std::memcpy(address.sun_path + 1, offer.socket().data(), offer.socket().size());  // an abstract name begins with \0
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + offer.socket().size());
    socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    const timeval hello{kHelloSeconds, 0};
    ucred peer{};
    socklen_t size = sizeof peer;
    if (socket_ < 0 || setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &hello, sizeof hello) != 0 ||
        setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &hello, sizeof hello) != 0 ||
        ::connect(socket_, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
        getsockopt(socket_, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid() ||
        ::send(socket_, offer.secret().data(), offer.secret().size(), MSG_NOSIGNAL) < 0) {
      return false;
    }
    const int file = receive_file();
    if (file < 0) return false;
    struct stat about{};
    // Memory that the server could make smaller could end this process by a signal.
    const bool fixed = fstat(file, &about) == 0 && static_cast<uint64_t>(about.st_size) >= size_ &&
                       (fcntl(file, F_GET_SEALS) & F_SEAL_SHRINK) != 0;
    void* memory =
        fixed && size_ > kMessageBytes ? mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (memory == MAP_FAILED) return false;
    memory_ = static_cast<char*>(memory);
    madvise(memory_, size_, MADV_DONTFORK);
    return true;
  }

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
    if (recvmsg(socket_, &message, MSG_CMSG_CLOEXEC) <= 0) return -1;
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

  void begin(double left_s) {
    idle_ = false;
    end_ = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(left_s));
  }

  Outcome send(const pb::SegmentRequest& request) {
    const std::string message = request.SerializeAsString();
    // The socket has room: the server has taken the request before.
    if (::send(socket_, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
      return gone(std::strerror(errno));
    }
    return {};
  }

  Outcome receive(pb::SegmentReply& reply) {
    pollfd waiting{socket_, POLLIN, 0};
    while (true) {
      const double left_s = Seconds(end_ - std::chrono::steady_clock::now()).count();
      const int ready = poll(&waiting, 1, static_cast<int>(std::clamp(left_s * 1000 + 1, 0.0, 1e9)));
      if (ready > 0) break;
      if (ready == 0) return {grpc::StatusCode::DEADLINE_EXCEEDED, "the server has not answered", ""};
      if (errno != EINTR) return gone(std::strerror(errno));
    }
    buffer_.resize(kMessageBytes);
    const ssize_t size = recv(socket_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (size <= 0) return gone(size == 0 ? "the connection was closed" : std::strerror(errno));
    if (!reply.ParseFromArray(buffer_.data(), static_cast<int>(size))) return gone("the reply cannot be read");
    if (reply.code() == 0) return {};
    idle_ = true;  // the server has answered with an error
    return {static_cast<grpc::StatusCode>(reply.code()), reply.details(), reply.error()};
  }

  static Outcome gone(const std::string& reason) {
    return {grpc::StatusCode::UNAVAILABLE, "shared memory: " + reason, ""};
  }

  int socket_ = -1;
  char* memory_ = nullptr;
  size_t size_ = 0;
  bool idle_ = true;
  std::chrono::steady_clock::time_point end_;
  std::vector<char> buffer_;
};

// The connections of a client to one server by shared memory. A call takes a connection for itself. If there is none,
// the call goes by gRPC.
class SharedMemory {
 public:
  SharedMemory() { idle_.reserve(kMostConnections); }

  // Sets `taken`, or leaves it null for a call by gRPC. `attach` asks the server for its address. Returns its error.
  template <class Attach>
  Outcome take(std::unique_ptr<Segment>& taken, const Attach& attach) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (!idle_.empty()) {
        taken = std::move(idle_.back());
        idle_.pop_back();
        if (taken->is_alive()) return {};
        taken = nullptr;
        --open_;
      }
      if (open_ >= kMostConnections || std::chrono::steady_clock::now() < not_before_) return {};
      ++open_;
    }
    pb::AttachReply offer;
    Outcome made = attach(offer);
    if (made.code == grpc::StatusCode::OK) taken = Segment::open(offer);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (taken == nullptr) {
      --open_;
      if (made.code == grpc::StatusCode::UNIMPLEMENTED) made = {};
      if (made.code == grpc::StatusCode::OK) not_before_ = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    }
    return made;
  }

  // Takes a connection back after a call. It is closed if the call has not ended.
  void give_back(std::unique_ptr<Segment> taken) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (taken->is_idle()) {
      idle_.push_back(std::move(taken));
    } else {
      --open_;
    }
  }

 private:
  static constexpr int kMostConnections = 8;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Segment>> idle_;
  int open_ = 0;
  std::chrono::steady_clock::time_point not_before_;
};

}  // namespace recstore::detail
