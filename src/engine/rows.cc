#include "engine/rows.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "engine/state_view.h"

namespace replayssm {
namespace {

RingConfig ring_of(const Model& model, const RowsOptions& options) {
  return {.buffer_len = options.buffer_len,
          .conv_kernel = static_cast<int32_t>(model.config().conv_kernel)};
}

}  // namespace

Rows::Rows(Model& model, const RowsOptions& options)
    : model_(model),
      route_(options.route),
      emulation_(options.emulation),
      ring_(ring_of(model, options)),
      slots_(model.config(), ring_, options.state_dtype, model.activation_dtype(),
             static_cast<int32_t>(options.rows), options.read_dtype, model.memory()),
      kv_(model.config(), model.activation_dtype(),
          options.rows * KvPool::blocks_for(options.context), model.memory()),
      tables_(options.rows),
      computed_(options.rows, 0),
      logits_(std::max(options.rows, options.max_logits) * model.config().vocab_size) {
  model.reserve({.tokens = std::max({options.rows, options.max_logits, options.max_tokens}),
                 .sequences = options.rows,
                 .logits = std::max(options.rows, options.max_logits),
                 .context = options.context});
  for (size_t row = 0; row < tables_.size(); ++row) slots_.acquire();
}

void Rows::reset() {
  for (size_t row = 0; row < tables_.size(); ++row) {
    kv_.release(tables_[row]);
    slots_.release(static_cast<int32_t>(row));
    REPLAYSSM_CHECK(slots_.acquire() == static_cast<int32_t>(row), "row=", row);
    computed_[row] = 0;
  }
}

void Rows::pack(std::span<const RowTokens> windows) {
  pass_.clear();
  for (const auto& [row, tokens] : windows) {
    const int64_t length = computed_[row] + std::ssize(tokens);
    REPLAYSSM_CHECK(kv_.grow(tables_[row], length), "row ", row, " grew beyond its context");
    pass_.add(static_cast<int32_t>(row), computed_[row], tables_[row]);
    for (size_t i = 0; i < tokens.size(); ++i) pass_.push(tokens[i], static_cast<int32_t>(i) - 1);
    computed_[row] = length;
  }
}

void Rows::forward(int64_t decodes, std::span<const int32_t> wanted, const PassOutput& output) {
  REPLAYSSM_CHECK(
      !output.logits || std::ssize(wanted) * model_.config().vocab_size <= logits_.size(),
      "wanted=", wanted.size());
  model_.forward(batch(decodes, wanted), state(), output);
}

Batch Rows::batch(int64_t decodes, std::span<const int32_t> wanted) {
  Batch batch = pass_.batch(decodes);
  batch.logit_tokens = wanted;
  return batch;
}

StateView Rows::state() const {
  StateView state = state_view(route_, slots_, kv_);
  state.emulation = emulation_;
  return state;
}

std::span<const float> Rows::prefill(std::span<const RowTokens> prompts,
                                     std::span<const int32_t> wanted) {
  pack(prompts);
  forward(0, wanted, {.logits = logits_.data()});
  return {logits_.data(), wanted.size() * static_cast<size_t>(model_.config().vocab_size)};
}

void Rows::pack_step(std::span<const int32_t> tokens) {
  std::vector<RowTokens> windows;
  windows.reserve(tokens.size());
  for (size_t row = 0; row < tokens.size(); ++row) {
    windows.push_back({static_cast<int64_t>(row), tokens.subspan(row, 1)});
  }
  pack(windows);
  wanted_.resize(tokens.size());
  std::iota(wanted_.begin(), wanted_.end(), 0);
}

std::span<const float> Rows::decode(std::span<const int32_t> tokens) {
  pack_step(tokens);
  forward(std::ssize(tokens), wanted_, {.logits = logits_.data()});
  return {logits_.data(), tokens.size() * static_cast<size_t>(model_.config().vocab_size)};
}

std::span<const int32_t> Rows::decode_greedy(std::span<const int32_t> tokens) {
  pack_step(tokens);
  likeliest_.resize(tokens.size());
  forward(std::ssize(tokens), wanted_, {.tokens = likeliest_.data()});
  return likeliest_;
}

std::span<const int32_t> Rows::decode_greedy(std::span<const int32_t> tokens, int64_t steps) {
  if (!model_.runs_behind()) {
    std::vector<int32_t> next(tokens.begin(), tokens.end());
    for (int64_t step = 0; step < steps; ++step) {
      const auto given = decode_greedy(next);
      if (std::ranges::count(given, -1) > 0) break;
      next.assign(given.begin(), given.end());
    }
    return likeliest_;
  }
  std::vector<int32_t> given(tokens.size());
  for (size_t row = 0; row < given.size(); ++row) given[row] = -2 - static_cast<int32_t>(row);
  likeliest_.resize(tokens.size());
  behind_.resize(tokens.size());
  bool valid = true;
  for (int64_t step = 0; step < steps; ++step) {
    pack_step(step == 0 ? tokens : given);
    // The tokens of this step and those of the one before it.
    std::swap(likeliest_, behind_);
    model_.start(batch(std::ssize(tokens), wanted_), state(), {.tokens = likeliest_.data()});
    if (step == 0) continue;
    model_.finish();
    valid = valid && std::ranges::count(behind_, -1) == 0;
  }
  if (steps > 0) model_.finish();
  if (!valid) likeliest_[0] = -1;
  return likeliest_;
}

void Rows::set_ring_limit(int64_t row, int32_t limit) {
  const auto slot = static_cast<int32_t>(row);
  Cursor cursor = slots_.cursor(slot);
  cursor.ring_limit = limit;
  slots_.set_cursor(slot, cursor);
}

}  // namespace replayssm
