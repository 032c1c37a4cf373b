// How a device's memory is divided before the first step.
#pragma once

#include <cstdint>
#include <string>

#include "engine/engine.h"

namespace replayssm {

// Bytes. Where the memory has no limit, `limit` and `used` are 0.
struct MemoryPlan {
  int64_t total = 0;  // of the device
  int64_t limit = 0;  // of it may be used
  int64_t used = 0;   // already: weights, workspaces, other programs
  int64_t weights = 0;
  int64_t slots = 0, slot_bytes = 0;
  int64_t prefixes = 0;  // states of prompts' prefixes
  int64_t kv_blocks = 0, kv_block_bytes = 0;
  int64_t kv_tokens = 0;
  int64_t draft_weights = 0;  // of a draft model, like what follows
  int64_t draft_states = 0;
  int64_t draft_kv_blocks = 0, draft_kv_block_bytes = 0;
};

// `options` with nothing left to the model. Throws Error with the numbers where states and caches
// do not fit into what the model's weights and workspaces leave.
MemoryPlan plan_memory(Model& model, const EngineOptions& options);

// One line.
std::string to_string(const MemoryPlan& plan);

}  // namespace replayssm
