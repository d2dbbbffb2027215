// Makes the calls that a test asks for, with one client: each line of the standard input is CALL TABLE IDS [VALUES],
// where IDS and VALUES are files of int64 and float32. Answers a line: "ok", or the kind, server, table and message of
// an error. A call that reads writes its result to the file VALUES.
//
// The example is a part of this program, since a compiler takes half a minute for gRPC: "driver example ARGUMENTS".
#define main example_main
#include "main.cpp"
#undef main

#include <algorithm>
#include <iterator>
#include <thread>

namespace {

template <class Value>
std::vector<Value> contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<Value> values(bytes.size() / sizeof(Value));
  std::copy(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(values.size() * sizeof(Value)),
            reinterpret_cast<char*>(values.data()));
  return values;
}

template <class Value>
void write(const std::string& path, const std::vector<Value>& values) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(Value)));
}

void call(recstore::Client& client, const std::string& line) {
  std::istringstream words(line);
  std::string kind, table, ids_path, path;
  words >> kind >> table >> ids_path >> path;
  const std::vector<int64_t> ids = contents<int64_t>(ids_path);
  if (kind == "describe") {
    const recstore::TableInfo info = client.describe(table);
    write(path, std::vector<int64_t>{info.dim});
  } else if (kind == "pull") {
    write(path, client.pull(table, ids));
  } else if (kind == "exists") {
    write(path, client.exists(table, ids));
  } else if (kind == "push") {
    client.push(table, ids, contents<float>(path));
  } else if (kind == "update") {
    client.update(table, ids, contents<float>(path));
  } else if (kind == "erase") {
    write(path, std::vector<int64_t>{client.erase(table, ids)});
  } else if (kind == "together") {  // updates by several threads: the number of each update is the client's own
    const std::vector<float> gradients = contents<float>(path);
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&] {
        for (int step = 0; step < 10; ++step) client.update(table, ids, gradients);
      });
    }
    for (std::thread& thread : threads) thread.join();
  } else {
    throw std::invalid_argument("unknown call " + kind);
  }
}

}  // namespace

// driver HOST:PORT,... TIMEOUT_S SHARED_MEMORY [TOKEN [TLS_CA]]
int main(int count, char** arguments) {
  if (std::string(arguments[1]) == "example") return example_main(count - 1, arguments + 1);
  recstore::Options options;
  options.timeout_s = std::stod(arguments[2]);
  options.shared_memory = std::string(arguments[3]) == "1";
  if (count > 4) options.token = arguments[4];
  if (count > 5) options.tls_ca = arguments[5];
  std::vector<std::string> servers;
  std::istringstream list(arguments[1]);
  for (std::string address; std::getline(list, address, ',');) servers.push_back(address);
  try {
    recstore::Client client(servers, options);
    for (std::string line; std::getline(std::cin, line);) {
      try {
        call(client, line);
        std::cout << "ok" << std::endl;
      } catch (const recstore::Error& error) {
        std::cout << error.kind() << "|" << error.server() << "|" << error.table() << "|" << error.what() << std::endl;
      }
    }
  } catch (const recstore::Error& error) {
    std::cout << error.kind() << "|" << error.server() << "|" << error.table() << "|" << error.what() << std::endl;
  }
}
