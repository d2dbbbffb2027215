#pragma once

#include <string>

namespace recstore_service {

// Connects to a host, and returns the socket, which does not block. Throws std::runtime_error with the reason.
int tcp_socket(const std::string& host, int port, int timeout_ms);

}  // namespace recstore_service
