#pragma once

#include <cstddef>
#include <string>

namespace recstore {

// Bytes that this process can still touch before the machine, or one of its control groups (version 1 or 2), kills it.
// `root` stands before every path that is read: tests give a folder.
size_t available_memory(const std::string& root = "");

}  // namespace recstore
