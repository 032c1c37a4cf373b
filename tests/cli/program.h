// Runs the program under test as a user does.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>
#include <vector>

namespace replayssm::testing {

struct Result {
  int status = -1;
  std::string output;
};

inline std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

// Runs the program with nothing on standard input and no CUDA device, in a shell that redirects as
// told.
inline Result run(const std::vector<std::string>& arguments,
                  const std::string& redirections = "2>&1 </dev/null") {
  std::string command = "CUDA_VISIBLE_DEVICES= " + quoted(REPLAYSSM_PROGRAM);
  for (const std::string& argument : arguments) command += " " + quoted(argument);
  std::FILE* const pipe = popen((command + " " + redirections).c_str(), "r");
  if (!pipe) return {};
  Result result;
  std::array<char, 4096> piece;
  while (const size_t count = std::fread(piece.data(), 1, piece.size(), pipe)) {
    result.output.append(piece.data(), count);
  }
  const int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

}  // namespace replayssm::testing
