#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace recstore {

class MappedFile;

// A record of a model's file, which is a zip file. The file is mapped for reading, so that all processes share its
// pages.
struct MappedRecord {
  const char* data = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<const MappedFile> file;  // keeps the memory

  // Finds the record in one of the files that this process has open: torch does not tell the path of the file that it
  // loads, but it has the file open. The name is random in part, so that no other file has it. Throws InvalidArgument.
  static MappedRecord named(const std::string& name);
};

// Throws InvalidArgument if the file has been written since it was mapped: pages that it does not have any more would
// end the process with SIGBUS, and other pages would have other rows.
void check_unchanged(const MappedFile& file);

}  // namespace recstore
