#include "applied.h"

#include <chrono>
#include <utility>

namespace recstore_service {
namespace {

constexpr size_t kMostAnswers = 1024;  // of a client
constexpr size_t kNameBytes = 64;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

void Applied::check_open_locked() const {
  // Clients then repeat the call at the next server.
  if (closed_) throw CallFailed({kUnavailable, "the server stops", "ServerStoppingError"});
}

Applied::Client& Applied::known(const std::string& name) {
  Client& client = clients_[name];
  client.place = order_.insert(order_.end(), name);
  client.last_used = now();
  return client;
}

Applied::Client& Applied::client(const std::string& name) {
  const auto found = clients_.find(name);
  if (found != clients_.end()) {
    order_.splice(order_.end(), order_, found->second.place);
    found->second.last_used = now();
    return found->second;
  }
  if (clients_.size() >= most_clients_) {
    if (now() - clients_[order_.front()].last_used < kept_s_) {
      unavailable(std::to_string(most_clients_) + " clients have written in the last " +
                  std::to_string(static_cast<int64_t>(kept_s_)) + " s: use one client for many calls");
    }
    clients_.erase(order_.front());
    order_.pop_front();
  }
  return known(name);
}

Applied::Mine Applied::begin(const std::string& name, uint64_t request, uint64_t done_before, uint64_t& deleted) {
  if (name.empty() || name.size() > kNameBytes) {
    size_t characters = 0;
    for (const char c : name) characters += (c & 0xC0) != 0x80;
    invalid("the name of a client must have from 1 to 64 bytes, got " + std::to_string(characters) + " characters");
  }
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    check_open_locked();
    Client& client = this->client(name);
    if (done_before > client.done_before) {
      client.done_before = done_before;
      client.answers.erase(client.answers.begin(), client.answers.lower_bound(done_before));
    }
    if (request < client.done_before) {
      invalid("request " + std::to_string(request) + " of client '" + name + "' has been answered already");
    }
    const auto there = client.answers.find(request);
    if (there == client.answers.end()) {
      if (client.answers.size() >= kMostAnswers) {
        invalid("client '" + name + "' may repeat 1024 requests: it must send a higher done_before");
      }
      Mine mine = client.answers[request] = std::make_shared<Answer>();
      ++running_;
      return mine;
    }
    const Mine answer = there->second;
    changed_.wait(lock, [&] { return answer->done; });
    if (answer->failed) continue;
    deleted = answer->deleted;
    return nullptr;
  }
}

void Applied::finish(const std::string& name, uint64_t request, const Mine& mine, bool failed, uint64_t deleted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  mine->done = true;
  mine->failed = failed;
  mine->deleted = deleted;
  const auto client = clients_.find(name);
  if (failed && client != clients_.end()) {
    const auto there = client->second.answers.find(request);
    if (there != client->second.answers.end() && there->second == mine) client->second.answers.erase(there);
  }
  --running_;
  changed_.notify_all();
}

void Applied::begin_change() {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open_locked();
  ++running_;
}

void Applied::end_change() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --running_;
  changed_.notify_all();
}

void Applied::close() {
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  changed_.wait(lock, [&] { return running_ == 0; });
}

void Applied::reopen() {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = false;
}

void Applied::check_open() {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_open_locked();
}

int64_t Applied::clients() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(clients_.size());
}

void Applied::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  clients_.clear();
  order_.clear();
}

void Applied::add(const std::string& name, uint64_t done_before, int64_t request, uint64_t deleted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = clients_.find(name);
  Client& client = found == clients_.end() ? known(name) : found->second;
  client.done_before = done_before;
  if (request < 0) return;
  auto answer = std::make_shared<Answer>();
  answer->done = true;
  answer->deleted = deleted;
  client.answers[static_cast<uint64_t>(request)] = std::move(answer);
}

}  // namespace recstore_service
