// The server for rows by TCP and by shared memory, on a table of functions that takes the place of the core: many
// clients at the same time, which are cut anywhere and repeat their writes; waiting for memory; a stop in the middle of
// calls.

#include "row_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "testing.h"

using namespace recstore_service;

namespace {

constexpr int64_t kDim = 3, kIds = 1000;
std::array<std::atomic<int64_t>, kIds> steps;

// The row of an id is its id, the value of the call, and zero.
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
int update(const recstore::RowsOfTable* parts, int64_t count, recstore::RowError* error) {
  for (int64_t p = 0; p < count; ++p) {
    if (parts[p].n > 0 && parts[p].ids[0] < 0) {
      std::strcpy(error->text, "recstore invalid argument: no such id");
      return recstore::kRowsInvalid;
    }
    for (int64_t i = 0; i < parts[p].n; ++i) ++steps[static_cast<size_t>(parts[p].ids[i])];
  }
  return recstore::kRowsDone;
}
int contains(int64_t, const int64_t* ids, int64_t n, bool* out, recstore::RowError*) {
  for (int64_t i = 0; i < n; ++i) out[i] = ids[i] % 2 == 0;
  return recstore::kRowsDone;
}
int insert(const recstore::RowsOfTable*, recstore::RowError*) { return recstore::kRowsDone; }
int remove(int64_t, const int64_t*, int64_t n, int64_t* removed, recstore::RowError*) {
  *removed = n;
  return recstore::kRowsDone;
}
constexpr recstore::RowApi kApi{recstore::kRowApiVersion, read, update, contains, insert, remove};

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}
void put(std::string& out, int field, uint64_t value) {
  put_varint(out, static_cast<uint64_t>(field) << 3);
  put_varint(out, value);
}
void put(std::string& out, int field, const std::string& text) {
  put_varint(out, static_cast<uint64_t>(field) << 3 | 2);
  put_varint(out, text.size());
  out += text;
}
std::string framed(const std::string& call, int field, uint64_t ids, uint64_t rows) {
  std::string message;
  put(message, field, call);
  put(message, 3, ids);
  put(message, 4, rows);
  const auto size = static_cast<uint32_t>(message.size());
  return std::string(reinterpret_cast<const char*>(&size), 4) + message;
}
std::string bytes_of(const std::vector<int64_t>& ids) {
  return {reinterpret_cast<const char*>(ids.data()), ids.size() * 8};
}

std::string pull_of(const std::string& table, const std::vector<int64_t>& ids) {
  std::string call;
  put(call, 1, table);
  put(call, 2, "run");
  return framed(call, 1, ids.size() * 8, 0) + bytes_of(ids);
}
std::string update_of(const std::string& client, uint64_t number, const std::vector<int64_t>& ids,
                      const std::string& table = "t") {
  std::string call;
  put(call, 1, table);
  put(call, 2, "run");
  put(call, 3, client);
  put(call, 4, number);
  put(call, 5, number);
  put(call, 6, 2);
  put(call, 7, ids.size());
  const uint64_t rows = ids.size() * kDim * 4;
  return framed(call, 2, ids.size() * 8, rows) + bytes_of(ids) + std::string(rows, '\0');
}

struct Reply {
  bool arrived = false;
  uint64_t code = 0, rows = 0, last = 0;
  std::string content, server;
};

void parse(const std::string& message, Reply& reply) {
  for (size_t at = 0; at < message.size();) {
    const auto varint = [&] {
      uint64_t value = 0;
      for (int shift = 0;; shift += 7) {
        const auto byte = static_cast<uint8_t>(message.at(at++));
        value |= static_cast<uint64_t>(byte & 0x7F) << shift;
        if (byte < 0x80) return value;
      }
    };
    const uint64_t tag = varint(), value = varint();
    if (tag >> 3 == 1) reply.code = value;
    if (tag >> 3 == 5) reply.rows = value;
    if (tag >> 3 == 7) reply.last = value;
    if (tag >> 3 == 8) reply.server = message.substr(at, value);
    if ((tag & 7) == 2) at += value;
  }
}

class Client {
 public:
  // version, token and name: what the client begins with, see kVersion.
  explicit Client(int port, int buffer = 0, uint32_t version = kVersion, const std::string& token = "",
                  const std::string& name = "")
      : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (buffer > 0) setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return;
    const uint32_t numbers[] = {version, static_cast<uint32_t>(token.size()), static_cast<uint32_t>(name.size())};
    const size_t bytes = version == kUnnamedVersion ? 8 : sizeof numbers;
    send("RECSTORE" + std::string(reinterpret_cast<const char*>(numbers), bytes) + token + name);
    const Reply reply = receive();
    greeted_ = reply.arrived && reply.code == 0;
    server_ = reply.server;
  }
  ~Client() { ::close(fd_); }
  bool greeted() const { return greeted_; }
  const std::string& server() const { return server_; }
  bool send(const std::string& bytes) {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t n = ::send(fd_, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
    return true;
  }
  // Ends with RST: nothing more arrives at either side.
  void reset() {
    const linger now{1, 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }
  void shut(int how) { shutdown(fd_, how); }
  bool is_silent(int milliseconds) {
    pollfd readable{fd_, POLLIN, 0};
    return poll(&readable, 1, milliseconds) == 0;
  }

  Reply receive() {
    Reply reply;
    uint32_t size = 0;
    if (!fill(reinterpret_cast<char*>(&size), 4)) return reply;
    std::string message(size, '\0');
    if (!fill(message.data(), size)) return reply;
    parse(message, reply);
    reply.content.resize(reply.rows);
    reply.arrived = fill(reply.content.data(), reply.rows);
    return reply;
  }

 private:
  bool fill(char* to, size_t size) {
    for (size_t at = 0; at < size;) {
      const ssize_t n = recv(fd_, to + at, size - at, 0);
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
    return true;
  }
  int fd_;
  bool greeted_ = false;
  std::string server_;
};

constexpr size_t kSegment = 1 << 20;

// A client by shared memory. The requests are those of a client by TCP.
class MemoryClient {
 public:
  explicit MemoryClient(RowServer& server) : fd_(socket(AF_UNIX, SOCK_SEQPACKET, 0)) {
    const auto [name, secret] = server.memory_offer();
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), length) != 0) return;
    ::send(fd_, secret.data(), secret.size(), MSG_NOSIGNAL);
    char text[32];
    iovec content{text, sizeof text};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(fd_, &message, 0) <= 0) return;
    int file;
    std::memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof file);
    memory_ = static_cast<char*>(mmap(nullptr, kSegment, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    ::close(file);
  }
  ~MemoryClient() {
    if (memory_ != nullptr) munmap(memory_, kSegment);
    ::close(fd_);
  }
  bool greeted() const { return memory_ != nullptr; }
  // Sends a request. ids: its ids, which lie at the beginning of the segment, and rows of zeros after them.
  bool send(const std::string& request, const std::vector<int64_t>& ids) {
    uint32_t size;
    std::memcpy(&size, request.data(), 4);
    std::memcpy(memory_, ids.data(), ids.size() * 8);
    return ::send(fd_, request.data() + 4, size, MSG_NOSIGNAL) > 0;
  }
  Reply receive() {
    Reply reply;
    std::string message(1 << 16, '\0');
    const ssize_t n = recv(fd_, message.data(), message.size(), 0);
    if (n <= 0) return reply;
    message.resize(static_cast<size_t>(n));
    parse(message, reply);
    reply.content.assign(memory_ + place_, reply.rows);
    place_ = reply.last ? 0 : place_ + reply.rows;
    reply.arrived = true;
    return reply;
  }

 private:
  int fd_;
  char* memory_ = nullptr;
  size_t place_ = 0;
};

// A server with one table "t", and threads that answer the calls on other tables in place of Python.
struct Served {
  explicit Served(uint64_t memory_bytes = 1 << 26, int64_t connections = 64)
      : memory(memory_bytes), server(calls, counts, memory, 2, connections, 1 << 24) {
    gate.set_run("run");
    calls.add({"t", 7, 7, kDim, 4, 0.1});
    port = server.listen("127.0.0.1", 0);
    server.listen_memory(kSegment, 1 << 16);
    for (int i = 0; i < 2; ++i) python.emplace_back([this] { answer(); });
  }
  ~Served() {
    server.stop(5);
    for (std::thread& thread : python) thread.join();
  }
  void answer() {
    PythonCall call;
    while (server.next(call)) {
      ++taken;
      while (hold) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::vector<char> rows(call.arrays[0], call.arrays[0] + call.sizes[0]);  // the ids come back, in two parts
      RowReply reply;
      reply.rows = rows.size();
      reply.last = false;
      if (server.reply(call.connection, reply, nullptr, rows.data())) {
        reply.last = true;
        server.reply(call.connection, reply, nullptr, rows.data());
      }
    }
  }
  Applied applied;
  RunGate gate;
  Counts counts;
  Replica replica;
  RowCalls calls{kApi, applied, gate, replica, counts, 1 << 24, 1 << 17};
  RequestMemory memory;
  RowServer server;
  std::vector<std::thread> python;
  std::atomic<bool> hold{false};  // the threads wait before they answer
  std::atomic<int> taken{0};
  int port = 0;
};

void wait_until(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<int64_t> ids_to(int64_t n) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(i % kIds);
  return ids;
}

void check_pull(Client& client, const std::vector<int64_t>& ids) {
  std::string content;
  Reply reply;
  while (reply.last == 0) {
    reply = client.receive();
    CHECK(reply.arrived && reply.code == 0);
    content += reply.content;
  }
  CHECK(content.size() == ids.size() * kDim * 4);
  const auto* row = reinterpret_cast<const float*>(content.data());
  for (const int64_t id : ids) {
    CHECK(row[0] == static_cast<float>(id) && row[1] == 7 && row[2] == 0);
    row += kDim;
  }
}

void writes_are_carried_out_once_wherever_they_are_cut() {
  for (auto& each : steps) each = 0;
  constexpr int kThreads = 6, kWrites = kIsSlow ? 15 : 60;
  {
    Served served;
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937_64 random(static_cast<uint64_t>(t));
        const std::string name = "client" + std::to_string(t);
        auto client = std::make_unique<Client>(served.port);
        for (uint64_t number = 0; number < kWrites; ++number) {
          const std::string request = update_of(name, number, ids_to(kIds));
          for (bool done = false; !done;) {
            const bool whole = random() % 3 == 0;
            bool sent = client->send(whole ? request : request.substr(0, random() % (request.size() + 1)));
            if (whole && sent && random() % 4 != 0) {
              const Reply reply = client->receive();
              done = reply.arrived && reply.code == 0;
              if (done) break;
            }
            if (random() % 2 == 0) client->reset();
            client = std::make_unique<Client>(served.port);
          }
          if (random() % 4 == 0) {
            const std::vector<int64_t> ids = ids_to(static_cast<int64_t>(random() % 400000));
            client->send(pull_of("t", ids));
            if (random() % 2 == 0) {
              client = std::make_unique<Client>(served.port);
            } else {
              check_pull(*client, ids);
            }
          }
          if (random() % 4 == 0) {
            const std::vector<int64_t> ids = ids_to(static_cast<int64_t>(random() % 100000));
            client->send(pull_of("of python", ids));
            if (random() % 2 == 0) {
              client = std::make_unique<Client>(served.port);
            } else {
              for (int part = 0; part < 2; ++part) CHECK(client->receive().content == bytes_of(ids));
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    wait_until([&] { return served.server.connections() == 0; });
    CHECK(served.memory.held() == 0 && served.server.running(false) == 0);
  }
  for (const auto& each : steps) CHECK(each == kThreads * kWrites);
}

void requests_may_come_one_after_the_other_and_half_closed() {
  Served served;
  Client client(served.port);
  std::string requests;
  for (int i = 0; i < 20; ++i) requests += pull_of(i % 3 == 0 ? "of python" : "t", ids_to(50 * i));
  CHECK(client.send(requests));
  client.shut(SHUT_WR);
  for (int i = 0; i < 20; ++i) {
    if (i % 3 != 0) {
      check_pull(client, ids_to(50 * i));
      continue;
    }
    for (int part = 0; part < 2; ++part) CHECK(client.receive().content == bytes_of(ids_to(50 * i)));
  }
  CHECK(!client.receive().arrived);
}

void sizes_that_are_wrong_are_refused() {
  Served served;
  const auto refused = [&](const std::string& bytes) {
    Client client(served.port);
    client.send(bytes);
    const Reply reply = client.receive();
    return reply.arrived && reply.code != 0;
  };
  std::string call;
  put(call, 1, std::string("t"));
  put(call, 2, std::string("run"));
  const uint64_t largest = ~uint64_t{0};
  CHECK(refused(framed(call, 1, largest, 1)));
  CHECK(refused(framed(call, 1, largest, largest)));
  CHECK(refused(framed(call, 2, uint64_t{1} << 63, uint64_t{1} << 63)));
  CHECK(refused(std::string("\xff\xff\xff\xff", 4)));
  CHECK(refused(std::string("\x02\0\0\0\xff\xff", 6)));
  CHECK(refused(update_of("a", 0, {-1})));
  wait_until([&] { return served.memory.held() == 0; });  // the last request gives its memory back after its reply
}

void connections_for_another_server_are_refused() {
  Served served, other;
  const std::string& name = served.server.name();
  CHECK(name.size() == 32 && name != other.server.name());
  for (const std::string& given : {std::string(), name}) {
    const Client client(served.port, 0, kVersion, "", given);
    CHECK(client.greeted() && client.server() == name);
  }
  CHECK(!Client(other.port, 0, kVersion, "", name).greeted());
  for (const std::string& wrong :
       {name.substr(1), name + "0", std::string(64, '0'), std::string(65, '0'), std::string("\xff")}) {
    CHECK(!Client(served.port, 0, kVersion, "", wrong).greeted());
  }
  CHECK(!Client(served.port, 0, kUnnamedVersion).greeted());
  // A backup knows its primary by a secret, which a primary of an earlier release sends without a name.
  served.server.set_backup(true, "secret");
  CHECK(!Client(served.port, 0, kVersion, "", name).greeted());
  CHECK(!Client(served.port, 0, kUnnamedVersion, "wrong").greeted());
  CHECK(!Client(served.port, 0, kVersion, "secret", other.server.name()).greeted());
  for (const uint32_t version : {kVersion, kUnnamedVersion}) {
    const Client primary(served.port, 0, version, "secret", version == kVersion ? name : "");
    CHECK(primary.greeted() && primary.server() == (version == kVersion ? name : ""));
  }
}

// Others give memory back without a word to the server, and take it away as well.
void a_call_that_waits_for_memory_goes_on_at_once() {
  Served served(1 << 20);
  CHECK(served.memory.take(1 << 20));
  Client client(served.port);
  const std::vector<int64_t> ids = ids_to(1000);
  client.send(pull_of("t", ids));
  CHECK(client.is_silent(300));
  served.memory.give_back(1 << 20);
  const auto begin = std::chrono::steady_clock::now();
  check_pull(client, ids);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(3));  // it would give up after 10

  // A client that sends nothing more ends when a call that goes another way wants its memory.
  Client late(served.port);
  late.send(update_of("late", 0, ids_to(40000)).substr(0, 1000));
  wait_until([&] { return served.memory.held() > 0; });
  wait_until([&] {
    if (!served.memory.take(1 << 20)) return false;
    served.memory.give_back(1 << 20);
    return true;
  });
  CHECK(served.server.ended() == 1);
  CHECK(!late.receive().arrived);
}

// The server takes its time: the client is not late.
void a_client_that_waits_for_the_server_is_not_ended() {
  Served served(1 << 20);
  served.gate.close();
  Client client(served.port);
  client.send(update_of("patient", 0, ids_to(10)));
  wait_until([&] { return served.memory.held() > 0; });
  const uint64_t rest = (1 << 20) - served.memory.held();
  CHECK(served.memory.take(rest));
  Client waits(served.port);
  waits.send(pull_of("t", ids_to(5)));
  CHECK(waits.is_silent(1000));
  served.gate.open();
  check_pull(waits, ids_to(5));
  served.memory.give_back(rest);
  const Reply reply = client.receive();
  CHECK(reply.arrived && reply.code == 0);
  CHECK(served.server.ended() == 0);
}

void connections_make_room_for_new_ones() {
  Served served(1 << 20, 4);
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 40; ++i) {
    clients.push_back(std::make_unique<Client>(served.port));
    CHECK(clients.back()->greeted());
    CHECK(served.server.connections() <= 8);
    wait_until([&] { return served.server.connections() <= 4; });
  }
  clients.back()->send(pull_of("t", ids_to(5)));
  check_pull(*clients.back(), ids_to(5));
}

void a_stop_in_the_middle_of_calls_loses_nothing_acknowledged() {
  for (auto& each : steps) each = 0;
  std::atomic<int64_t> acknowledged{0}, sent{0};
  std::vector<std::thread> threads;
  {
    Served served;
    std::vector<std::unique_ptr<Client>> idle;
    for (int i = 0; i < 5; ++i) idle.push_back(std::make_unique<Client>(served.port));
    Client unread(served.port, 4096);
    unread.send(pull_of("t", ids_to(1 << 20)));
    std::atomic<int> begun{0};
    for (int t = 0; t < 6; ++t) {
      threads.emplace_back([&, t, port = served.port] {
        Client client(port);
        ++begun;
        for (uint64_t number = 0;; ++number) {
          if (t % 2 == 0) {
            const bool python = number % 2 == 0;
            if (!client.send(pull_of(python ? "of python" : "t", ids_to(100000)))) return;
            Reply reply;
            while (reply.last == 0) {
              if (!(reply = client.receive()).arrived || reply.code != 0) return;
            }
            continue;
          }
          ++sent;
          if (!client.send(update_of("s" + std::to_string(t), number, ids_to(kIds)))) return;
          const Reply reply = client.receive();
          if (!reply.arrived || reply.code != 0) return;
          ++acknowledged;
        }
      });
    }
    wait_until([&] { return begun == 6 && acknowledged > 20; });
    const auto begin = std::chrono::steady_clock::now();
    served.server.stop(20);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
    CHECK(served.server.connections() == 0);
    for (std::thread& thread : threads) thread.join();
  }
  CHECK(acknowledged <= steps[0] && steps[0] <= sent);
}

void a_stop_leaves_the_arrays_to_calls_that_are_answered_late() {
  Served served;
  served.hold = true;
  Client client(served.port);
  client.send(pull_of("of python", ids_to(100000)));
  wait_until([&] { return served.taken == 1; });
  served.server.stop(0.1);
  served.hold = false;  // the thread reads the ids, and answers a client that was cut off
  CHECK(!client.receive().arrived);
}

void calls_by_shared_memory_are_carried_out_once_and_never_read_beyond_it() {
  for (auto& each : steps) each = 0;
  constexpr int kClients = 4;
  constexpr uint64_t kWritesOfEach = kIsSlow ? 40 : 200;
  {
    Served served;
    std::vector<std::thread> threads;
    for (int t = 0; t < kClients; ++t) {
      threads.emplace_back([&served, t] {
        std::minstd_rand random(static_cast<unsigned>(t));
        const std::vector<int64_t> ids = ids_to(kIds);
        auto client = std::make_unique<MemoryClient>(served.server);
        for (uint64_t number = 0; number < kWritesOfEach; ++number) {
          for (bool done = false; !done;) {
            if (!client->greeted() || !client->send(update_of("client " + std::to_string(t), number, ids), ids) ||
                random() % 8 == 0) {
              client = std::make_unique<MemoryClient>(served.server);
              continue;
            }
            const Reply reply = client->receive();
            done = reply.arrived && reply.code == 0;
          }
          if (random() % 4 == 0) {
            const std::vector<int64_t> some = ids_to(static_cast<int64_t>(random() % 80000));
            CHECK(client->send(pull_of("t", some), some));
            std::string content;
            Reply reply;
            do {
              reply = client->receive();
              CHECK(reply.arrived && reply.code == 0);
              content += reply.content;
            } while (reply.last == 0);
            CHECK(content.size() == some.size() * kDim * 4);
            for (size_t i = 0; i < some.size(); ++i) {
              float id;
              std::memcpy(&id, content.data() + i * kDim * 4, 4);
              CHECK(id == static_cast<float>(some[i]));
            }
          }
          if (random() % 4 == 0) {
            const std::vector<int64_t> some = ids_to(static_cast<int64_t>(random() % 60000));
            CHECK(client->send(pull_of("of python", some), some));
            for (int part = 0; part < 2; ++part) CHECK(client->receive().content == bytes_of(some));
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    wait_until([&] { return served.server.memory_connections() == 0; });
    CHECK(served.memory.held() == 0 && served.server.running(true) == 0 && served.server.memory_bytes() == 0);
    for (const auto& each : steps) CHECK(each == kClients * kWritesOfEach);

    MemoryClient client(served.server);
    const std::vector<int64_t> many = ids_to(100000);  // their rows take more than the segment
    CHECK(client.send(pull_of("t", many), many) && client.receive().code == kInvalidArgument);
    CHECK(client.send(pull_of("of python", many), many) && client.receive().code == 0 &&
          client.receive().code == kInvalidArgument);
    CHECK(client.send(framed("", 1, uint64_t{1} << 63, uint64_t{1} << 63), {0}) &&
          client.receive().code == kInvalidArgument);
    CHECK(client.send(pull_of("t", ids_to(5)), ids_to(5)) && client.receive().rows == 5 * kDim * 4);
    served.server.set_token("another");
    CHECK(client.send(pull_of("t", ids_to(5)), ids_to(5)) && client.receive().code == kUnauthenticated);
    CHECK(!client.receive().arrived);
  }
}

}  // namespace

int main() {
  calls_by_shared_memory_are_carried_out_once_and_never_read_beyond_it();
  writes_are_carried_out_once_wherever_they_are_cut();
  requests_may_come_one_after_the_other_and_half_closed();
  sizes_that_are_wrong_are_refused();
  connections_for_another_server_are_refused();
  a_call_that_waits_for_memory_goes_on_at_once();
  a_client_that_waits_for_the_server_is_not_ended();
  connections_make_room_for_new_ones();
  a_stop_in_the_middle_of_calls_loses_nothing_acknowledged();
  a_stop_leaves_the_arrays_to_calls_that_are_answered_late();
}
