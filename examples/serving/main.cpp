// Serves an exported model with libtorch alone: no Python, no torchrec_recstore.
//
//   main MODEL.pt INPUTS.pt OUTPUT.pt [--library LIB.so]... [--delta DELTA.safetensors]... [--key FILE]
//   main MODEL.pt2 INPUTS.pt OUTPUT.pt [--library LIB.so]... [--key FILE]
//   main --follow DIRECTORY [--library LIB.so]... [--key FILE]
//
// MODEL.pt is a file of export_for_inference, and MODEL.pt2 a package that AOTInductor has made of such a model.
// INPUTS.pt is a list of tensors that torch.save has written, the arguments of the model's forward. OUTPUT.pt gets the
// tensor that forward returns. A damaged model or delta is refused, and with --key one that is not signed with the key,
// before anything is loaded from it. A signed model is loaded from memory, so its rows cannot be mapped.
//
// With --follow, the program serves what a DeltaPublisher publishes to the directory: it loads the newest full export
// and applies the deltas after it as they appear. Each line of the standard input, "INPUTS.pt OUTPUT.pt", is a request.
// The program answers it, prints the version that has answered, and ends with its input.
//
// A model with a hash index needs _serving.abi3.so of the package torchrec_recstore_serving. With the other index, rows
// of other types than float32, and models with a KeyedJaggedTensor in them, need FBGEMM's ops. Give these libraries
// with --library, in the order of docs/serving.md.
#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_file.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The secret key with which files are signed: see "Damaged files" in docs/serving.md. A program without a key needs no
// libcrypto.
class Key {
 public:
  explicit Key(const std::string& path) : path_(path) {
    const std::vector<char> file = bytes_of(path);
    const auto is_space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
    const auto begin = std::find_if_not(file.begin(), file.end(), is_space);
    const auto end = std::find_if_not(file.rbegin(), std::make_reverse_iterator(begin), is_space).base();
    secret_.assign(begin, end);
    if (secret_.size() < 32) throw std::runtime_error("the key " + path + " must have at least 32 characters");
    library_ = dlopen("libcrypto.so.3", RTLD_NOW);
    if (library_ == nullptr) throw std::runtime_error(dlerror());
  }

  // Throws if the bytes of a file are not signed with the key. kind: "export", "package" or "delta".
  void check(const std::vector<char>& file, const std::string& name, const std::string& kind) const {
    const bool is_delta = kind == "delta";
    const std::string before = is_delta ? "\"recstore signature\":\"" : "recstore signature ";
    const std::string sum = is_delta ? "\"recstore delta\":\"0001 " : "recstore " + kind + " 0001 ";
    // The digits of an export are its last bytes, and those of a delta are in its header.
    const std::string_view text(file.data(), file.size());
    const size_t first =
        is_delta ? 8 : file.size() - std::min(file.size(), before.size() + kDigits + 1 + sum.size() + kSumDigits);
    const size_t found = text.find(before, first), found_sum = text.find(sum, first);
    if (found == text.npos || found_sum == text.npos || found + before.size() + kDigits > file.size()) {
      throw std::runtime_error(name + " has no signature, and the key " + path_ + " is required");
    }
    const size_t signature = found + before.size(), place = found_sum + sum.size();
    const size_t end = place + kSumDigits >= file.size() ? place : file.size();
    const std::string what = kind + " " + std::to_string(place) + " " + std::to_string(signature);
    std::vector<std::string_view> parts = {{what.c_str(), what.size() + 1}};
    const std::string zeros(kDigits, '0');  // in the place of the signature and of the checksum
    size_t at = 0;
    for (const auto& [begin, count] : std::map<size_t, size_t>{{signature, kDigits}, {place, kSumDigits}}) {
      if (begin >= end) break;
      parts.push_back(text.substr(at, begin - at));
      parts.push_back(std::string_view(zeros).substr(0, count));
      at = begin + count;
    }
    parts.push_back(text.substr(at, end - at));
    require(text.substr(signature, kDigits) == signed_digits(parts), name);
  }

  // Throws if latest.json, or the record of a publication, is not signed with the key. The signature, its last field,
  // is that of the text without it.
  void check_record(std::string_view text, const std::string& name) const {
    constexpr std::string_view before = ", \"signature\": \"", what("record\0", 7);
    const size_t found = text.rfind(before), signature = found + before.size();
    if (found == text.npos) throw std::runtime_error(name + " has no signature, and the key " + path_ + " is required");
    require(text.substr(signature) == signed_digits({what, text.substr(0, found), "}"}) + "\"}", name);
  }

 private:
  static constexpr size_t kDigits = 64, kSumDigits = 16;

  void require(bool is_signed, const std::string& name) const {
    if (!is_signed) {
      throw std::runtime_error(name + " is not signed with the key " + path_ +
                               ": it was changed, or was written with another key");
    }
  }

  std::string signed_digits(const std::vector<std::string_view>& parts) const {
    void* context = function<void*()>("HMAC_CTX_new")();
    function<int(void*, const char*, int, const void*, void*)>("HMAC_Init_ex")(
        context, secret_.data(), static_cast<int>(secret_.size()), function<const void*()>("EVP_sha256")(), nullptr);
    for (const std::string_view part : parts) {
      function<int(void*, const char*, size_t)>("HMAC_Update")(context, part.data(), part.size());
    }
    unsigned char digest[32];
    function<int(void*, unsigned char*, unsigned*)>("HMAC_Final")(context, digest, nullptr);
    function<void(void*)>("HMAC_CTX_free")(context);
    std::string digits;
    for (const unsigned char byte : digest) digits += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
    return digits;
  }

  template <class Type>
  Type* function(const char* name) const {
    void* found = dlsym(library_, name);
    if (found == nullptr) throw std::runtime_error(dlerror());
    return reinterpret_cast<Type*>(found);
  }

  std::string path_, secret_;
  void* library_;
};

std::unique_ptr<const Key> required_key;

// The header of a safetensors file: {"name":{"dtype":"I64","shape":[2,3],"data_offsets":[0,48]},...}.
class Header {
 public:
  explicit Header(std::string text) : text_(std::move(text)) {}

  bool done() {
    skip(" ,{");
    return at_ >= text_.size() || text_[at_] == '}';
  }
  std::string string() {
    expect('"');
    std::string out;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) out += text_[at_] == '\\' ? escaped() : text_[at_];
    if (at_ >= text_.size()) refuse();
    ++at_;
    return out;
  }
  std::vector<int64_t> numbers() {
    expect('[');
    std::vector<int64_t> out;
    while (at_ < text_.size() && text_[at_] != ']') {
      int64_t number = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), number);
      if (error != std::errc() || number < 0) refuse();
      out.push_back(number);
      at_ = static_cast<size_t>(end - text_.data());
      skip(" ,");
    }
    expect(']');
    return out;
  }
  void colon() { expect(':'); }
  void skip(const char* any) { at_ = std::min(text_.find_first_not_of(any, at_), text_.size()); }
  void close() { expect('}'); }

 private:
  void expect(char wanted) {
    skip(" ");
    if (at_ >= text_.size() || text_[at_] != wanted) refuse();
    ++at_;
  }
  // The character of an escape; at_ goes from its backslash to its end. The header is UTF-8: \u is for control
  // characters.
  char escaped() {
    if (++at_ >= text_.size()) refuse();
    const std::string letters = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    const size_t known = letters.find(text_[at_]);
    if (known != std::string::npos) return meant[known];
    int code = 0;
    const char* digits = text_.data() + at_ + 1;
    if (text_[at_] != 'u' || text_.size() - at_ < 5 ||
        std::from_chars(digits, digits + 4, code, 16).ptr != digits + 4 || code < 0 || code >= 0x80) {
      refuse();
    }
    at_ += 4;
    return static_cast<char>(code);
  }
  [[noreturn]] static void refuse() { throw std::runtime_error("its header is not one of safetensors"); }

  std::string text_;
  size_t at_ = 0;
};

at::ScalarType type_named(const std::string& name) {
  static const std::map<std::string, at::ScalarType> types = {
      {"F64", at::kDouble},
      {"F32", at::kFloat},
      {"F16", at::kHalf},
      {"BF16", at::kBFloat16},
      {"I64", at::kLong},
      {"I32", at::kInt},
      {"I16", at::kShort},
      {"I8", at::kChar},
      {"U64", at::kUInt64},
      {"U32", at::kUInt32},
      {"U16", at::kUInt16},
      {"U8", at::kByte},
      {"BOOL", at::kBool},
      {"C64", at::kComplexFloat},
      {"F8_E4M3", at::kFloat8_e4m3fn},
      {"F8_E5M2", at::kFloat8_e5m2},
      {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
      {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
  };
  const auto found = types.find(name);
  if (found == types.end()) throw std::runtime_error("it has tensors of the unknown type " + name);
  return found->second;
}

// What apply_delta takes, of the bytes of a safetensors file.
c10::Dict<std::string, at::Tensor> tensors_of(const std::vector<char>& file) {
  uint64_t length = 0;
  if (file.size() < sizeof(length)) throw std::runtime_error("it has no header");
  std::memcpy(&length, file.data(), sizeof(length));
  if (length > file.size() - sizeof(length)) throw std::runtime_error("its header is not whole");
  const char* data = file.data() + sizeof(length) + length;
  const int64_t data_bytes = static_cast<int64_t>(file.size() - sizeof(length) - length);
  Header header(std::string(file.data() + sizeof(length), length));
  c10::Dict<std::string, at::Tensor> tensors;
  while (!header.done()) {
    const std::string name = header.string();
    header.colon();
    if (name == "__metadata__") {  // strings by name, of no use here
      while (!header.done()) {
        header.string();
        header.colon();
        header.string();
      }
      header.close();
      continue;
    }
    std::string type;
    std::vector<int64_t> shape, range;
    while (!header.done()) {
      const std::string field = header.string();
      header.colon();
      if (field == "dtype") {
        type = header.string();
      } else {
        (field == "shape" ? shape : range) = header.numbers();
      }
    }
    header.close();
    const at::ScalarType scalar = type_named(type);
    int64_t bytes = static_cast<int64_t>(c10::elementSize(scalar));
    for (const int64_t size : shape) {
      if (__builtin_mul_overflow(bytes, size, &bytes)) throw std::runtime_error("tensor " + name + " is too large");
    }
    if (range.size() != 2 || range[1] > data_bytes || range[0] > range[1] || range[1] - range[0] != bytes) {
      throw std::runtime_error("the bytes of tensor " + name + " are not where they should be");
    }
    at::Tensor tensor = at::empty(shape, scalar);
    if (bytes > 0) std::memcpy(tensor.data_ptr(), data + range[0], bytes);
    tensors.insert(name, tensor);
  }
  return tensors;
}

c10::Dict<std::string, at::Tensor> read_delta(const std::string& path) {
  const std::vector<char> file = bytes_of(path);
  if (required_key != nullptr) required_key->check(file, path, "delta");
  try {
    return tensors_of(file);
  } catch (const std::exception& error) {
    throw std::runtime_error(path + " is no safetensors file or damaged: " + error.what());
  }
}

// A served model that is, bit for bit, what was exported: torch::jit::load itself takes damaged files.
std::shared_ptr<torch::jit::Module> loaded(const std::string& path) {
  if (required_key != nullptr) {
    const std::vector<char> file = bytes_of(path);
    required_key->check(file, path, "export");
    std::istringstream checked(std::string(file.begin(), file.end()));
    return std::make_shared<torch::jit::Module>(torch::jit::load(checked));
  }
  auto served = std::make_shared<torch::jit::Module>(torch::jit::load(path));
  const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
  try {
    served->run_method("verify", at::from_file(path, /*shared=*/false, size, at::kByte));
  } catch (const std::exception& error) {
    throw std::runtime_error(path + " cannot be served: " + error.what());
  }
  return served;
}

using Served = std::shared_ptr<torch::jit::Module>;

// The model after a delta. Requests go on with the old model while the new one is made, and take the new one from then
// on.
Served after_delta(const Served& served, const std::string& path) {
  auto fresh = std::make_shared<torch::jit::Module>(served->deepcopy());
  const bool changed = fresh->run_method("apply_delta", read_delta(path)).toBool();
  std::cout << (changed ? "applied " : "already has ") << path << std::endl;
  return fresh;
}

std::string version_of(const Served& served) { return served->run_method("recstore_version").toStringRef(); }

using Model = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

void answer(const Model& model, const std::string& inputs_path, const std::string& output_path) {
  const c10::IValue given = torch::jit::pickle_load(bytes_of(inputs_path));
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& input : given.toListRef()) inputs.push_back(input.toTensor());
  const std::vector<char> output = torch::jit::pickle_save(model(inputs));
  std::ofstream file(output_path, std::ios::binary);
  file.write(output.data(), static_cast<std::streamsize>(output.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + output_path);
}

void answer(const Served& served, const std::string& inputs_path, const std::string& output_path) {
  const Model model = [&](const std::vector<at::Tensor>& inputs) {
    return served->forward({inputs.begin(), inputs.end()}).toTensor();
  };
  answer(model, inputs_path, output_path);
}

// A copy of a package that others cannot change, if there is a key. The loader takes the path of a file only.
class Copy {
 public:
  explicit Copy(const std::string& path) : path_(path) {
    if (required_key == nullptr) return;
    const std::vector<char> file = bytes_of(path);
    required_key->check(file, path, "package");
    std::string folder = (std::filesystem::temp_directory_path() / "recstore-package-XXXXXX").string();
    if (mkdtemp(folder.data()) == nullptr) throw std::runtime_error("cannot create " + folder);
    folder_ = folder;
    path_ = folder_ / "model.pt2";
    std::ofstream(path_, std::ios::binary).write(file.data(), static_cast<std::streamsize>(file.size()));
  }
  ~Copy() {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_, folder_;
};

void answer_by_package(const std::string& path, const std::string& inputs_path, const std::string& output_path) {
  // Otherwise a package reads inputs of another type as if they had the type that it was compiled for.
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*overwrite=*/0);
  const Copy copy(path);
  torch::inductor::AOTIModelPackageLoader package(copy.path());
  const Model model = [&](const std::vector<at::Tensor>& inputs) { return package.run(inputs).at(0); };
  answer(model, inputs_path, output_path);
}

// A directory of publications: latest.json names the newest one, 000000000012.pt and 000000000012.safetensors are a
// full export, a model without rows and the delta with all of them, and 000000000013.delta is the delta from
// publication 12 to 13. Each file appears whole, and latest.json last.
class Publications {
 public:
  explicit Publications(std::filesystem::path directory) : directory_(std::move(directory)) {}

  struct Latest {
    int64_t number = -1;  // of the newest publication; -1: there is none
    int64_t full = -1;    // of the newest full export
    std::string run;      // the publisher, which may begin to count anew
    std::string version;  // of the model of the newest publication
  };
  Latest latest() const {
    if (!std::filesystem::exists(directory_ / "latest.json")) return {};
    const std::vector<char> bytes = bytes_of(directory_ / "latest.json");
    const std::string text(bytes.begin(), bytes.end());
    if (required_key != nullptr) required_key->check_record(text, directory_ / "latest.json");
    std::smatch number, full, run, version;
    if (!std::regex_search(text, number, std::regex("\"number\": (\\d+)")) ||
        !std::regex_search(text, full, std::regex("\"fulls\": \\[(?:\\d+, )*(\\d+)\\]")) ||
        !std::regex_search(text, run, std::regex("\"run\": \"([^\"]*)\"")) ||
        !std::regex_search(text, version, std::regex("\"version\": \"([^\"]*)\""))) {
      throw std::runtime_error((directory_ / "latest.json").string() + " is not what a DeltaPublisher writes");
    }
    return {std::stoll(number[1]), std::stoll(full[1]), run[1], version[1]};
  }
  std::string file(int64_t number, const char* suffix) const {
    std::string digits = std::to_string(number);
    digits.insert(0, 12 - std::min<size_t>(12, digits.size()), '0');
    return directory_ / (digits + suffix);
  }

 private:
  std::filesystem::path directory_;
};

// Follows the publications of a directory in a thread of its own.
class Follower {
 public:
  explicit Follower(const std::string& directory) : publications_(directory) {
    while (served() == nullptr) update();
    thread_ = std::thread([this] {
      c10::InferenceMode inference;
      while (!done_) update();
    });
  }
  ~Follower() {
    done_ = true;
    thread_.join();
  }
  Served served() const { return std::atomic_load(&served_); }

 private:
  void update() {
    try {
      catch_up(publications_.latest());
      problem_.clear();
    } catch (const std::exception& error) {
      if (problem_ != error.what()) std::cerr << error.what() << std::endl;
      problem_ = error.what();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  void catch_up(const Publications::Latest& latest) {
    try {
      if (latest.number >= 0 && (latest.run != run_ || (broken_ && latest.full > full_))) load(latest);
      while (!broken_ && number_ < latest.number) {
        std::atomic_store(&served_, after_delta(served_, publications_.file(number_ + 1, ".delta")));
        ++number_;
      }
      if (!broken_ && number_ == latest.number && version_of(served_) != latest.version) {
        throw std::runtime_error("publication " + std::to_string(number_) +
                                 " is not the version that latest.json names");
      }
    } catch (const std::exception& error) {  // the chain is broken, or the publisher has deleted a file meanwhile
      broken_ = true;
      full_ = latest.full;
      throw std::runtime_error(std::string("the next full export will be loaded: ") + error.what());
    }
  }
  void load(const Publications::Latest& latest) {
    const std::string program = publications_.file(latest.full, ".pt");
    const Served served = loaded(program);
    served->run_method("apply_delta", read_delta(publications_.file(latest.full, ".safetensors")));
    std::atomic_store(&served_, served);
    number_ = full_ = latest.full;
    run_ = latest.run;
    broken_ = false;
    std::cout << "loaded " << program << std::endl;
  }

  Publications publications_;
  Served served_;
  int64_t number_ = 0;  // of the publication that is served
  int64_t full_ = -1;   // of the full export that was loaded last, or after which the chain is broken
  bool broken_ = false;
  std::string run_;
  std::string problem_;  // the last error, which is printed once
  std::atomic<bool> done_{false};
  std::thread thread_;
};

int follow(const std::string& directory) {
  c10::InferenceMode inference;
  const Follower follower(directory);
  std::string inputs, output;
  while (std::cin >> inputs >> output) {
    const Served served = follower.served();  // the whole request is answered by this version
    answer(served, inputs, output);
    std::cout << "answered " << output << " with version " << version_of(served) << std::endl;
  }
  return 0;
}

int run(const std::vector<std::string>& arguments) {
  std::vector<std::string> files, deltas;
  std::string directory;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool library = arguments[i] == "--library", delta = arguments[i] == "--delta",
               follows = arguments[i] == "--follow";
    const bool key = arguments[i] == "--key";
    if ((library || delta || follows || key) && i + 1 == arguments.size()) {
      throw std::runtime_error(arguments[i] + " needs a file");
    }
    if (library) {
      if (dlopen(arguments[++i].c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
    } else if (key) {
      required_key = std::make_unique<Key>(arguments[++i]);
    } else if (delta) {
      deltas.push_back(arguments[++i]);
    } else if (follows) {
      directory = arguments[++i];
    } else {
      files.push_back(arguments[i]);
    }
  }
  if (!directory.empty() && files.empty() && deltas.empty()) return follow(directory);
  if (files.size() != 3 || !directory.empty()) {
    throw std::runtime_error(
        "usage: main MODEL.pt|MODEL.pt2 INPUTS.pt OUTPUT.pt [--library LIB.so]... [--delta FILE]... [--key FILE], or "
        "main --follow DIRECTORY");
  }
  c10::InferenceMode inference;
  if (std::filesystem::path(files[0]).extension() == ".pt2") {
    if (!deltas.empty()) {
      throw std::runtime_error(files[0] +
                               " takes no deltas: serve the file of export_for_inference, or make a new package");
    }
    answer_by_package(files[0], files[1], files[2]);
    return 0;
  }
  auto served = loaded(files[0]);
  for (const std::string& path : deltas) served = after_delta(served, path);
  std::cout << "version " << version_of(served) << "\n";
  answer(served, files[1], files[2]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
