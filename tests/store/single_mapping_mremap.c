// mremap as Linux had it before 6.17: a call moves pages of one mapping, or fails with EFAULT.
// Preloaded by test_table.py.

#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int lies_in_one_mapping(unsigned long begin, unsigned long end) {
  FILE* maps = fopen("/proc/self/maps", "r");
  char line[512];
  unsigned long from, to;
  int found = 0;
  while (fgets(line, sizeof(line), maps)) {
    if (sscanf(line, "%lx-%lx", &from, &to) == 2 && from <= begin && begin < to) found = end <= to;
  }
  fclose(maps);
  return found;
}

void* mremap(void* old, size_t old_size, size_t new_size, int flags, ...) {
  void* target = NULL;
  if (flags & MREMAP_FIXED) {
    va_list arguments;
    va_start(arguments, flags);
    target = va_arg(arguments, void*);
    va_end(arguments);
  }
  if (!lies_in_one_mapping((unsigned long)old, (unsigned long)old + old_size)) {
    errno = EFAULT;
    return MAP_FAILED;
  }
  return (void*)syscall(SYS_mremap, old, old_size, new_size, flags, target);
}
