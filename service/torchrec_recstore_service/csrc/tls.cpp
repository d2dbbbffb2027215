#include "tls.h"

#include <arpa/inet.h>
#include <dlfcn.h>

#include <climits>
#include <initializer_list>
#include <mutex>
#include <stdexcept>

namespace recstore_service {
namespace {

// The part of OpenSSL's interface that is needed here, with the numbers of its headers. It is the same in OpenSSL 1.1.1
// and 3 (https://docs.openssl.org/master/man3/).
struct SSL;
struct SSL_CTX;
struct SSL_METHOD;
struct X509_VERIFY_PARAM;
constexpr int kFiletypePem = 1, kVerifyPeer = 1, kVerifyFailIfNoPeerCert = 2, kErrorWantRead = 2, kErrorWantWrite = 3;
constexpr int kCtrlSetHostName = 55, kCtrlSetMinProtoVersion = 123, kCtrlMode = 33, kTls12 = 0x0303;
constexpr long kModePartialWrite = 1, kModeMovingBuffer = 2, kModeReleaseBuffers = 0x10;
constexpr unsigned long kOpNoRenegotiation = 1ul << 30;

struct OpenSsl {
  const SSL_METHOD* (*TLS_server_method)();
  const SSL_METHOD* (*TLS_client_method)();
  SSL_CTX* (*SSL_CTX_new)(const SSL_METHOD*);
  void (*SSL_CTX_free)(SSL_CTX*);
  long (*SSL_CTX_ctrl)(SSL_CTX*, int, long, void*);
  unsigned long (*SSL_CTX_set_options)(SSL_CTX*, unsigned long);
  int (*SSL_CTX_set_cipher_list)(SSL_CTX*, const char*);
  int (*SSL_CTX_use_certificate_chain_file)(SSL_CTX*, const char*);
  int (*SSL_CTX_use_PrivateKey_file)(SSL_CTX*, const char*, int);
  int (*SSL_CTX_load_verify_locations)(SSL_CTX*, const char*, const char*);
  void (*SSL_CTX_set_verify)(SSL_CTX*, int, void*);
  SSL* (*SSL_new)(SSL_CTX*);
  void (*SSL_free)(SSL*);
  int (*SSL_set_fd)(SSL*, int);
  int (*SSL_accept)(SSL*);
  int (*SSL_connect)(SSL*);
  long (*SSL_ctrl)(SSL*, int, long, void*);
  int (*SSL_set1_host)(SSL*, const char*);
  X509_VERIFY_PARAM* (*SSL_get0_param)(SSL*);
  int (*X509_VERIFY_PARAM_set1_ip_asc)(X509_VERIFY_PARAM*, const char*);
  int (*SSL_read)(SSL*, void*, int);
  int (*SSL_write)(SSL*, const void*, int);
  int (*SSL_shutdown)(SSL*);
  int (*SSL_get_error)(const SSL*, int);
  void (*ERR_clear_error)();

  // Throws std::runtime_error.
  static const OpenSsl& of(const std::string& path) {
    static std::mutex mutex;
    static OpenSsl* found = nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    if (found != nullptr) return *found;
    void* library = nullptr;
    for (const std::string& name : std::initializer_list<std::string>{path, "libssl.so.3", "libssl.so.1.1"}) {
      if (!name.empty() && library == nullptr) library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) {
      throw std::runtime_error("OpenSSL's libssl.so.3 is not on this machine: install the package libssl3");
    }
    auto loaded = std::make_unique<OpenSsl>();
    const auto load = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) throw std::runtime_error(std::string("OpenSSL has no function ") + name);
    };
#define RECSTORE_LOAD(name) load(loaded->name, #name)
    RECSTORE_LOAD(TLS_server_method);
    RECSTORE_LOAD(TLS_client_method);
    RECSTORE_LOAD(SSL_CTX_new);
    RECSTORE_LOAD(SSL_CTX_free);
    RECSTORE_LOAD(SSL_CTX_ctrl);
    RECSTORE_LOAD(SSL_CTX_set_options);
    RECSTORE_LOAD(SSL_CTX_set_cipher_list);
    RECSTORE_LOAD(SSL_CTX_use_certificate_chain_file);
    RECSTORE_LOAD(SSL_CTX_use_PrivateKey_file);
    RECSTORE_LOAD(SSL_CTX_load_verify_locations);
    RECSTORE_LOAD(SSL_CTX_set_verify);
    RECSTORE_LOAD(SSL_new);
    RECSTORE_LOAD(SSL_free);
    RECSTORE_LOAD(SSL_set_fd);
    RECSTORE_LOAD(SSL_accept);
    RECSTORE_LOAD(SSL_connect);
    RECSTORE_LOAD(SSL_ctrl);
    RECSTORE_LOAD(SSL_set1_host);
    RECSTORE_LOAD(SSL_get0_param);
    RECSTORE_LOAD(X509_VERIFY_PARAM_set1_ip_asc);
    RECSTORE_LOAD(SSL_read);
    RECSTORE_LOAD(SSL_write);
    RECSTORE_LOAD(SSL_shutdown);
    RECSTORE_LOAD(SSL_get_error);
    RECSTORE_LOAD(ERR_clear_error);
#undef RECSTORE_LOAD
    return *(found = loaded.release());
  }
};

class Stream final : public TlsStream {
 public:
  Stream(const OpenSsl& ssl, std::shared_ptr<TlsContext> context, SSL* state)
      : ssl_(ssl), context_(std::move(context)), state_(state) {}
  ~Stream() override { ssl_.SSL_free(state_); }

  Io accept() override {
    size_t none = 0;
    return step([&] { return ssl_.SSL_accept(state_); }, none);
  }
  Io connect() override {
    size_t none = 0;
    return step([&] { return ssl_.SSL_connect(state_); }, none);
  }
  Io read(char* to, size_t size, size_t& got) override {
    return step([&] { return ssl_.SSL_read(state_, to, length(size)); }, got);
  }
  Io write(const char* from, size_t size, size_t& sent) override {
    return step([&] { return ssl_.SSL_write(state_, from, length(size)); }, sent);
  }
  void shutdown() override {
    ssl_.ERR_clear_error();
    ssl_.SSL_shutdown(state_);
  }

 private:
  static int length(size_t size) { return size > INT_MAX ? INT_MAX : static_cast<int>(size); }
  template <class Call>
  Io step(const Call& call, size_t& moved) {
    ssl_.ERR_clear_error();
    const int result = call();
    if (result > 0) {
      moved = static_cast<size_t>(result);
      return Io::kDone;
    }
    const int error = ssl_.SSL_get_error(state_, result);
    return error == kErrorWantRead ? Io::kWantRead : error == kErrorWantWrite ? Io::kWantWrite : Io::kEnd;
  }

  const OpenSsl& ssl_;
  std::shared_ptr<TlsContext> context_;  // lives as long as its streams
  SSL* state_;
};

class Context final : public TlsContext, public std::enable_shared_from_this<Context> {
 public:
  Context(const OpenSsl& ssl, bool client, const std::string& cert, const std::string& key, const std::string& ca)
      : ssl_(ssl), context_(ssl.SSL_CTX_new(client ? ssl.TLS_client_method() : ssl.TLS_server_method())) {
    if (context_ == nullptr) throw std::runtime_error("OpenSSL cannot make a context");
    ssl.SSL_CTX_ctrl(context_, kCtrlSetMinProtoVersion, kTls12, nullptr);
    ssl.SSL_CTX_ctrl(context_, kCtrlMode, kModePartialWrite | kModeMovingBuffer | kModeReleaseBuffers, nullptr);
    ssl.SSL_CTX_set_options(context_, kOpNoRenegotiation);
    const bool loaded = ssl.SSL_CTX_set_cipher_list(context_, "DEFAULT@SECLEVEL=2") == 1 &&
                        (cert.empty() || ssl.SSL_CTX_use_certificate_chain_file(context_, cert.c_str()) == 1) &&
                        (key.empty() || ssl.SSL_CTX_use_PrivateKey_file(context_, key.c_str(), kFiletypePem) == 1) &&
                        (ca.empty() || ssl.SSL_CTX_load_verify_locations(context_, ca.c_str(), nullptr) == 1);
    if (!loaded) {
      ssl.SSL_CTX_free(context_);
      throw std::runtime_error("OpenSSL cannot use the certificates");
    }
    if (!ca.empty() || client) ssl.SSL_CTX_set_verify(context_, kVerifyPeer | kVerifyFailIfNoPeerCert, nullptr);
  }
  ~Context() override { ssl_.SSL_CTX_free(context_); }

  std::unique_ptr<TlsStream> stream(int fd, const std::string& host) override {
    SSL* state = ssl_.SSL_new(context_);
    if (state == nullptr) return nullptr;
    auto stream = std::make_unique<Stream>(ssl_, shared_from_this(), state);
    ssl_.SSL_set_fd(state, fd);
    if (host.empty()) return stream;
    in6_addr address;
    const bool number =
        inet_pton(AF_INET, host.c_str(), &address) == 1 || inet_pton(AF_INET6, host.c_str(), &address) == 1;
    if (number && ssl_.X509_VERIFY_PARAM_set1_ip_asc(ssl_.SSL_get0_param(state), host.c_str()) != 1) return nullptr;
    if (number) return stream;
    if (ssl_.SSL_set1_host(state, host.c_str()) != 1) return nullptr;
    ssl_.SSL_ctrl(state, kCtrlSetHostName, 0, const_cast<char*>(host.c_str()));
    return stream;
  }

 private:
  const OpenSsl& ssl_;
  SSL_CTX* context_;
};

}  // namespace

std::shared_ptr<TlsContext> tls_context(const std::string& library, bool client, const std::string& cert,
                                        const std::string& key, const std::string& ca) {
  return std::make_shared<Context>(OpenSsl::of(library), client, cert, key, ca);
}

}  // namespace recstore_service
