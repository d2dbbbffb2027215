#pragma once

#include <arpa/inet.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "error.h"

namespace recstore {

// The credentials, certificates and timeout with which servers are called.
struct Options {
  std::string token;   // the token that the servers require. Empty: none
  std::string tls_ca;  // the path of a PEM file with the certificates that sign the servers'. Empty: no encryption
  std::string tls_cert, tls_key;  // the paths of PEM files with the client's certificate, if the servers require one
  double timeout_s = 30;          // the longest time in seconds of a call, with all of its repetitions
  bool shared_memory = true;      // whether rows travel by shared memory to servers of the same host and user
};

namespace detail {

inline Error invalid(const std::string& message) { return Error("ValueError", "", "", message); }

// Whether only this machine can reach the host.
inline bool is_loopback(std::string host) {
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  in_addr v4;
  in6_addr v6;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return std::memcmp(&v6, &in6addr_loopback, sizeof v6) == 0;
  return host == "localhost";
}

inline std::string host_of(const std::string& address) {
  const size_t colon = address.rfind(':');
  const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
  if (colon == 0 || !digits || std::stoi(port) < 1 || std::stoi(port) > 65535) {
    throw invalid("servers must be HOST:PORT, got '" + address + "'");
  }
  return address.substr(0, colon);
}

// The addresses of a server, HOST:PORT, or of a pair of servers, HOST:PORT/HOST:PORT.
inline std::vector<std::string> sides_of(const std::string& address) {
  std::vector<std::string> sides;
  for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = address.find('/', begin);
    sides.push_back(address.substr(begin, end - begin));
  }
  if (sides.size() > 2) throw invalid("a pair has two addresses, got '" + address + "'");
  return sides;
}

inline void check(const std::vector<std::string>& servers, const Options& options) {
  if (servers.empty()) throw invalid("servers must name at least one HOST:PORT");
  for (const std::string& address : servers) {
    for (const std::string& side : sides_of(address)) {
      if (!is_loopback(host_of(side)) && !options.token.empty() && options.tls_ca.empty()) {
        throw invalid("token would be sent to " + side + " unencrypted: set tls_ca as well");
      }
    }
    if (std::count(servers.begin(), servers.end(), address) > 1) {
      throw invalid("servers must differ, got " + address + " twice");
    }
  }
  for (const char c : options.token) {
    if (c < '!' || c > '~') {
      throw invalid("token must be of printable ASCII characters without blanks");
    }
  }
  if (!(options.timeout_s > 0) || !std::isfinite(options.timeout_s)) {
    throw invalid("timeout_s must be a positive number of seconds");
  }
  if (options.tls_cert.empty() != options.tls_key.empty()) throw invalid("tls_cert and tls_key must be set together");
  if (!options.tls_cert.empty() && options.tls_ca.empty()) throw invalid("tls_cert needs tls_ca");
}

}  // namespace detail
}  // namespace recstore
