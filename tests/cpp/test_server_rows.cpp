// The reader of rows of a served model, against two servers of one set in this process: many threads, restarts under
// their calls, and a server that sends anything.

#include "server_rows.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/slots.h"
#include "message_fields.h"
#include "row_server.h"
#include "testing.h"

using namespace recstore_service;

namespace {

constexpr int64_t kDim = 3, kSlots = 10;
constexpr size_t kSegment = size_t{1} << 18;

// The row of an id is its id, the number of the server, and zero.
int read(const recstore::RowsOfTable* parts, int64_t count, recstore::RowError*) {
  for (int64_t p = 0; p < count; ++p) {
    auto* row = static_cast<float*>(parts[p].values);
    for (int64_t i = 0; i < parts[p].n; ++i, row += kDim) {
      row[0] = static_cast<float>(parts[p].ids[i]);
      row[1] = static_cast<float>(parts[p].table);
      row[2] = 0;
    }
  }
  return recstore::kRowsDone;
}
int write(const recstore::RowsOfTable*, recstore::RowError*) { return recstore::kRowsDone; }
int update(const recstore::RowsOfTable*, int64_t, recstore::RowError*) { return recstore::kRowsDone; }
int remove(int64_t, const int64_t*, int64_t, int64_t*, recstore::RowError*) { return recstore::kRowsDone; }
int contains(int64_t, const int64_t* ids, int64_t n, bool* out, recstore::RowError*) {
  for (int64_t i = 0; i < n; ++i) out[i] = ids[i] % 2 == 0;
  return recstore::kRowsDone;
}
constexpr recstore::RowApi kApi{recstore::kRowApiVersion, read, update, contains, write, remove};

// A DescribeReply.
std::string state_of(int member, int members, const std::string& run) {
  std::string out, slots, table;
  put_text(out, 1, "set");
  put_number(out, 2, static_cast<uint64_t>(member));
  put_number(out, 3, static_cast<uint64_t>(members));
  put_number(out, 4, 1);
  put_number(out, 5, 1);
  for (int64_t slot = 0; slot < kSlots; ++slot) slots += static_cast<char>(slot % members);
  put_text(out, 6, slots);
  put_text(table, 1, "t");
  put_text(table, 2, "{\"dim\": 3, \"dtype\": \"float32\", \"optimizer\": {}}");
  put_text(out, 10, table);
  put_text(out, 11, "token");
  for (int other = 0; other < members; ++other) put_text(out, 12, other == member ? run : "other");
  return out;
}

// A server of a set of two, with the table "t", and a thread in place of Python.
struct Served {
  Served(int number, const std::string& run, int at) : member(number), server(calls, counts, memory, 2, 64, 1 << 24) {
    state = state_of(member, 2, run);
    gate.set_run("set/1/token/" + run);
    calls.add({"t", member, member, kDim, 4, 0.1});
    port = server.listen("127.0.0.1", at);
    server.listen_memory(kSegment, 1 << 16);
    python = std::thread([this] { answer(); });
  }
  ~Served() {
    server.stop(5);
    python.join();
  }
  void answer() {
    PythonCall call;
    while (server.next(call)) {
      std::string said = state;
      if (call.message[0] == (8 << 3 | 2)) {
        const auto [name, secret] = server.memory_offer();
        said.clear();
        put_text(said, 1, name);
        put_text(said, 2, secret);
      } else if (call.message[0] != (7 << 3 | 2)) {  // a call of another run
        server.reply(call.connection, {{kUnavailable, "the server is in another run", "ServerResumed"}}, nullptr,
                     nullptr);
        continue;
      }
      RowReply reply;
      reply.found = said.size();
      server.reply(call.connection, reply, said.data(), nullptr);
    }
  }

  const int member;
  std::string state;
  Applied applied;
  RunGate gate;
  Replica replica;
  Counts counts;
  RowCalls calls{kApi, applied, gate, replica, counts, 1 << 24, 1 << 17};
  RequestMemory memory{1 << 26};
  RowServer server;
  std::thread python;
  int port = 0;
};

const recstore::ServerTable kTable{"t", kDim, "float32"};

void check_lookup(recstore::RowServers& servers, std::mt19937_64& random, int64_t n) {
  std::vector<int64_t> ids(static_cast<size_t>(n));
  for (int64_t& id : ids) id = static_cast<int64_t>(random() % (1 << 20)) - (1 << 19);
  std::vector<float> rows(static_cast<size_t>(n * kDim));
  servers.lookup(kTable, ids.data(), n, rows.data());
  const auto found = std::make_unique<bool[]>(static_cast<size_t>(n));
  servers.contains(kTable, ids.data(), n, found.get());
  for (int64_t i = 0; i < n; ++i) {
    const float* row = &rows[static_cast<size_t>(i * kDim)];
    const int64_t id = ids[static_cast<size_t>(i)];
    CHECK(row[0] == static_cast<float>(id) && row[1] == static_cast<float>(recstore::slot_of(id, kSlots) % 2) &&
          row[2] == 0);
    CHECK(found[static_cast<size_t>(i)] == (id % 2 == 0));
  }
}

std::string addresses(const std::vector<int>& ports) {
  std::string text;
  for (const int port : ports) text += (text.empty() ? "127.0.0.1:" : ",127.0.0.1:") + std::to_string(port);
  return text;
}

// More threads than connections by shared memory call, and calls are larger than a segment. Servers are started again
// on their ports meanwhile, in another run.
void threads_read_while_servers_are_started_again(const char* by_memory) {
  setenv("RECSTORE_SHARED_MEMORY", by_memory, 1);
  auto one = std::make_unique<Served>(0, "a", 0), other = std::make_unique<Served>(1, "a", 0);
  const std::array<int, 2> ports{one->port, other->port};
  // The order of the addresses is not that of the servers in their set.
  const auto servers = recstore::RowServers::of(addresses({ports[1], ports[0]}), false);
  CHECK(servers == recstore::RowServers::of(addresses({ports[1], ports[0]}), false));
  std::atomic<bool> ends{false};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 10; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int64_t n = 1; !ends || n < 20; ++n) check_lookup(*servers, random, n % 8 == 7 ? 60'000 : n % 50);
    });
  }
  for (const char* run : {"b", "c", "d"}) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    one.reset();
    one = std::make_unique<Served>(0, run, ports[0]);
    other.reset();
    other = std::make_unique<Served>(1, run, ports[1]);
  }
  ends = true;
  for (std::thread& thread : threads) thread.join();
}

// Takes connections, and sends anything after a reply to the token.
void a_server_may_send_anything() {
  setenv("RECSTORE_SHARED_MEMORY", "0", 1);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && listen(listener, 16) == 0);
  socklen_t size = sizeof address;
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  std::atomic<int> taken{0};
  std::thread server([&] {
    std::mt19937_64 random(0);
    RowReply beginning;
    beginning.server = "anything";
    const std::string welcome = beginning.serialized(), state = state_of(0, 1, "a");
    const auto framed = [](const std::string& message) {
      return std::string(1, static_cast<char>(message.size())) + std::string(3, '\0') + message;
    };
    for (int fd; (fd = accept(listener, nullptr, nullptr)) >= 0; close(fd)) {
      RowReply reply;
      reply.found = state.size();
      std::string message = reply.serialized(), array = state;
      std::string& damaged = random() % 4 == 0 ? message : array;
      for (uint64_t i = random() % 4 + 1; i > 0; --i) damaged[random() % damaged.size()] = static_cast<char>(random());
      const std::string sent = framed(welcome) + framed(message) + array;
      std::array<char, 256> got;
      if (::send(fd, sent.data(), sent.size(), MSG_NOSIGNAL) < 0) continue;
      for (int read = 0; read < 3 && recv(fd, got.data(), got.size(), 0) > 0; ++read) ++taken;
    }
  });
  const int64_t id = 1;
  std::array<float, kDim> row;
  const std::string place = addresses({ntohs(address.sin_port)});
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
       std::chrono::steady_clock::now() < end;) {
    CHECK_THROWS(recstore::RowServers::of(place, false)->lookup(kTable, &id, 1, row.data()), std::runtime_error);
  }
  CHECK(taken > 0);  // how often it was asked: a damaged size may make the client wait for seconds
  shutdown(listener, SHUT_RDWR);
  server.join();
  close(listener);
}

void addresses_are_checked() {
  for (const char* wrong : {"", "host", "host:0", "host:65536", ":1", "a:1,", "a:1/b:2/c:3"}) {
    CHECK_THROWS(recstore::RowServers::of(wrong, false), std::runtime_error);
  }
}

}  // namespace

int main() {
  addresses_are_checked();
  threads_read_while_servers_are_started_again("1");
  threads_read_while_servers_are_started_again("0");
  a_server_may_send_anything();
}
