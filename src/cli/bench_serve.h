// replayssm bench serve: load on a running server.
#pragma once

#include <cstdint>
#include <string>

namespace replayssm::cli {

struct BenchServeOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;
  std::string api_key;
  int64_t requests = 128;
  int64_t concurrency = 32;  // requests under way at once, at most
  double rate = 0;           // requests a second, arriving at random; 0 = as they can
  std::string dataset;       // a file of JSON lines {"prompt": ..., "max_tokens": ...}
  int64_t prompt_len = 32;   // synthetic requests: tokens
  int64_t shared_len = 0;    // of them the same in all prompts
  int64_t output_len = 128;
  bool stream = true;
  uint64_t seed = 0;
  double goodput_ttft_ms = 0, goodput_tpot_ms = 0;  // 0 = any
  bool json = false;
};

void bench_serve(const BenchServeOptions& options);

}  // namespace replayssm::cli
