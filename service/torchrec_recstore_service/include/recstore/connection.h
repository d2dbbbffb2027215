#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "call.h"
#include "error.h"
#include "options.h"
#include "recstore.grpc.pb.h"
#include "shared_memory.h"

namespace recstore::detail {

// The pauses between the repetitions of a failing call: up to twice as long as the one before, from 50 ms to 1 s, and
// shortened at random, so that many clients do not repeat their calls at the same moment.
class Backoff {
 public:
  explicit Backoff(double timeout_s)
      : end_(std::chrono::steady_clock::now() +
             std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(timeout_s))) {}

  double left_s() const { return Seconds(end_ - std::chrono::steady_clock::now()).count(); }

  void pause() {
    thread_local std::minstd_rand random{std::random_device{}()};
    const double pause_s = pause_s_ * std::uniform_real_distribution<>(0.5, 1)(random);
    std::this_thread::sleep_for(Seconds(std::max(0.0, std::min(left_s(), pause_s))));
    pause_s_ = std::min(2 * pause_s_, 1.0);
  }

 private:
  std::chrono::steady_clock::time_point end_;
  double pause_s_ = 0.05;
};

// The kind of the error of a server that was stopped and started again: it waits, or the call is for an earlier run.
constexpr char kServerResumed[] = "ServerResumed";

// The connection to one server, or to a pair of servers that is replicated: host:port/host:port. A call is repeated as
// long as the server cannot be reached and there is time left, in a pair on the other server in turn. That is safe for
// writes too, because a server does not apply a number twice, and a backup has the numbers of its primary.
class Connection {
 public:
  Connection(std::string address, const Options& options) : address_(std::move(address)), options_(options) {
    for (const std::string& side : sides_of(address_)) {
      sides_.push_back(std::make_unique<Side>());
      sides_.back()->stub = pb::ParameterServer::NewStub(channel(side));
    }
  }

  const std::string& address() const { return address_; }

  // The message of an error with the names of the server and the table before it.
  Error error(const std::string& kind, const std::string& table, const std::string& details) const {
    return Error(kind, address_, table, named(table) + details);
  }

  pb::DescribeReply describe(const std::string& table) {
    pb::DescribeReply reply;
    call(table, [&](double left_s) {
      grpc::ClientContext context;
      prepare(context, left_s);
      return outcome(side().stub->Describe(&context, pb::DescribeRequest(), &reply), context);
    });
    return reply;
  }

  // Makes a phase of the resuming of a server that was stopped. A phase can be repeated.
  pb::ResumeReply resume(const std::string& table, const pb::ResumeRequest& request) {
    pb::ResumeReply reply;
    call(table, [&](double left_s) {
      grpc::ClientContext context;
      prepare(context, left_s);
      return outcome(side().stub->Resume(&context, request, &reply), context);
    });
    return reply;
  }

  // Reads what the header asks for.
  void pull(const pb::PullHeader& header, Answer answer) {
    call(header.table(), [&](double left_s) {
      answer.done = 0;
      return carry(
          left_s, [&](Segment& memory) { return memory.pull(header, answer, left_s); },
          [&] { return stream_pull(header, answer, left_s); });
    });
  }

  // Writes rows (n, dim) of float32, or deletes rows if there are none. Returns the number of deleted rows.
  // `header` is called before each attempt.
  uint64_t write(const std::string& table, const std::function<pb::WriteHeader()>& header, const Part& part,
                 const float* rows, int64_t dim) {
    uint64_t deleted = 0;
    const int64_t row_bytes = rows == nullptr ? 0 : dim * 4;
    call(table, [&](double left_s) {
      return carry(
          left_s, [&](Segment& memory) { return memory.write(header(), part, rows, row_bytes, left_s, deleted); },
          [&] { return stream_write(header(), part, rows, row_bytes, left_s, deleted); }, part.n * (8 + row_bytes));
    });
    return deleted;
  }

 private:
  static constexpr int64_t kPartIds = 1 << 16;
  static constexpr int64_t kPartBytes = 1 << 20;
  static constexpr int kMessageBytes = (1 << 26) + (1 << 20);

  static constexpr double kHangsS = 8;  // a server of a pair that takes longer for an attempt may hang

  struct Side {
    std::unique_ptr<pb::ParameterServer::Stub> stub;
    SharedMemory memory;
  };

  struct GivenBack {
    SharedMemory& to;
    std::unique_ptr<Segment>& memory;
    ~GivenBack() { to.give_back(std::move(memory)); }
  };

  static std::string content(const std::string& path) {
    if (path.empty()) return "";
    std::ifstream file(path, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(file), {}};
    if (!file || text.empty()) throw invalid("the file " + path + " cannot be read");
    return text;
  }

  std::shared_ptr<grpc::Channel> channel(const std::string& address) const {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMessageBytes);
    arguments.SetMaxSendMessageSize(kMessageBytes);
    arguments.SetInt("grpc.http2.max_frame_size", 1 << 22);
    arguments.SetInt("grpc.use_local_subchannel_pool", 1);
    arguments.SetInt("grpc.keepalive_time_ms", 10'000);
    arguments.SetInt("grpc.keepalive_timeout_ms", 10'000);
    arguments.SetInt("grpc.initial_reconnect_backoff_ms", 100);
    arguments.SetInt("grpc.min_reconnect_backoff_ms", 1'000);
    arguments.SetInt("grpc.max_reconnect_backoff_ms", 1'000);
    if (options_.tls_ca.empty()) {
      return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
    }
    grpc::SslCredentialsOptions files;
    files.pem_root_certs = content(options_.tls_ca);
    files.pem_private_key = content(options_.tls_key);
    files.pem_cert_chain = content(options_.tls_cert);
    return grpc::CreateCustomChannel(address, grpc::SslCredentials(files), arguments);
  }

  void prepare(grpc::ClientContext& context, double left_s) const {
    context.AddMetadata("recstore-protocol", "2");
    if (!options_.token.empty()) context.AddMetadata("authorization", "Bearer " + options_.token);
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::microseconds>(Seconds(left_s)));
  }

  static Outcome outcome(const grpc::Status& status, const grpc::ClientContext& context) {
    Outcome made{status.error_code(), status.error_message(), ""};
    const auto& metadata = context.GetServerTrailingMetadata();
    const auto found = metadata.find("recstore-error");
    if (found != metadata.end()) made.error.assign(found->second.data(), found->second.size());
    return made;
  }

  // Makes a call by shared memory if that is possible and `bytes` bytes of arrays fit, and else by gRPC.
  template <class ByMemory, class ByStream>
  Outcome carry(double left_s, const ByMemory& by_memory, const ByStream& by_stream, int64_t bytes = 0) {
    if (!options_.shared_memory) return by_stream();
    Side& now = side();
    std::unique_ptr<Segment> memory;
    Outcome made = now.memory.take(memory, [&](pb::AttachReply& offer) {
      grpc::ClientContext context;
      prepare(context, left_s);
      return outcome(now.stub->Attach(&context, pb::AttachRequest(), &offer), context);
    });
    if (made.code != grpc::StatusCode::OK) return made;
    if (memory == nullptr) return by_stream();
    const GivenBack given_back{now.memory, memory};
    return memory->fits(bytes) ? by_memory(*memory) : by_stream();
  }

  template <class Attempt>
  void call(const std::string& table, const Attempt& attempt) {
    Backoff backoff(options_.timeout_s);
    Outcome unreached;
    const bool is_pair = sides_.size() > 1;
    while (true) {
      size_t side = side_;
      const Outcome made = attempt(std::max(0.001, is_pair ? std::min(kHangsS, backoff.left_s()) : backoff.left_s()));
      if (made.code == grpc::StatusCode::OK) return;
      if (made.code == grpc::StatusCode::UNAVAILABLE) unreached = made;
      const bool resumed = made.error == kServerResumed;  // the client has to look at all servers
      const bool hangs = is_pair && made.code == grpc::StatusCode::DEADLINE_EXCEEDED;
      const bool passing =
          !resumed && (hangs || made.code == grpc::StatusCode::UNAVAILABLE || made.code == grpc::StatusCode::CANCELLED);
      if (!passing || backoff.left_s() <= 0) {
        // The last attempt has only the rest of the time, which may end while it connects.
        const bool late = made.code == grpc::StatusCode::DEADLINE_EXCEEDED && unreached.code != grpc::StatusCode::OK;
        throw error_of(table, late ? unreached : made);
      }
      if (is_pair) side_.compare_exchange_strong(side, 1 - side);  // unless another thread has changed it
      backoff.pause();
    }
  }

  Error error_of(const std::string& table, const Outcome& made) const {
    static const char* const codes[] = {
        "ok",        "cancelled",      "unknown",           "invalid argument",   "deadline exceeded",
        "not found", "already exists", "permission denied", "resource exhausted", "failed precondition",
        "aborted",   "out of range",   "unimplemented",     "internal",           "unavailable",
        "data loss", "unauthenticated"};
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g s", options_.timeout_s);
    if (!made.error.empty()) return error(made.error, table, ": " + made.details);
    if (made.code == grpc::StatusCode::UNAVAILABLE) {
      return error("ServiceError", table, std::string(" cannot be reached for ") + seconds + ": " + made.details);
    }
    if (made.code == grpc::StatusCode::DEADLINE_EXCEEDED) {
      return error("ServiceError", table, std::string(" has not answered within ") + seconds);
    }
    const auto code = static_cast<size_t>(made.code);
    const std::string name = code < std::size(codes) ? codes[code] : "code " + std::to_string(code);
    return error("ServiceError", table, ": " + made.details + " (" + name + ")");
  }

  Side& side() { return *sides_[side_]; }

  std::string named(const std::string& table) const {
    return (table.empty() ? "" : "table '" + table + "' on ") + "server " + address_;
  }

  // The next part is sent when the answer to the one before has arrived. Neither side then waits for the other to read.
  Outcome stream_pull(const pb::PullHeader& header, Answer& answer, double left_s) {
    grpc::ClientContext context;
    prepare(context, left_s);
    auto stream = side().stub->Pull(&context);
    const Part& part = answer.part;
    pb::PullRequest request;
    *request.mutable_header() = header;
    pb::PullReply reply;
    int64_t sent = 0;
    do {
      const int64_t n = std::min(part.n - sent, kPartIds);
      if (n > 0) request.set_ids(part.ids + sent, static_cast<size_t>(n) * 8);
      sent += n;
      const bool last = sent == part.n;
      if (!stream->Write(request, last ? grpc::WriteOptions().set_last_message() : grpc::WriteOptions())) break;
      request.clear_header();
      while ((last || answer.done < sent) && stream->Read(&reply)) {
        const std::string& piece = header.want() == pb::PullHeader::ROWS ? reply.rows() : reply.found();
        if (!answer.add(piece.data(), piece.size())) {
          context.TryCancel();
          stream->Finish();
          return unfit();
        }
      }
    } while (answer.done == sent && sent < part.n);
    const Outcome made = outcome(stream->Finish(), context);
    return made.code == grpc::StatusCode::OK && answer.done < part.n ? unfit() : made;
  }

  Outcome stream_write(const pb::WriteHeader& header, const Part& part, const float* rows, int64_t row_bytes,
                       double left_s, uint64_t& deleted) {
    grpc::ClientContext context;
    prepare(context, left_s);
    pb::WriteReply reply;
    auto stream = side().stub->Write(&context, &reply);
    const int64_t part_rows = std::clamp<int64_t>(kPartBytes / std::max<int64_t>(1, row_bytes), 1, kPartIds);
    pb::WriteRequest request;
    *request.mutable_header() = header;
    int64_t first = 0;
    do {
      const int64_t n = std::min(part.n - first, part_rows);
      if (n > 0) request.set_ids(part.ids + first, static_cast<size_t>(n) * 8);
      std::string& content = *request.mutable_rows();
      content.resize(static_cast<size_t>(n * row_bytes));
      copy_rows(part, first, n, rows, row_bytes, content.data());
      first += n;
      if (!stream->Write(request)) break;
      request.clear_header();
    } while (first < part.n);
    stream->WritesDone();
    const Outcome made = outcome(stream->Finish(), context);
    deleted = reply.deleted();
    return made;
  }

  std::string address_;
  Options options_;
  std::vector<std::unique_ptr<Side>> sides_;
  std::atomic<size_t> side_{0};  // the one that was the primary last
};

}  // namespace recstore::detail
