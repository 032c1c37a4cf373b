// What several commands ask for; every default of the command line is here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/sampler.h"
#include "engine/speculative_config.h"
#include "replayssm/types.h"

namespace replayssm::cli {

struct ModelOptions {
  std::string model;            // a local folder, or a bundled model's name
  std::string device = "auto";  // auto | cpu | cuda
  std::optional<DType> dtype;   // of activations, KV and ring; none = auto
  int threads = 0;              // 0 = one per available core
  bool dummy_weights = false;   // random ones; a bundled shape's name is a model too
  bool draft_head = false;      // the model's own drafter is loaded too
};

struct StateOptions {
  int32_t buffer_len = 16;
  std::optional<DType> state_dtype;  // none = what the model's files recommend
  std::optional<DType> read_dtype;   // of read copies; none = the state itself is read
};

struct RouteOptions {
  bool use_replayssm = true;
  Route replay_route = Route::kOutputOnly;

  bool asked = false;  // for it, in so many words
  Route route() const { return use_replayssm ? replay_route : Route::kConventional; }
};

struct SpeculationOptions {
  std::optional<SpeculativeConfig> config;
  std::optional<bool> use_replayssm_spec;  // none = drafts go through the ring
};

// The configuration with what other flags say about it. Throws Error where they contradict.
std::optional<SpeculativeConfig> speculation_of(const SpeculationOptions& options,
                                                const RouteOptions& route);

struct LimitOptions {
  int64_t max_num_seqs = 8;
  int64_t max_num_batched_tokens = 0;  // 0 = 512, or max_num_seqs where that is more
  int64_t max_model_len = 0;           // 0 = the model's own limit
  double gpu_memory_utilization = 0.9;

  int64_t batched_tokens() const {
    constexpr int64_t kDefault = 512;
    if (max_num_batched_tokens > 0) return max_num_batched_tokens;
    return max_num_seqs > kDefault ? max_num_seqs : kDefault;
  }
};

// How an engine decodes a model's sequences.
struct DecodingOptions {
  ModelOptions model;
  StateOptions state;
  RouteOptions route;
  LimitOptions limits;
  SpeculationOptions speculation;
};

}  // namespace replayssm::cli
