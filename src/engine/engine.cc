#include "engine/engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "engine/engine_impl.h"
#include "engine/model_drafter.h"

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
  if (options.swap_bytes < 0) fail("swap_bytes: expected at least 0, got ", options.swap_bytes);
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
  if (Model* drafting = drafting_model(options)) drafting->reserve(ModelDrafter::limits(options));
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
  sequence->priority = request.priority;
  sequence->constraint = std::move(request.constraint);
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

void Engine::cancel(int64_t request) { impl_->remove(request); }
bool Engine::idle() const { return impl_->scheduler.idle(); }
bool Engine::contains(int64_t request) const { return impl_->scheduler.find(request) != nullptr; }
void Engine::check(const Request& request) const { impl_->check(request); }
std::vector<RequestOutput> Engine::step() { return impl_->step(); }
Route Engine::route() const { return impl_->options.route; }
int64_t Engine::running() const { return std::ssize(impl_->scheduler.running()); }
int64_t Engine::waiting() const { return impl_->scheduler.waiting(); }

void Engine::set_route(Route route) {
  if (route == impl_->options.route) return;
  if (impl_->speculation)
    fail("route: expected ", route_name(impl_->options.route), ", since drafts are verified, got ",
         route_name(route));
  if (impl_->options.read_dtype)
    check_read_copy(*impl_->options.read_dtype, impl_->options.state_dtype, route);
  impl_->abandon();
  impl_->scheduler.restart();
  impl_->options.route = route;
}

std::vector<RunningRequest> Engine::running_requests() const {
  std::vector<RunningRequest> requests;
  for (const auto& sequence : impl_->scheduler.running()) {
    requests.push_back({.id = sequence->id,
                        .prompt_tokens = sequence->prompt_len,
                        .tokens = sequence->size(),
                        .computed = sequence->computed,
                        .prefilling = sequence->prefilling,
                        .slot = sequence->slot,
                        .cursor = sequence->cursor});
  }
  return requests;
}
int64_t Engine::max_model_len() const { return impl_->options.max_model_len; }
EngineStats Engine::stats() const {
  EngineStats stats = impl_->stats;
  const SchedulerStats& scheduler = impl_->scheduler.stats();
  stats.preemptions = scheduler.preemptions;
  stats.swaps = scheduler.swaps;
  stats.cached_tokens = scheduler.cached_tokens;
  if (impl_->speculation) stats.speculation = impl_->speculation->stats();
  if (impl_->prefixes) stats.prefixes = impl_->prefixes->stats();
  return stats;
}
const SlotPool& Engine::slots() const { return impl_->slots; }
const KvPool& Engine::kv() const { return impl_->kv; }
const MemoryPlan& Engine::memory_plan() const { return impl_->plan; }

}  // namespace replayssm
