// Continuous batching: requests in, tokens out. Owns the slot pool and the KV pool of one model.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/kv_pool.h"
#include "engine/sampler.h"
#include "engine/slot_pool.h"
#include "model/model.h"
#include "model/tokenizer.h"

namespace replayssm {

struct EngineOptions {
  Route route = Route::kOutputOnly;
  RingConfig ring;
  DType state_dtype = DType::kFloat32;
  int64_t max_num_seqs = 8;              // sequences decoded together
  int64_t max_num_batched_tokens = 512;  // tokens of one step; long prompts are cut into chunks
  int64_t max_model_len = 0;             // prompt + output; 0 = the model's own limit
};

struct Request {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  int64_t max_tokens = 16;
  bool ignore_eos = false;
  std::vector<int32_t> stop_ids;
  std::vector<std::string> stop;  // the text is cut before the first of these
};

enum class FinishReason : uint8_t { kNone, kStop, kLength };

// What a step produced for one request.
struct RequestOutput {
  int64_t request = 0;
  SampledToken token;
  std::string text;  // newly final text; never half a character, never part of a stop string
  FinishReason finish = FinishReason::kNone;
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

  // Runs one forward pass over whatever can run, and returns the tokens it made.
  std::vector<RequestOutput> step();

  int64_t max_model_len() const;
  const SlotPool& slots() const;
  const KvPool& kv() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace replayssm
