#include "engine/head_drafter.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "core/philox.h"
#include "engine/scheduler.h"
#include "engine/verify.h"

namespace replayssm {

void HeadDrafter::propose(std::span<const DraftRequest> requests) {
  if (requests.empty()) return;
  siblings_.clear();
  int64_t deepest = 0;
  by_logits_ = config_.tree_width > 1;
  for (const DraftRequest& request : requests) {
    deepest = std::max(deepest, request.depth);
    const bool drawn = config_.sampled && request.sequence->sampling.temperature > 0;
    by_logits_ = by_logits_ || (drawn && request.depth > 0);
  }
  try {
    catch_up(requests);
    for (int64_t depth = 1; depth < deepest; ++depth) go_on(depth);
  } catch (...) {
    finish_started();
    throw;
  }
  finish_started();
  // The likeliest path comes first.
  for (const auto& [draft, token, parent] : siblings_) {
    if (draft->parent.empty()) {
      draft->parent.resize(draft->tokens.size());
      std::iota(draft->parent.begin(), draft->parent.end(), -1);
    }
    draft->tokens.push_back(token);
    draft->parent.push_back(parent);
  }
}

// A window of the pass, from a position on.
void HeadDrafter::add(const Sequence& sequence, int64_t position) {
  const int64_t from = seen_.at(sequence.id).from;
  pass_.add(sequence.slot, position - from,
            std::span(sequence.blocks).subspan(from / KvPool::kBlockSize));
}

// Runs what the last pass has kept through the head; every sequence's last position gives its first
// draft.
void HeadDrafter::catch_up(std::span<const DraftRequest> requests) {
  pass_.clear();
  open_.clear();
  std::vector<int32_t> hidden_row;
  int64_t decodes = 0;
  // Short windows first, as a pass wants them.
  std::vector<const DraftRequest*> order;
  for (const DraftRequest& request : requests) {
    const Sequence& sequence = *request.sequence;
    const int64_t position = sequence.computed - std::ssize(request.rows);
    Seen& seen = seen_[sequence.id];
    if (position != seen.until) seen.from = KvPool::blocks_for(position) * KvPool::kBlockSize;
    seen.until = sequence.computed;
    if (seen.from < seen.until) order.push_back(&request);
  }
  const auto is_short = [&](const DraftRequest* request) {
    return std::ssize(request->rows) <= config_.max_window();
  };
  decodes = std::ranges::stable_partition(order, is_short).begin() - order.begin();
  for (const DraftRequest* request : order) {
    const Sequence& sequence = *request->sequence;
    const int64_t position = sequence.computed - std::ssize(request->rows);
    const int64_t from = seen_.at(sequence.id).from;
    const int64_t first = std::max(from - position, int64_t{0});
    add(sequence, position + first);
    for (int64_t i = first; i < std::ssize(request->rows); ++i) {
      pass_.push(sequence.tokens[position + i + 1], static_cast<int32_t>(i - first) - 1);
      hidden_row.push_back(request->rows[i]);
    }
    if (request->depth == 0) continue;
    pass_.want_logits();
    open_.push_back(request);
  }
  if (pass_.tokens() > 0) run(false, hidden_row, decodes);
}

// One more draft of each that is to be deeper.
void HeadDrafter::go_on(int64_t depth) {
  pass_.clear();
  std::vector<const DraftRequest*> deeper;
  std::vector<int32_t> hidden_row;
  for (size_t i = 0; i < open_.size(); ++i) {
    const DraftRequest* request = open_[i];
    const auto row = static_cast<int32_t>(i);
    // A head that is known to have told no token ends the draft.
    if (request->depth <= depth || (by_logits_ && request->draft->size() < depth)) continue;
    const Sequence& sequence = *request->sequence;
    add(sequence, sequence.computed + depth - 1);
    pass_.push(by_logits_ ? request->draft->tokens.back() : -2 - row, -1);
    pass_.want_logits();
    hidden_row.push_back(row);
    deeper.push_back(request);
  }
  open_ = std::move(deeper);
  if (!open_.empty()) run(true, hidden_row, pass_.sequences());
}

void HeadDrafter::run(bool recycled, std::span<const int32_t> hidden_row, int64_t decodes) {
  const HeadBatch batch{
      .batch = pass_.batch(decodes), .hidden_row = hidden_row, .recycled = recycled};
  if (!by_logits_) {
    Started pass{.open = open_, .tokens = std::vector<int32_t>(open_.size(), -1)};
    model_.draft(batch, state_(), {.tokens = pass.tokens.data()});
    started_.push_back(std::move(pass));
    return;
  }
  logits_.resize(static_cast<size_t>(std::ssize(open_) * model_.config().vocab_size));
  model_.draft(batch, state_(), {.logits = logits_.data()});
  for (size_t row = 0; row < open_.size(); ++row) extend(static_cast<int64_t>(row), *open_[row]);
}

// Reads the tokens of the chain: a draft ends where the head has told none.
void HeadDrafter::finish_started() {
  for (int64_t depth = 0; !started_.empty(); ++depth) {
    const auto [open, tokens] = std::move(started_.front());
    started_.pop_front();
    model_.finish();
    for (size_t row = 0; row < open.size(); ++row) {
      Draft& draft = *open[row]->draft;
      if (tokens[row] >= 0 && draft.size() == depth) draft.tokens.push_back(tokens[row]);
    }
  }
}

// Takes the next token, and whatever else the draft is to hold of them, from logits.
void HeadDrafter::extend(int64_t row, const DraftRequest& request) {
  const int64_t vocab = model_.config().vocab_size;
  const std::span<const float> logits(logits_.data() + row * vocab, static_cast<size_t>(vocab));
  Draft& draft = *request.draft;
  const auto parent = static_cast<int32_t>(draft.size()) - 1;
  if (!draft_token(logits, *request.sequence, config_.sampled, draft) || config_.tree_width == 1)
    return;
  // A tree: beside every token of the path, the next likeliest ones.
  const int32_t id = draft.tokens.back();
  const SamplingParams likeliest{.logprobs = static_cast<int32_t>(config_.tree_width)};
  for (const auto& [other, logprob] : described(id, logits, likeliest).top_logprobs) {
    if (other != id) siblings_.emplace_back(&draft, other, parent);
  }
}

}  // namespace replayssm
