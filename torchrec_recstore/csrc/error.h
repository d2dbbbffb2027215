#pragma once

#include <stdexcept>
#include <string>

namespace recstore {

// Memory could not be had. ops.py turns the prefix into a MemoryError.
class OutOfMemory : public std::runtime_error {
 public:
  explicit OutOfMemory(const std::string& what) : std::runtime_error("recstore out of memory: " + what) {}
};

// A caller's argument breaks the contract. ops.py turns the prefix into a ValueError.
class InvalidArgument : public std::runtime_error {
 public:
  explicit InvalidArgument(const std::string& what) : std::runtime_error("recstore invalid argument: " + what) {}
};

}  // namespace recstore
