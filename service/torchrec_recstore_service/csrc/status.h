#pragma once

#include <exception>
#include <string>
#include <utility>

namespace recstore_service {

// The status codes of gRPC that the calls on rows have.
enum Code : int {
  kOk = 0,
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kInternal = 13,
  kUnavailable = 14,
  kUnauthenticated = 16,
};

// What a client is told of an error: the code, the message, and the name of the Python exception that it raises.
struct Status {
  int code = kOk;
  std::string details;
  std::string error;
};

// A call is refused or has failed.
class CallFailed : public std::exception {
 public:
  explicit CallFailed(Status status) : status_(std::move(status)) {}
  const Status& status() const { return status_; }
  const char* what() const noexcept override { return status_.details.c_str(); }

 private:
  Status status_;
};

// What a server of a pair answers that is not the primary. See NOT_PRIMARY in protocol.py.
inline Status not_primary() { return {kUnavailable, "the server is not the primary of its pair", "NotPrimaryError"}; }

[[noreturn]] inline void invalid(std::string details) {
  throw CallFailed({kInvalidArgument, std::move(details), "ValueError"});
}
[[noreturn]] inline void unavailable(std::string details) { throw CallFailed({kUnavailable, std::move(details), ""}); }

}  // namespace recstore_service
