// The one exception type of the project.
#pragma once

#include <stdexcept>

namespace replayssm {

// what() is one line: what is wrong, where (file, flag or argument), what was expected, what was
// got.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace replayssm
