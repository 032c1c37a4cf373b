#include "engine/engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"
#include "engine/memory_plan.h"
#include "engine/scheduler.h"
#include "replay/cursor.h"

namespace replayssm {
namespace {

// The arrays behind a Batch.
struct BatchArrays {
  std::vector<int32_t> token_ids, query_start, slot, block_table, logit_tokens;
  std::vector<int64_t> position;
  int64_t block_table_stride = 0;

  void assign(const Schedule& schedule, bool paged);
  Batch view(int64_t decodes) const;
};

void BatchArrays::assign(const Schedule& schedule, bool paged) {
  *this = {};
  query_start.push_back(0);
  for (const auto& [sequence, tokens] : schedule.windows) {
    const auto begin = sequence->tokens.begin() + sequence->computed;
    token_ids.insert(token_ids.end(), begin, begin + tokens);
    query_start.push_back(static_cast<int32_t>(token_ids.size()));
    slot.push_back(sequence->slot);
    position.push_back(sequence->computed);
    const bool complete = sequence->computed + tokens == sequence->size();
    if (complete) logit_tokens.push_back(query_start.back() - 1);
    const auto blocks = static_cast<int64_t>(sequence->blocks.size());
    block_table_stride = std::max(block_table_stride, blocks);
  }
  if (!paged) return;
  for (const auto& [sequence, tokens] : schedule.windows) {
    block_table.insert(block_table.end(), sequence->blocks.begin(), sequence->blocks.end());
    block_table.resize(block_table.size() + block_table_stride - sequence->blocks.size(), -1);
  }
}

Batch BatchArrays::view(int64_t decodes) const {
  return {.token_ids = token_ids,
          .query_start = query_start,
          .slot = slot,
          .position = position,
          .block_table = block_table,
          .block_table_stride = block_table_stride,
          .decodes = decodes,
          .logit_tokens = logit_tokens};
}

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

EngineOptions checked(EngineOptions options, const ModelConfig& config) {
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
  return options;
}

// Takes what passes need, then divides what is left.
MemoryPlan reserve_and_plan(Model& model, const EngineOptions& options) {
  model.reserve({.tokens = options.max_num_batched_tokens,
                 .sequences = options.max_num_seqs,
                 .logits = options.max_num_seqs,
                 .context = options.max_model_len});
  return plan_memory(model, options);
}

// Whether a draw is all that is asked for, from logits as they are or with penalties.
bool is_plain(const SamplingParams& sampling) {
  return sampling.logit_bias.empty() && sampling.logprobs < 0;
}

TokenDraw draw_of(const Sequence& sequence) {
  const SamplingParams& sampling = sequence.sampling;
  return {.temperature = sampling.temperature,
          .top_p = sampling.top_p,
          .min_p = sampling.min_p,
          .top_k = sampling.top_k,
          .seed = sampling.seed,
          .position = sequence.size(),
          .repetition_penalty = sampling.repetition_penalty,
          .presence_penalty = sampling.presence_penalty,
          .frequency_penalty = sampling.frequency_penalty,
          .tokens = sequence.tokens,
          .prompt_length = sequence.prompt_len};
}

}  // namespace

struct Engine::Impl {
  Impl(Model& used_model, const Tokenizer* used_tokenizer, const EngineOptions& given)
      : model(used_model),
        tokenizer(used_tokenizer),
        options(checked(given, used_model.config())),
        paged(used_model.config().attention_layers() > 0),
        plan(reserve_and_plan(used_model, options)),
        slots(used_model.config(), options.ring, options.state_dtype, used_model.activation_dtype(),
              static_cast<int32_t>(options.max_num_seqs), options.read_dtype, used_model.memory()),
        kv(used_model.config(), used_model.activation_dtype(), plan.kv_blocks, used_model.memory()),
        prefixes(options.prefix_cache_bytes == 0
                     ? nullptr
                     : std::make_unique<PrefixCache>(slots, paged ? &kv : nullptr,
                                                     options.prefix_cache_bytes,
                                                     options.prefix_interval, model.memory())),
        scheduler({options.max_num_seqs, options.max_num_batched_tokens, options.swap_bytes}, slots,
                  paged ? &kv : nullptr, prefixes.get()),
        logits(options.max_num_seqs * used_model.config().vocab_size),
        tokens(options.max_num_seqs) {
    model.prepare(state(), options.max_num_seqs);
  }

  void check(const Request& request) const;
  void forward(const Schedule& schedule);
  PassOutput output_for(const Schedule& schedule);
  void count(const Schedule& schedule);
  SampledToken sample_row(const Sequence& sequence, int64_t row) const;
  std::vector<SampledToken> sample_all(const Schedule& schedule);
  std::vector<RequestOutput> step();

  StateView state() const {
    return {.route = options.route,
            .ring = options.ring,
            .cursors = slots.cursors(),
            .recurrent = slots.recurrent(),
            .conv_inputs = slots.conv_inputs(),
            .kv_keys = kv.keys(),
            .kv_values = kv.values(),
            .kv_block_size = KvPool::kBlockSize};
  }

  Model& model;
  const Tokenizer* tokenizer;
  EngineOptions options;
  bool paged;  // the model has attention layers
  MemoryPlan plan;
  SlotPool slots;
  KvPool kv;
  std::unique_ptr<PrefixCache> prefixes;
  Scheduler scheduler;
  BatchArrays arrays;
  Array<float> logits;          // [max_num_seqs, vocab]
  std::vector<int32_t> tokens;  // [max_num_seqs]
  std::vector<TokenDraw> draws;
  bool has_tokens = false;  // the pass at hand gives tokens, no logits
  EngineStats stats;
  int64_t next_id = 0;
};

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

void Engine::Impl::forward(const Schedule& schedule) {
  arrays.assign(schedule, paged);
  model.forward(arrays.view(schedule.decodes), state(), output_for(schedule));
}

// Tokens where the model can give them, else logits.
PassOutput Engine::Impl::output_for(const Schedule& schedule) {
  bool greedy = true;
  has_tokens = true;
  draws.clear();
  for (const auto& [sequence, tokens] : schedule.windows) {
    if (sequence->computed + tokens < sequence->size()) continue;
    has_tokens = has_tokens && is_plain(sequence->sampling);
    draws.push_back(draw_of(*sequence));
    greedy = greedy && sequence->sampling.temperature == 0 && !draws.back().has_penalties();
  }
  has_tokens = has_tokens && (greedy || model.draws_tokens());
  if (!has_tokens) return {.logits = logits.data()};
  if (greedy) draws.clear();
  return {.tokens = tokens.data(), .draws = draws};
}

// What the pass has computed.
void Engine::Impl::count(const Schedule& schedule) {
  const auto windows = static_cast<int64_t>(schedule.windows.size());
  for (int64_t i = 0; i < windows; ++i) {
    const auto& [sequence, tokens] = schedule.windows[i];
    (i < schedule.decodes ? stats.decode_tokens : stats.prefill_tokens) += tokens;
    sequence->computed += tokens;
    sequence->prefilling = sequence->computed < sequence->size();
    if (i < schedule.decodes) {
      begin_step(sequence->cursor, tokens, options.ring);
      stats.folds += sequence->cursor.fold_count > 0;
      commit_step(sequence->cursor, tokens, options.route);
    } else {
      commit_prefill(sequence->cursor, tokens, options.ring);
      scheduler.prefilled(*sequence);
    }
  }
  ++stats.steps;
}

// The token behind a sequence, whose logits are row `row` of the pass.
SampledToken Engine::Impl::sample_row(const Sequence& sequence, int64_t row) const {
  if (has_tokens) {
    if (tokens[row] < 0) fail("logits: expected a largest one, got NaN or none that is finite");
    return {.id = tokens[row]};
  }
  const int64_t vocab = model.config().vocab_size;
  return sample({logits.data() + row * vocab, static_cast<size_t>(vocab)}, sequence.sampling,
                sequence.prompt(), sequence.output(), sequence.size());
}

// One token for every sequence whose tokens are all computed, in the order of the windows.
std::vector<SampledToken> Engine::Impl::sample_all(const Schedule& schedule) {
  std::vector<SampledToken> tokens;
  for (const Window& window : schedule.windows) {
    const Sequence& sequence = *window.sequence;
    if (sequence.prefilling) continue;
    try {
      tokens.push_back(sample_row(sequence, std::ssize(tokens)));
    } catch (const Error& error) {
      const int64_t id = sequence.id, position = sequence.size();
      for (const Window& other : schedule.windows) scheduler.preempt(other.sequence->id);
      scheduler.remove(id);
      fail("request ", id, ", position ", position, ": ", error.what());
    }
  }
  return tokens;
}

std::vector<RequestOutput> Engine::Impl::step() {
  const Schedule schedule = scheduler.next();
  if (schedule.windows.empty()) return {};
  try {
    forward(schedule);
  } catch (...) {
    for (const Window& window : schedule.windows) scheduler.preempt(window.sequence->id);
    throw;
  }
  count(schedule);
  std::vector<SampledToken> tokens = sample_all(schedule);
  std::vector<RequestOutput> outputs;
  for (const Window& window : schedule.windows) {
    Sequence& sequence = *window.sequence;
    if (sequence.prefilling) continue;
    SampledToken& token = tokens[outputs.size()];
    sequence.tokens.push_back(token.id);
    outputs.push_back(finish_token(sequence.id, std::move(token),
                                   sequence.size() - sequence.prompt_len, sequence.rule,
                                   sequence.text ? &*sequence.text : nullptr));
    outputs.back().cached_tokens = sequence.cached;
    if (outputs.back().finish != FinishReason::kNone) scheduler.remove(sequence.id);
  }
  return outputs;
}

Engine::Engine(Model& model, const Tokenizer* tokenizer, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(model, tokenizer, options)) {}

Engine::~Engine() = default;

int64_t Engine::add(Request request) {
  impl_->check(request);
  auto sequence = std::make_unique<Sequence>();
  sequence->id = impl_->next_id++;
  sequence->priority = request.priority;
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

void Engine::cancel(int64_t request) { impl_->scheduler.remove(request); }
bool Engine::idle() const { return impl_->scheduler.idle(); }
bool Engine::contains(int64_t request) const { return impl_->scheduler.find(request) != nullptr; }
void Engine::check(const Request& request) const { impl_->check(request); }
std::vector<RequestOutput> Engine::step() { return impl_->step(); }
Route Engine::route() const { return impl_->options.route; }
int64_t Engine::running() const { return std::ssize(impl_->scheduler.running()); }
int64_t Engine::waiting() const { return impl_->scheduler.waiting(); }

void Engine::set_route(Route route) {
  if (route == impl_->options.route) return;
  if (impl_->options.read_dtype)
    check_read_copy(*impl_->options.read_dtype, impl_->options.state_dtype, route);
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
  if (impl_->prefixes) stats.prefixes = impl_->prefixes->stats();
  return stats;
}
const SlotPool& Engine::slots() const { return impl_->slots; }
const KvPool& Engine::kv() const { return impl_->kv; }
const MemoryPlan& Engine::memory_plan() const { return impl_->plan; }

}  // namespace replayssm
