// Has allocations of the native extension fail. Preloaded by test_all_or_nothing.py.

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> count{0};
std::atomic<long> first_failing{-1};  // from this allocation on, all fail; -1: none is looked at
uintptr_t library_begin = 0, library_end = 0;

int find_library(dl_phdr_info* info, size_t, void*) {
  if (std::strstr(info->dlpi_name, "torchrec_recstore/_C") == nullptr) return 0;
  library_begin = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const uintptr_t end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type == PT_LOAD && end > library_end) library_end = end;
  }
  return 1;
}

// caller: where the allocation was asked for.
bool fails(void* caller) {
  const long first = first_failing.load(std::memory_order_relaxed);
  const auto address = reinterpret_cast<uintptr_t>(caller);
  if (first < 0 || address < library_begin || address >= library_end) return false;
  return count.fetch_add(1) >= first;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {
long fail_from(long first) {  // returns how many allocations there were since the last call
  if (library_end == 0) dl_iterate_phdr(find_library, nullptr);
  if (library_end == 0) std::abort();
  first_failing = first;
  return count.exchange(0);
}
void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
  static auto* real = next<void*(void*, size_t, int, int, int, off_t)>("mmap");
  return fails(__builtin_return_address(0)) ? MAP_FAILED : real(address, bytes, protection, flags, file, offset);
}
void* mremap(void* from, size_t old_bytes, size_t bytes, int flags, ...) {
  static auto* real = next<void*(void*, size_t, size_t, int, ...)>("mremap");
  va_list arguments;
  va_start(arguments, flags);
  void* to = va_arg(arguments, void*);
  va_end(arguments);
  return fails(__builtin_return_address(0)) ? MAP_FAILED : real(from, old_bytes, bytes, flags, to);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  static auto* real = next<void*(size_t, size_t)>("aligned_alloc");
  return fails(__builtin_return_address(0)) ? nullptr : real(alignment, bytes);
}
}

void* operator new(std::size_t bytes) {
  void* memory = fails(__builtin_return_address(0)) ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return fails(__builtin_return_address(0)) ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}
