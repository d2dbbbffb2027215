// Reads and trains rows of a table on parameter servers, without Python.
//
//   main HOST:PORT,... TABLE ID... [--token-file FILE] [--tls-ca FILE]
//
// A Python client has made the table: RecStoreClient(["HOST:PORT", ...]).init_data("TABLE", (1000, 8), torch.float32).
// The program prints the rows of the ids, updates them with gradients of 1, and prints them again. Then it writes zeros
// to the row of the first id. To build it, see build.sh. To use it in another project, copy this folder.
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "recstore_client.h"

namespace {

void print(recstore::Client& client, const std::string& table, const std::vector<int64_t>& ids) {
  const std::vector<float> rows = client.pull(table, ids);
  const size_t dim = ids.empty() ? 0 : rows.size() / ids.size();
  for (size_t i = 0; i < ids.size(); ++i) {
    std::cout << ids[i] << ":";
    for (size_t column = 0; column < dim; ++column) std::cout << " " << rows[i * dim + column];
    std::cout << "\n";
  }
}

void run(const std::vector<std::string>& arguments) {
  recstore::Options options;
  std::vector<std::string> words;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool has_value = i + 1 < arguments.size();
    if (arguments[i] == "--token-file" && has_value) {
      std::ifstream(arguments[++i]) >> options.token;
    } else if (arguments[i] == "--tls-ca" && has_value) {
      options.tls_ca = arguments[++i];
    } else {
      words.push_back(arguments[i]);
    }
  }
  if (words.size() < 3) {
    throw std::invalid_argument("usage: main HOST:PORT,... TABLE ID... [--token-file FILE] [--tls-ca FILE]");
  }
  std::vector<std::string> servers;
  std::istringstream list(words[0]);
  for (std::string address; std::getline(list, address, ',');) servers.push_back(address);
  const std::string& table = words[1];
  std::vector<int64_t> ids;
  for (size_t i = 2; i < words.size(); ++i) ids.push_back(std::stoll(words[i]));

  recstore::Client client(servers, options);
  const recstore::TableInfo info = client.describe(table);
  const auto dim = static_cast<size_t>(info.dim);
  std::cout << "table " << table << ": " << dim << " columns, " << info.dtype << "\n";
  print(client, table, ids);
  client.update(table, ids, std::vector<float>(ids.size() * dim, 1.0F));  // the servers apply the table's optimizer
  std::cout << "after an update:\n";
  print(client, table, ids);
  client.push(table, {ids[0]}, std::vector<float>(dim, 0.0F));
  std::cout << "after a push:\n";
  print(client, table, {ids[0]});
}

}  // namespace

int main(int count, char** arguments) try {
  run({arguments + 1, arguments + count});
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
