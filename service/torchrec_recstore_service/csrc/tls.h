#pragma once

#include <memory>
#include <string>

namespace recstore_service {

// What a step of a connection has found: some bytes, that the socket has no more for now, or the end.
enum class Io { kDone, kWantRead, kWantWrite, kEnd };

class TlsStream {
 public:
  virtual ~TlsStream() = default;
  virtual Io accept() = 0;
  virtual Io read(char* to, size_t size, size_t& got) = 0;
  virtual Io write(const char* from, size_t size, size_t& sent) = 0;
  virtual void shutdown() = 0;
};

// A server's certificate and key, and how clients are checked. OpenSSL is found when the first object is made, because a
// wheel cannot carry it: each machine has its own, with its own security updates.
class TlsContext {
 public:
  virtual ~TlsContext() = default;
  virtual std::unique_ptr<TlsStream> stream(int fd) = 0;
};

// Returns a context for PEM files that Python has checked. client_ca: empty, or the authorities of clients' certificates.
// library: the path of OpenSSL's libssl, or empty to look for it. Throws std::runtime_error.
std::shared_ptr<TlsContext> tls_context(const std::string& library, const std::string& cert, const std::string& key, const std::string& client_ca);

}  // namespace recstore_service
