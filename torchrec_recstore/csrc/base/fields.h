#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"

namespace recstore {

// The named fields of an op's argument. Python and C++ both know a field by its name, so that neither depends on an
// order of numbers, and a field that one of them lacks is an error.
template <class T>
class Fields {
 public:
  // Throws InvalidArgument if there is not a value for each name, or a name is there twice.
  Fields(const std::vector<std::string>& names, const std::vector<T>& values) {
    if (names.size() != values.size()) throw InvalidArgument("there must be a value for the name of each field");
    for (size_t i = 0; i < names.size(); ++i) {
      const bool is_new = values_.emplace(names[i], values[i]).second;
      if (!is_new) throw InvalidArgument("the field " + names[i] + " is there twice");
    }
  }

  // Returns the value of a field, which nobody can take again. Throws InvalidArgument if there is no such field.
  T take(const std::string& name) {
    const auto field = values_.find(name);
    if (field == values_.end()) throw InvalidArgument("the field " + name + " is missing");
    const T value = field->second;
    values_.erase(field);
    return value;
  }

  // Throws InvalidArgument if there is a field that nobody has taken, because this release does not know it.
  void check_all_taken() const {
    if (!values_.empty()) throw InvalidArgument("the field " + values_.begin()->first + " is unknown");
  }

 private:
  std::map<std::string, T> values_;
};

}  // namespace recstore
