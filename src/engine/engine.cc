#include "engine/engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "engine/engine_impl.h"

namespace replayssm {
namespace {

// What the engine works with: 0 replaced by the model's own limit.
int64_t model_limit(const ModelConfig& config, const EngineOptions& options) {
  const int64_t own = config.max_positions > 0 ? config.max_positions
                                               : int64_t{std::numeric_limits<int32_t>::max()};
  if (options.max_model_len < 0 || options.max_model_len > own) {
    fail("max_model_len: expected at most ", own, ", the model's own limit, got ",
         options.max_model_len);
  }
  return options.max_model_len == 0 ? own : options.max_model_len;
}

}  // namespace

EngineOptions checked(EngineOptions options, const Model& model) {
  const ModelConfig& config = model.config();
  if (options.max_num_seqs < 1 || options.max_num_seqs > std::numeric_limits<int32_t>::max()) {
    fail("max_num_seqs: expected at least 1, got ", options.max_num_seqs);
  }
  if (options.max_num_batched_tokens < options.max_num_seqs) {
    fail("max_num_batched_tokens: expected at least max_num_seqs = ", options.max_num_seqs,
         ", got ", options.max_num_batched_tokens);
  }
  if (options.read_dtype) check_read_copy(*options.read_dtype, options.state_dtype, options.route);
  options.max_model_len = model_limit(config, options);
  options.ring.conv_kernel = static_cast<int32_t>(config.conv_kernel);
  if (!options.speculative) return options;
  check_speculation(options, model);
  options.ring.max_window = static_cast<int32_t>(options.speculative->max_window());
  // The baseline stores states itself and keeps nothing in rings.
  if (options.speculative->snapshots) {
    options.route = Route::kConventional;
    options.read_dtype = {};
  }
  return options;
}

// Takes what passes need, then divides what is left.
MemoryPlan reserve_and_plan(Model& model, const EngineOptions& options) {
  const int64_t windows = options.max_num_seqs * options.ring.max_window;
  model.reserve({.tokens = options.max_num_batched_tokens + windows - options.max_num_seqs,
                 .sequences = options.max_num_seqs,
                 .logits = windows,
                 .context = options.max_model_len,
                 .window = options.ring.max_window});
  return plan_memory(model, options);
}

void Engine::Impl::check(const Request& request) const {
  const auto length = static_cast<int64_t>(request.prompt.size());
  const int64_t vocab = model.config().vocab_size;
  if (length == 0) fail("prompt: expected at least one token, got none");
  for (int64_t i = 0; i < length; ++i) {
    const int32_t id = request.prompt[i];
    if (id < 0 || id >= vocab) {
      fail("prompt: token id ", id, " at position ", i, ", expected 0 to ", vocab - 1);
    }
  }
  if (request.max_tokens < 1) fail("max_tokens: expected at least 1, got ", request.max_tokens);
  const int64_t limit = options.max_model_len;
  if (length >= limit) {
    fail("prompt: ", length, " tokens, expected at most ", limit - 1,
         ": prompt and output share a context of ", limit);
  }
  const int64_t most = length + std::min(request.max_tokens, limit - length);
  if (paged && KvPool::blocks_for(most) > kv.blocks()) {
    fail("prompt: ", most, " tokens of prompt and output, but the KV pool holds ",
         kv.blocks() * KvPool::kBlockSize);
  }
  validate(request.sampling);
  validate_stop_strings(request.stop);
  if (!tokenizer && !request.stop.empty()) fail("stop: stop strings need a tokenizer");
}

Engine::Engine(Model& model, const Tokenizer* tokenizer, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(model, tokenizer, options)) {}

Engine::~Engine() = default;

int64_t Engine::add(Request request) {
  impl_->check(request);
  auto sequence = std::make_unique<Sequence>();
  sequence->id = impl_->next_id++;
  sequence->sampling = request.sampling;
  sequence->prompt_len = static_cast<int64_t>(request.prompt.size());
  const int64_t room = impl_->options.max_model_len - sequence->prompt_len;
  sequence->rule = {.stop_ids = std::move(request.stop_ids),
                    .max_tokens = std::min(request.max_tokens, room)};
  if (!request.ignore_eos) {
    const auto& eos = impl_->model.config().eos_ids;
    sequence->rule.stop_ids.insert(sequence->rule.stop_ids.end(), eos.begin(), eos.end());
  }
  if (impl_->tokenizer) sequence->text.emplace(*impl_->tokenizer, std::move(request.stop));
  sequence->tokens = std::move(request.prompt);
  const int64_t id = sequence->id;
  impl_->scheduler.add(std::move(sequence));
  return id;
}

void Engine::cancel(int64_t request) {
  impl_->scheduler.remove(request);
  if (impl_->speculation) impl_->speculation->forget(request);
}
bool Engine::idle() const { return impl_->scheduler.idle(); }
std::vector<RequestOutput> Engine::step() { return impl_->step(); }
int64_t Engine::max_model_len() const { return impl_->options.max_model_len; }
const EngineStats& Engine::stats() const { return impl_->stats; }
const SlotPool& Engine::slots() const { return impl_->slots; }
const KvPool& Engine::kv() const { return impl_->kv; }
const MemoryPlan& Engine::memory_plan() const { return impl_->plan; }

}  // namespace replayssm
