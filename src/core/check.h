// Throwing errors: `fail` for what a user got wrong, REPLAYSSM_CHECK for a broken contract in code.
#pragma once

#include <source_location>
#include <sstream>
#include <string>

#include "replayssm/error.h"

namespace replayssm {

// The arguments streamed one after another.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

// Throws Error with the arguments streamed one after another.
template <class... Args>
[[noreturn]] void fail(const Args&... args) {
  throw Error(concat(args...));
}

namespace detail {

std::string describe(const char* expression, const std::source_location& where);

}  // namespace detail
}  // namespace replayssm

// Checks a precondition of a function: the message names the condition, its place and the values.
#define REPLAYSSM_CHECK(condition, ...)                                                     \
  do {                                                                                      \
    if (!(condition)) [[unlikely]]                                                          \
      ::replayssm::fail(                                                                    \
          ::replayssm::detail::describe(#condition, std::source_location::current()), ": ", \
          __VA_ARGS__);                                                                     \
  } while (0)
