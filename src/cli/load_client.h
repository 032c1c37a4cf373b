// Many HTTP requests at once from one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace replayssm::cli {

struct LoadTarget {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;
  std::string api_key;
};

// One request and what became of it. Times in seconds since the load began.
struct LoadRequest {
  std::string body;                   // of a POST to /v1/completions
  double due = 0;                     // not sent before
  double sent = 0;                    // filled in from here on
  double first = 0;                   // the first token
  double last = 0;                    // the end
  std::vector<double> token_times{};  // of streamed answers
  int64_t output_tokens = 0;
  int64_t cached_tokens = 0;
  std::string error{};
};

// The answer of a GET. Throws Error.
std::string fetch(const LoadTarget& target, const std::string& path);

// Sends all of them, at most `concurrency` at once, each when it is due. Returns the seconds it
// took.
double run_load(const LoadTarget& target, std::vector<LoadRequest>& requests, int64_t concurrency);

}  // namespace replayssm::cli
