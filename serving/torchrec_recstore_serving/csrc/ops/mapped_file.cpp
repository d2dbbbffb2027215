#include "mapped_file.h"

#include <caffe2/serialize/inline_container.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"

namespace recstore {

class MappedFile {
 public:
  // Null if the descriptor is not that of a zip file with the record.
  static std::shared_ptr<const MappedFile> with_record(const std::string& descriptor, const std::string& record) {
    auto file = std::shared_ptr<MappedFile>(new MappedFile());
    file->descriptor_ = open(descriptor.c_str(), O_RDONLY | O_CLOEXEC);
    char begin[4];
    if (file->descriptor_ < 0 || fstat(file->descriptor_, &file->about_) != 0) return nullptr;
    if (pread(file->descriptor_, begin, sizeof(begin), 0) != sizeof(begin) ||
        std::memcmp(begin, "PK\3\4", sizeof(begin)) != 0) {
      return nullptr;
    }
    try {
      file->zip_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>("/proc/self/fd/" +
                                                                            std::to_string(file->descriptor_));
    } catch (const std::exception&) {  // It is another zip file.
      return nullptr;
    }
    if (!file->zip_->hasRecord(record)) return nullptr;
    void* data = mmap(nullptr, file->bytes(), PROT_READ, MAP_SHARED, file->descriptor_, 0);
    if (data == MAP_FAILED) {
      throw OutOfMemory("cannot map " + std::to_string(file->bytes()) + " bytes: " + std::strerror(errno));
    }
    file->data_ = static_cast<char*>(data);
    // Ids are random, so a page that is read from the disk should not bring its neighbours.
    madvise(data, file->bytes(), MADV_RANDOM);
    return file;
  }
  ~MappedFile() {
    if (data_ != nullptr) munmap(data_, bytes());
    if (descriptor_ >= 0) close(descriptor_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  size_t bytes() const { return static_cast<size_t>(about_.st_size); }
  bool is_unchanged() const {
    struct stat now{};
    return fstat(descriptor_, &now) == 0 && now.st_size == about_.st_size &&
           now.st_mtim.tv_sec == about_.st_mtim.tv_sec && now.st_mtim.tv_nsec == about_.st_mtim.tv_nsec;
  }
  bool has(const std::string& record) const { return zip_->hasRecord(record); }
  static MappedRecord record_of(const std::shared_ptr<const MappedFile>& file, const std::string& name) {
    const size_t at = file->zip_->getRecordOffset(name), size = file->zip_->getRecordSize(name);
    if (at > file->bytes() || size > file->bytes() - at) {
      throw InvalidArgument("the file of the model is damaged: its rows are not all there");
    }
    return {file->data_ + at, static_cast<int64_t>(size), file};
  }

 private:
  MappedFile() = default;

  int descriptor_ = -1;
  struct stat about_{};
  char* data_ = nullptr;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> zip_;
};

namespace {

// The regular files that this process has open, as paths of /proc, which open the same file even if it has been
// renamed.
std::vector<std::string> open_files() {
  std::vector<std::string> found;
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return found;
  while (const dirent* entry = readdir(folder)) {
    struct stat about{};
    if (fstatat(dirfd(folder), entry->d_name, &about, 0) == 0 && S_ISREG(about.st_mode)) {
      found.push_back(std::string("/proc/self/fd/") + entry->d_name);
    }
  }
  closedir(folder);
  return found;
}

}  // namespace

MappedRecord MappedRecord::named(const std::string& name) {
  // The tables of a model share one mapping of its file, and so do models that are loaded from one file.
  static std::mutex mutex;
  static std::vector<std::weak_ptr<const MappedFile>> mapped;
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t m = mapped.size(); m-- > 0;) {
    const auto file = mapped[m].lock();
    if (file == nullptr) mapped.erase(mapped.begin() + static_cast<int64_t>(m));
    if (file != nullptr && file->has(name) && file->is_unchanged()) return MappedFile::record_of(file, name);
  }
  for (const std::string& path : open_files()) {
    const auto file = MappedFile::with_record(path, name);
    if (file == nullptr) continue;
    mapped.push_back(file);
    return MappedFile::record_of(file, name);
  }
  throw InvalidArgument(
      "the model maps its rows from its file: load it by the path of the file, and not from memory or a stream");
}

void check_unchanged(const MappedFile& file) {
  if (!file.is_unchanged()) {
    throw InvalidArgument(
        "the file of the model has been written since it was loaded: load it again, and replace such a file by "
        "renaming");
  }
}

}  // namespace recstore
