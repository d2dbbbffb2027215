// Serves an exported model with libtorch alone: no Python, no torchrec_recstore.
//
//   main MODEL.pt INPUTS.pt OUTPUT.pt [--library LIB.so]... [--delta DELTA.safetensors]...
//
// INPUTS.pt is a list of tensors that torch.save has written, the arguments of the model's forward; what forward
// returns, a tensor, goes to OUTPUT.pt. Rows of other types than float32, and models with a KeyedJaggedTensor in them,
// need FBGEMM's ops: give fbgemm_gpu's libraries with --library, in the order of docs/serving.md.
#include <ATen/core/Dict.h>
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
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
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') ++at_;  // names of tables have no other escapes than \" and \\ here
      out += text_[at_];
    }
    expect('"');
    return out;
  }
  std::vector<int64_t> numbers() {
    expect('[');
    std::vector<int64_t> out;
    while (at_ < text_.size() && text_[at_] != ']') {
      size_t used = 0;
      out.push_back(std::stoll(text_.substr(at_, 24), &used));
      at_ += used;
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
    if (at_ >= text_.size() || text_[at_] != wanted) throw std::runtime_error("this is no safetensors file");
    ++at_;
  }

  std::string text_;
  size_t at_ = 0;
};

at::ScalarType type_named(const std::string& name) {
  if (name == "I64") return at::kLong;
  if (name == "F32") return at::kFloat;
  if (name == "F16") return at::kHalf;
  if (name == "BF16") return at::kBFloat16;
  if (name == "U8") return at::kByte;
  if (name == "I32") return at::kInt;
  throw std::runtime_error("a delta has no tensors of type " + name);
}

// What apply_delta takes.
c10::Dict<std::string, at::Tensor> read_delta(const std::string& path) {
  const std::vector<char> file = bytes_of(path);
  uint64_t length = 0;
  if (file.size() < sizeof(length)) throw std::runtime_error(path + " is no safetensors file");
  std::memcpy(&length, file.data(), sizeof(length));
  if (length > file.size() - sizeof(length)) throw std::runtime_error(path + " is no safetensors file");
  const char* data = file.data() + sizeof(length) + length;
  const int64_t data_bytes = static_cast<int64_t>(file.size() - sizeof(length) - length);
  Header header(std::string(file.data() + sizeof(length), length));
  c10::Dict<std::string, at::Tensor> tensors;
  while (!header.done()) {
    const std::string name = header.string();
    header.colon();
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
    at::Tensor tensor = at::empty(shape, type_named(type));
    const int64_t bytes = static_cast<int64_t>(tensor.nbytes());
    if (range.size() != 2 || range[0] < 0 || range[1] - range[0] != bytes || range[1] > data_bytes) {
      throw std::runtime_error(path + " is damaged");
    }
    if (bytes > 0) std::memcpy(tensor.data_ptr(), data + range[0], bytes);
    tensors.insert(name, tensor);
  }
  return tensors;
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
  auto served = std::make_shared<torch::jit::Module>(torch::jit::load(files[0]));
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
  std::ofstream(files[2], std::ios::binary).write(output.data(), static_cast<std::streamsize>(output.size()));
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
