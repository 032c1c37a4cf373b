// replayssm serve: the OpenAI-compatible server.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/options.h"

namespace replayssm::cli {

struct ServeOptions : DecodingOptions {
  ServeOptions() { limits.max_num_seqs = 32; }

  std::string host = "127.0.0.1";
  uint16_t port = 8000;
  std::string served_name;  // none: the model's
  std::vector<std::string> api_keys;
  std::vector<std::string> allowed_origins;
  int64_t max_waiting = 1024;
  int64_t max_body_mib = 8;
  int64_t max_connections = 4096;
  double request_timeout = 600, drain_timeout = 30;  // seconds
  bool prefix_caching = true;
  double prefix_cache_gib = 1, swap_gib = 1;
  int64_t prefix_interval = 256;
  int64_t kv_blocks = 0;  // 0 = as memory allows
};

void serve(const ServeOptions& options);

}  // namespace replayssm::cli
