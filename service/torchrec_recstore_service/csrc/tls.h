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
  virtual Io connect() = 0;
  virtual Io read(char* to, size_t size, size_t& got) = 0;
  virtual Io write(const char* from, size_t size, size_t& sent) = 0;
  virtual void shutdown() = 0;
};

// Certificates and a key, and how the other side is checked. OpenSSL is found when the first object is made, because a
// wheel cannot carry it: each machine has its own, with its own security updates.
class TlsContext {
 public:
  virtual ~TlsContext() = default;
  // host: empty for a server; for a client, whose certificate the other side must have. Returns null without memory.
  virtual std::unique_ptr<TlsStream> stream(int fd, const std::string& host = "") = 0;
};

// Returns a context for PEM files that Python has checked. client: whether it is for the side that connects. cert, key:
// its own, or empty for a client without. ca: empty, or the authorities of the other side's certificates. library: the
// path of OpenSSL's libssl, or empty to look for it. Throws std::runtime_error.
std::shared_ptr<TlsContext> tls_context(const std::string& library, bool client, const std::string& cert,
                                        const std::string& key, const std::string& ca);

}  // namespace recstore_service
