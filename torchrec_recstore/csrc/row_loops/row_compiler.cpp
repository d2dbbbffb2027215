#include "row_loops/row_compiler.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "row_loops/row_loops.h"

namespace recstore {
namespace {

namespace fs = std::filesystem;

// The flags of native_build.py that decide about bits. Two warnings find mistakes: a variable that hides another, and
// arithmetic of doubles.
constexpr const char* kFlags =
    " -std=c++17 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden -shared -fPIC "
    "-Werror=shadow "
    "-Werror=double-promotion";
constexpr const char* kFrame =
#include "row_loops/row_step.inl"
    ;
constexpr const char* kAvx512 = " -mavx512f -mavx512dq -mavx512vl -mavx512bw -mprefer-vector-width=512";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Two FNV-1a hashes of 64 bits, as hexadecimal digits.
std::string digest(const std::string& text) {
  std::array<char, 33> digits{};
  uint64_t one = 0xcbf29ce484222325u, other = 0x9e3779b97f4a7c15u;
  for (const char c : text) {
    one = (one ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    other = (other ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  std::snprintf(digits.data(), digits.size(), "%016llx%016llx", static_cast<unsigned long long>(one),
                static_cast<unsigned long long>(other));
  return digits.data();
}

std::string quoted(const std::string& path) {
  std::string out = "'";
  for (const char c : path) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// Words that are no names in the code: those of C++, and those of the frame.
constexpr const char* kTaken =
    " alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl const "
    "const_cast constexpr continue decltype default delete do double dynamic_cast else enum explicit export extern "
    "false float "
    "for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private "
    "protected "
    "public register reinterpret_cast return short signed sizeof static static_assert static_cast struct switch "
    "template this "
    "thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor "
    "xor_eq "
    "w g lr t columns row_sum abs cos exp floor log max min pow sin sqrt tanh X ELEMENTS ROW_STATES HYPERPARAMETERS "
    "ONCE ";

bool starts_with(const std::string& text, const char* begin) { return text.rfind(begin, 0) == 0; }

// Throws InvalidArgument if two names are equal, or a name cannot be one.
void check_names(const RowCode& code) {
  std::vector<std::string> names{code.name};
  names.insert(names.end(), code.states.begin(), code.states.end());
  names.insert(names.end(), code.hyperparameters.begin(), code.hyperparameters.end());
  names.insert(names.end(), code.once_names.begin(), code.once_names.end());
  for (const std::string& name : names) {
    const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
    const auto fits = [&](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '_'; };
    const bool is_name = !name.empty() && is_letter(name[0]) && std::all_of(name.begin(), name.end(), fits);
    if (!is_name || starts_with(name, "recstore") || std::string(kTaken).find(" " + name + " ") != std::string::npos) {
      throw InvalidArgument("RowOptimizer '" + code.name + "': '" + name +
                            "' is no name in C++, or has a meaning in the code");
    }
    if (std::count(names.begin(), names.end(), name) > 1) {
      throw InvalidArgument("RowOptimizer '" + code.name + "': the name '" + name + "' is there twice");
    }
  }
}

// Whether a state is a sum or an average of squares: is_square() in torchrec_recstore/optim.py.
bool is_square(const std::string& name) {
  for (const char* each : {"sum", "square_avg", "acc_delta", "accumulator"}) {
    if (name == each) return true;
  }
  return name.size() >= 3 && name.compare(name.size() - 3, 3, "_sq") == 0;
}

// The definitions of the lists of the frame.
std::string lists(const RowCode& code) {
  std::string once = "#define ONCE(X)", elements = "\n#define ELEMENTS(X)", row_states = "\n#define ROW_STATES(X)";
  std::string hyperparameters = "\n#define HYPERPARAMETERS(X)";
  for (size_t i = 0; i < code.once_names.size(); ++i) {
    once += " X(" + code.once_names[i] + ", " + code.once_expressions[i] + ")";
  }
  for (size_t i = 0; i < code.states.size(); ++i) {
    auto& list = static_cast<int64_t>(i) < code.element_states ? elements : row_states;
    list += " X(" + code.states[i] + ", " + (is_square(code.states[i]) ? "1" : "0") + ")";
  }
  for (const std::string& name : code.hyperparameters) hyperparameters += " X(" + name + ", 0)";
  std::replace(once.begin(), once.end(), '\n', ' ');
  return once + elements + row_states + hyperparameters;
}

// Replaces a word of the frame. The errors of the compiler name `file` and the line in it.
void replace(std::string& source, const std::string& word, const std::string& file, const std::string& text) {
  source.replace(source.find(word), word.size(), "#line 1 \"" + file + "\"\n" + text);
}

// The processes that compile wait for each other. The kernel gives the lock back when a process ends.
class FileLock {
 public:
  explicit FileLock(const fs::path& path) : file_(open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600)) {
    int failed = file_ < 0;
    while (!failed && flock(file_, LOCK_EX) != 0) failed = errno != EINTR;
    if (failed) throw InvalidArgument("cannot lock " + path.string() + ": " + std::strerror(errno));
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() { close(file_); }

 private:
  int file_;
};

// Throws InvalidArgument if another user may change what is in a folder, or has made it: the libraries in it are code
// that runs in this process. A folder of the path that all users may write has the sticky bit, as /tmp has.
void check_folder(const fs::path& folder) {
  struct stat of_root{};
  if (::stat("/", &of_root) != 0) throw InvalidArgument(std::string("/ cannot be read: ") + std::strerror(errno));
  for (fs::path part = folder;; part = part.parent_path()) {
    struct stat status{};
    if (::lstat(part.c_str(), &status) != 0) {
      throw InvalidArgument(part.string() + " cannot be read: " + std::strerror(errno));
    }
    const bool is_own =
        status.st_uid == ::geteuid() || (part != folder && (status.st_uid == 0 || status.st_uid == of_root.st_uid));
    const mode_t others = part == folder ? S_IWGRP | S_IWOTH : S_IWOTH;
    const bool is_open = (status.st_mode & others) != 0 && (part == folder || (status.st_mode & S_ISVTX) == 0);
    if (!S_ISDIR(status.st_mode) || !is_own || is_open) {
      throw InvalidArgument(part.string() +
                            " can be changed by another user, and libraries below it run in this process: set "
                            "XDG_CACHE_HOME to a folder that only user " +
                            std::to_string(::geteuid()) +
                            " may write, or "
                            "RECSTORE_TRUST_CACHE=1 if you trust all who may write there");
    }
    if (part == part.parent_path()) return;
  }
}

// Returns whether the library exists, and no other user has written it, for example before the folder was closed to
// others.
bool is_own_library(const fs::path& library) {
  struct stat status{};
  if (::lstat(library.c_str(), &status) != 0) return false;
  return S_ISREG(status.st_mode) && status.st_uid == ::geteuid() && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Creates the folder of the libraries, which other users may neither read nor write.
fs::path library_folder(const fs::path& cache) {
  fs::create_directories(cache);
  const fs::path folder = fs::canonical(cache) / "torchrec_recstore";
  if (::mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    throw InvalidArgument(folder.string() + " cannot be created: " + std::strerror(errno));
  }
  struct stat status{};
  const bool is_own = ::lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == ::geteuid();
  if (is_own && (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) fs::permissions(folder, fs::perms::owner_all);
  // The folders of a container may be open to all, and have one user.
  if (variable("RECSTORE_TRUST_CACHE") != "1") check_folder(folder);
  return folder;
}

// Runs a command, and returns its output and its exit status.
std::pair<std::string, int> run(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) throw InvalidArgument(std::string("cannot start a shell: ") + std::strerror(errno));
  std::string output;
  std::array<char, 4096> part;
  while (const size_t n = std::fread(part.data(), 1, part.size(), pipe)) output.append(part.data(), n);
  return {output, pclose(pipe)};
}

void compile(const std::string& name, const std::string& compiler, const std::string& source, const fs::path& library) {
  const fs::path folder = library.string() + ".made";  // only the process that holds the lock uses it
  fs::create_directories(folder);
  std::ofstream(folder / "source.cpp") << source;
  const fs::path made = folder / "library.so";
  const auto [output, status] =
      run("LC_ALL=C " + compiler + " " + quoted(folder / "source.cpp") + " -o " + quoted(made) + " 2>&1");
  if (status == 0) {
    fs::permissions(made, fs::perms::owner_all);  // the compiler leaves it open to the group if the umask is 002
    fs::rename(made, library);                    // at once: no process loads a part of it
  }
  fs::remove_all(folder);
  if (status == 0) return;
  const std::string who = "RowOptimizer '" + name + "' ";
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    throw InvalidArgument(who +
                          "needs a C++ compiler: install g++, or set CXX: " + output.substr(0, output.find('\n')));
  }
  size_t begin = output.find("error:");
  begin = begin == std::string::npos ? 0 : output.rfind('\n', begin) + 1;
  throw InvalidArgument(who + "does not compile: " + output.substr(begin, output.find('\n', begin) - begin));
}

}  // namespace

std::string compile_row_code(const RowCode& code) try {
  if (code.step.empty()) {
    throw InvalidArgument("RowOptimizer '" + code.name +
                          "' has no step: files do not contain the code of an optimizer");
  }
  check_names(code);
  std::string source = kFrame;
  replace(source, "@LISTS@", "once", lists(code));
  replace(source, "@ROW@", "row", code.row);
  replace(source, "@STEP@", "step", code.step);
  const std::string isa = row_loops().name, cxx = variable("CXX"), cache = variable("XDG_CACHE_HOME"),
                    home = variable("HOME");
  std::string compiler = (cxx.empty() ? "g++" : cxx) + kFlags;
  if (isa == "avx2") compiler += " -mavx2";
  if (isa == "avx512") compiler += kAvx512;
#if defined(__aarch64__)
  const std::string processor = " aarch64 ";
#else
  const std::string processor = " x86_64 ";
#endif
  if (cache.empty() && home.empty()) {
    throw InvalidArgument("a RowOptimizer needs HOME or XDG_CACHE_HOME for its library");
  }
  const fs::path folder = library_folder(cache.empty() ? fs::path(home) / ".cache" : fs::path(cache));
  const fs::path library = folder / (code.name + "-" + digest(compiler + processor + source) + ".so");
  if (is_own_library(library)) return library.string();
  const FileLock lock(folder / "lock");
  // Another process has not done so meanwhile.
  if (!is_own_library(library)) compile(code.name, compiler, source, library);
  return library.string();
} catch (const std::system_error& error) {
  throw InvalidArgument("RowOptimizer '" + code.name + "' cannot be compiled: " + error.what());
}

}  // namespace recstore
