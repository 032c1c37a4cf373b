// Continuous batching: requests in, tokens out. Owns the slot pool and the KV pool of one model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/constraint.h"
#include "engine/kv_pool.h"
#include "engine/prefix_cache.h"
#include "engine/sampler.h"
#include "engine/slot_pool.h"
#include "engine/speculative_config.h"
#include "model/model.h"
#include "model/tokenizer.h"

namespace replayssm {

struct EngineOptions {
  Route route = Route::kOutputOnly;
  RingConfig ring{};
  DType state_dtype = DType::kFloat32;
  std::optional<DType> read_dtype{};     // of read copies of the state; none = none are kept
  int64_t max_num_seqs = 8;              // sequences decoded together
  int64_t max_num_batched_tokens = 512;  // tokens of one step; long prompts are cut into chunks
  int64_t max_model_len = 0;             // prompt + output; 0 = the model's own limit
  int64_t kv_blocks = 0;  // of KvPool::kBlockSize tokens; 0 = all sequences can be full, or as
                          // many as fit a device
  double memory_utilization = 0.9;  // of a device's memory
  int64_t prefix_cache_bytes = 0;   // for states of prompts' prefixes; 0 = prefixes are not kept
  int64_t prefix_interval = 256;    // tokens between them, a multiple of kPrefillChunk
  int64_t swap_bytes = 0;           // on the host, for states of preempted requests
  std::optional<SpeculativeConfig> speculative{};
  Model* draft_model = nullptr;  // of method draft_model; on the same device
};

// States kept besides the checkpoint: as many as a window has tokens, of the baseline.
inline int64_t snapshots_of(const EngineOptions& options) {
  return options.speculative && options.speculative->snapshots ? options.speculative->max_window()
                                                               : 0;
}

// The other model that drafts; null where none does.
inline Model* drafting_model(const EngineOptions& options) {
  return options.speculative && options.speculative->method == DraftMethod::kDraftModel
             ? options.draft_model
             : nullptr;
}

struct MemoryPlan;  // engine/memory_plan.h

struct Request {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  int64_t max_tokens = 16;
  bool ignore_eos = false;
  std::vector<int32_t> stop_ids;
  std::vector<std::string> stop;                  // the text is cut before the first of these
  int64_t priority = 0;                           // the smaller, the sooner
  std::shared_ptr<TokenConstraint> constraint{};  // of its own; null = any token may come
};

enum class FinishReason : uint8_t { kNone, kStop, kLength };

// What a step produced for one request.
struct RequestOutput {
  int64_t request = 0;
  SampledToken token{};
  std::string text{};  // newly final text; never half a character, never part of a stop string
  FinishReason finish = FinishReason::kNone;
  int64_t cached_tokens = 0;  // of the prompt, whose states were there already
};

// Of speculative decoding; sums.
struct SpeculationStats {
  int64_t windows = 0;         // of decoding sequences, drafted or not
  int64_t drafted_tokens = 0;  // that were verified
  int64_t kept_tokens = 0;     // by all windows: what the windows have put out
  // [depth] of paths of drafts that reached it: how many, and how many were accepted that far.
  std::vector<int64_t> proposed{}, accepted{};
  double verify_seconds = 0;  // passes and the choice of tokens
  double commit_seconds = 0;
  double draft_seconds = 0;

  double mean_length() const {
    return windows > 0 ? static_cast<double>(kept_tokens) / static_cast<double>(windows) : 0;
  }
  // Of the drafts that reached a depth, those accepted that far; up to the deepest that any did.
  std::vector<double> accepted_shares() const {
    std::vector<double> shares;
    for (size_t i = 0; i < proposed.size() && proposed[i] > 0; ++i)
      shares.push_back(static_cast<double>(accepted[i]) / static_cast<double>(proposed[i]));
    return shares;
  }
};

// Sums since the engine was made.
struct EngineStats {
  int64_t steps = 0;
  int64_t prefill_tokens = 0;  // computed again after a preemption: counted again
  int64_t decode_tokens = 0;
  int64_t preemptions = 0;
  int64_t swaps = 0;  // preemptions whose states went to the host
  int64_t cached_tokens = 0;
  int64_t folds = 0;  // of rings into checkpoints
  PrefixCache::Stats prefixes{};
  SpeculationStats speculation{};
};

// A running request, for those who look on.
struct RunningRequest {
  int64_t id = 0;
  int64_t prompt_tokens = 0, tokens = 0, computed = 0;
  bool prefilling = false;
  int32_t slot = -1;
  Cursor cursor{};
};

class Engine {
 public:
  // `tokenizer` may be null: outputs then carry ids only, and stop strings are refused.
  Engine(Model& model, const Tokenizer* tokenizer, const EngineOptions& options);
  ~Engine();

  // Queues a request; returns its id. Throws Error for a prompt that is empty or does not fit.
  int64_t add(Request request);
  void cancel(int64_t request);  // unknown or finished ids are ignored
  bool idle() const;
  bool contains(int64_t request) const;
  // Throws what add() would. May be called while another thread steps.
  void check(const Request& request) const;

  Route route() const;
  // Requests that run begin again with their output as part of their prompt.
  void set_route(Route route);
  int64_t running() const;
  int64_t waiting() const;
  std::vector<RunningRequest> running_requests() const;

  // Runs one forward pass over whatever can run, and returns the tokens it made. When the forward
  // pass throws, every request is as before the step; when a request's logits are no numbers, the
  // step throws Error, that request is gone and the others are as before.
  std::vector<RequestOutput> step();

  int64_t max_model_len() const;
  EngineStats stats() const;
  const SlotPool& slots() const;
  const KvPool& kv() const;
  const MemoryPlan& memory_plan() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm
