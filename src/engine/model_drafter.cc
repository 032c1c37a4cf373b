#include "engine/model_drafter.h"

#include <algorithm>

#include "core/check.h"
#include "core/philox.h"
#include "engine/scheduler.h"
#include "engine/state_view.h"
#include "engine/verify.h"

namespace replayssm {

RingConfig ModelDrafter::ring_of(const EngineOptions& options) {
  return {.buffer_len = options.ring.buffer_len,
          .max_window = static_cast<int32_t>(longest_window(*options.speculative)),
          .conv_kernel = static_cast<int32_t>(options.draft_model->config().conv_kernel)};
}

PassLimits ModelDrafter::limits(const EngineOptions& options) {
  const int64_t window = longest_window(*options.speculative);
  return {.tokens = std::max(options.max_num_batched_tokens, options.max_num_seqs * window),
          .sequences = options.max_num_seqs,
          .logits = options.max_num_seqs,
          .context = options.max_model_len,
          .window = window};
}

ModelDrafter::ModelDrafter(Model& model, const EngineOptions& options, int64_t kv_blocks)
    : model_(model),
      config_(*options.speculative),
      ring_(ring_of(options)),
      chunk_(options.max_num_batched_tokens),
      slots_(model.config(), ring_, model.config().state_dtype, model.activation_dtype(),
             static_cast<int32_t>(options.max_num_seqs), {}, model.memory()),
      kv_(model.config(), model.activation_dtype(), kv_blocks, model.memory()) {}

StateView ModelDrafter::state() const { return state_view(Route::kOutputOnly, slots_, kv_); }

void ModelDrafter::release(Text& text) {
  slots_.release(text.slot);
  kv_.release(text.blocks);
}

void ModelDrafter::forget(int64_t request) {
  const auto at = texts_.find(request);
  if (at == texts_.end()) return;
  release(at->second);
  texts_.erase(at);
}

// Gives up the text that nobody has asked for longest; false where all are asked for now.
bool ModelDrafter::evict() {
  const auto oldest = std::ranges::min_element(
      texts_, {}, [](const auto& text) -> int64_t { return text.second.used; });
  if (oldest == texts_.end() || oldest->second.used == calls_) return false;
  release(oldest->second);
  texts_.erase(oldest);
  return true;
}

bool ModelDrafter::grow(Text& text, int64_t tokens) {
  while (!kv_.grow(text.blocks, tokens)) {
    if (!evict()) return false;
  }
  return true;
}

// A sequence that is met first, or was preempted long ago, takes another's place if need be.
ModelDrafter::Text& ModelDrafter::text_of(const Sequence& sequence) {
  const auto [at, fresh] = texts_.try_emplace(sequence.id);
  Text& text = at->second;
  text.used = calls_;
  while (text.slot < 0) {
    text.slot = slots_.acquire();
    if (text.slot < 0) REPLAYSSM_CHECK(evict(), "more sequences than slots");
  }
  return text;
}

// Commits what the last windows had right.
void ModelDrafter::settle(std::span<const DraftRequest> requests) {
  pass_.clear();
  std::vector<int32_t> accepted;
  for (const DraftRequest& request : requests) {
    const Sequence& sequence = *request.sequence;
    Text& text = text_of(sequence);
    if (text.window.empty()) continue;
    int32_t right = 0;
    while (right < std::ssize(text.window) && text.committed + right < sequence.size() - 1 &&
           text.window[right] == sequence.tokens[text.committed + right]) {
      ++right;
    }
    pass_.add(text.slot, text.committed, text.blocks);
    for (size_t i = 0; i < text.window.size(); ++i)
      pass_.push(text.window[i], static_cast<int32_t>(i) - 1);
    accepted.push_back(right);
    text.committed += right;
    text.window.clear();
  }
  if (accepted.empty()) return;
  Batch batch = pass_.batch(std::ssize(accepted));
  batch.deferred = true;
  model_.commit(batch, {.accepted = accepted}, state());
}

// Brings a text so close to the sequence's end that a window reaches it; false where there are no
// blocks for it.
bool ModelDrafter::prefill(const Sequence& sequence, Text& text) {
  constexpr int64_t kInWindow = 2;
  while (text.committed + kInWindow < sequence.size()) {
    const int64_t missing = sequence.size() - 1 - text.committed;
    const int64_t count = std::min(missing, chunk_);
    // Short gaps go through the ring, which a prefill would need empty.
    const bool decodes = text.committed > 0 && count <= ring_.max_window;
    if (!decodes && text.committed > 0 && slots_.cursor(text.slot).ring_count > 0) {
      release(text);
      text = {.slot = slots_.acquire(), .used = text.used};
      continue;
    }
    if (!grow(text, text.committed + count)) return false;
    pass_.clear();
    pass_.add(text.slot, text.committed, text.blocks);
    for (int64_t i = 0; i < count; ++i)
      pass_.push(sequence.tokens[text.committed + i], static_cast<int32_t>(i) - 1);
    model_.forward(pass_.batch(decodes ? 1 : 0), state(), {});
    text.committed += count;
  }
  return true;
}

// The next draft of each: its whole window again, with one token more.
void ModelDrafter::draft(std::span<const DraftRequest* const> open, int64_t depth) {
  pass_.clear();
  bool any_drawn = false;
  for (const DraftRequest* request : open) {
    const Sequence& sequence = *request->sequence;
    Text& text = texts_.at(sequence.id);
    if (depth == 0) {
      text.window.assign(sequence.tokens.begin() + text.committed, sequence.tokens.end());
    } else {
      text.window.push_back(request->draft->tokens.back());
    }
    pass_.add(text.slot, text.committed, text.blocks);
    for (size_t i = 0; i < text.window.size(); ++i)
      pass_.push(text.window[i], static_cast<int32_t>(i) - 1);
    pass_.want_logits();
    any_drawn = any_drawn || (config_.sampled && sequence.sampling.temperature > 0);
  }
  Batch batch = pass_.batch(std::ssize(open));
  batch.deferred = true;
  const int64_t vocab = model_.config().vocab_size;
  tokens_.resize(open.size());
  if (any_drawn) {
    logits_.resize(open.size() * static_cast<size_t>(vocab));
    model_.forward(batch, state(), {.logits = logits_.data()});
  } else {
    model_.forward(batch, state(), {.tokens = tokens_.data()});
  }
  for (size_t row = 0; row < open.size(); ++row) {
    Draft& draft = *open[row]->draft;
    if (!any_drawn) {
      if (tokens_[row] >= 0) draft.tokens.push_back(tokens_[row]);
      continue;
    }
    const std::span<const float> logits(logits_.data() + row * static_cast<size_t>(vocab),
                                        static_cast<size_t>(vocab));
    draft_token(logits, *open[row]->sequence, config_.sampled, draft);
  }
}

void ModelDrafter::propose(std::span<const DraftRequest> requests) {
  ++calls_;
  std::vector<DraftRequest> wanted;
  for (const DraftRequest& request : requests) {
    if (request.depth > 0) wanted.push_back(request);
  }
  settle(wanted);
  std::vector<const DraftRequest*> open;
  for (const DraftRequest& request : wanted) {
    const Sequence& sequence = *request.sequence;
    Text& text = texts_.at(sequence.id);
    if (prefill(sequence, text) && grow(text, sequence.size() + request.depth - 1)) {
      open.push_back(&request);
    } else {
      forget(sequence.id);
    }
  }
  for (int64_t depth = 0; !open.empty(); ++depth) {
    draft(open, depth);
    std::erase_if(open, [&](const DraftRequest* request) {
      return request->depth <= depth + 1 || request->draft->size() <= depth;
    });
  }
}

}  // namespace replayssm
