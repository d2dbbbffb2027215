#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace recstore {

// The error of every call of a client. The message names the server and the table.
class Error : public std::runtime_error {
 public:
  // kind: The name of the error that the Python client raises for the same failure: "ServiceError" (a server cannot be
  // reached, refuses access or has failed), "ServerRestartedError" (servers have lost writes of this client),
  // "ServerSetError" (the servers are not one set in one epoch), "NoInitialRow" (an id has no row, and only the
  // init_func of a Python client can create it), "ValueError" (an argument is invalid) or another error of the server.
  // server: The address of the server. Empty if the error is not of one server.
  // table: The name of the table. Empty if the call was for no table.
  Error(std::string kind, std::string server, std::string table, const std::string& message)
      : std::runtime_error(message), kind_(std::move(kind)), server_(std::move(server)), table_(std::move(table)) {}

  const std::string& kind() const { return kind_; }
  const std::string& server() const { return server_; }
  const std::string& table() const { return table_; }

 private:
  std::string kind_, server_, table_;
};

}  // namespace recstore
