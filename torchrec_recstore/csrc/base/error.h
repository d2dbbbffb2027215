#pragma once

#include <stdexcept>
#include <string>

namespace recstore {

// Memory cannot be allocated. ops.py recognises the prefix and raises MemoryError.
class OutOfMemory : public std::runtime_error {
 public:
  explicit OutOfMemory(const std::string& what) : std::runtime_error("recstore out of memory: " + what) {}
};

// An argument is invalid. ops.py recognises the prefix and raises ValueError.
class InvalidArgument : public std::runtime_error {
 public:
  explicit InvalidArgument(const std::string& what) : std::runtime_error("recstore invalid argument: " + what) {}
};

// A file cannot be read or written. store/ssd_store.py recognises the prefix and raises ColdStoreError.
class StorageError : public std::runtime_error {
 public:
  explicit StorageError(const std::string& what) : std::runtime_error("recstore storage: " + what) {}
};

}  // namespace recstore
