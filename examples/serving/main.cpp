// Serves an exported model with libtorch alone: no Python, no torchrec_recstore.
//
//   main MODEL.pt INPUTS.pt OUTPUT.pt [--library LIB.so]... [--delta DELTA.safetensors]...
//
// INPUTS.pt is a list of tensors that torch.save has written, the arguments of the model's forward; what forward
// returns, a tensor, goes to OUTPUT.pt. A model or delta that is damaged is refused. Rows of other types than float32, and models with a KeyedJaggedTensor in them,
// need FBGEMM's ops: give fbgemm_gpu's libraries with --library, in the order of docs/serving.md.
#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_file.h>
#include <dlfcn.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

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
  // The character of an escape; at_ goes from its backslash to its end. The header is UTF-8: \u is for control characters.
  char escaped() {
    if (++at_ >= text_.size()) refuse();
    const std::string letters = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    const size_t known = letters.find(text_[at_]);
    if (known != std::string::npos) return meant[known];
    int code = 0;
    const char* digits = text_.data() + at_ + 1;
    if (text_[at_] != 'u' || text_.size() - at_ < 5 || std::from_chars(digits, digits + 4, code, 16).ptr != digits + 4 ||
        code < 0 || code >= 0x80) {
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
      {"F64", at::kDouble},   {"F32", at::kFloat},   {"F16", at::kHalf},     {"BF16", at::kBFloat16},
      {"I64", at::kLong},     {"I32", at::kInt},     {"I16", at::kShort},    {"I8", at::kChar},
      {"U64", at::kUInt64},   {"U32", at::kUInt32},  {"U16", at::kUInt16},   {"U8", at::kByte},
      {"BOOL", at::kBool},    {"C64", at::kComplexFloat},
      {"F8_E4M3", at::kFloat8_e4m3fn}, {"F8_E5M2", at::kFloat8_e5m2},
      {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz}, {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
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
  try {
    return tensors_of(file);
  } catch (const std::exception& error) {
    throw std::runtime_error(path + " is no safetensors file or damaged: " + error.what());
  }
}

// A served model that is, bit for bit, what was exported: torch::jit::load itself takes damaged files.
std::shared_ptr<torch::jit::Module> loaded(const std::string& path) {
  auto served = std::make_shared<torch::jit::Module>(torch::jit::load(path));
  const auto verify = served->find_method("verify");
  if (verify.has_value()) {  // files of format 1 have none
    const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
    try {
      (*verify)({at::from_file(path, /*shared=*/false, size, at::kByte)});
    } catch (const std::exception& error) {
      throw std::runtime_error(path + " cannot be served: " + error.what());
    }
  }
  return served;
}

int run(const std::vector<std::string>& arguments) {
  std::vector<std::string> files, deltas;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool library = arguments[i] == "--library", delta = arguments[i] == "--delta";
    if ((library || delta) && i + 1 == arguments.size()) throw std::runtime_error(arguments[i] + " needs a file");
    if (library) {
      if (dlopen(arguments[++i].c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
    } else if (delta) {
      deltas.push_back(arguments[++i]);
    } else {
      files.push_back(arguments[i]);
    }
  }
  if (files.size() != 3) throw std::runtime_error("usage: main MODEL.pt INPUTS.pt OUTPUT.pt [--library LIB.so]... [--delta FILE]...");
  c10::InferenceMode inference;
  auto served = loaded(files[0]);
  for (const std::string& path : deltas) {
    // Requests go on with the old model while the new one is made, and take the new one from then on.
    auto fresh = std::make_shared<torch::jit::Module>(served->deepcopy());
    const bool changed = fresh->run_method("apply_delta", read_delta(path)).toBool();
    std::atomic_store(&served, fresh);
    std::cout << (changed ? "applied " : "already has ") << path << "\n";
  }
  std::cout << "version " << served->run_method("recstore_version").toStringRef() << "\n";
  const c10::IValue given = torch::jit::pickle_load(bytes_of(files[1]));
  std::vector<c10::IValue> inputs;
  for (const c10::IValue& input : given.toListRef()) inputs.push_back(input);
  const std::vector<char> output = torch::jit::pickle_save(served->forward(inputs));
  std::ofstream file(files[2], std::ios::binary);
  file.write(output.data(), static_cast<std::streamsize>(output.size()));
  file.close();
  if (!file) throw std::runtime_error("cannot write " + files[2]);
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
