#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace recstore {

// The code of a user-defined optimizer: RowOptimizer in torchrec_recstore/optim.py.
struct RowCode {
  std::string name;
  std::vector<std::string> states;           // their names; element-wise states come first
  int64_t element_states;                    // number of them
  std::vector<std::string> hyperparameters;  // their names
  std::vector<std::string> once_names;
  std::vector<std::string> once_expressions;  // one for each name
  std::string row;                            // the statements of a row
  std::string step;                           // the statements of an element
};

// Compiles the code with $CXX (default: g++) for the instruction set of row_loops(), unless a process has done so
// before. Returns the path of the library, which is kept in $XDG_CACHE_HOME/torchrec_recstore (default:
// ~/.cache/torchrec_recstore). Throws InvalidArgument, with the first error of the compiler.
std::string compile_row_code(const RowCode& code);

}  // namespace recstore
