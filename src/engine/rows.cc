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
  token_ids_.clear();
  query_start_.assign(1, 0);
  slot_.clear();
  position_.clear();
  block_table_.clear();
  block_table_stride_ = 0;
  for (const auto& [row, tokens] : windows) {
    const int64_t position = computed_[row];
    const auto length = position + static_cast<int64_t>(tokens.size());
    REPLAYSSM_CHECK(kv_.grow(tables_[row], length), "row ", row, " grew beyond its context");
    token_ids_.insert(token_ids_.end(), tokens.begin(), tokens.end());
    query_start_.push_back(static_cast<int32_t>(token_ids_.size()));
    slot_.push_back(static_cast<int32_t>(row));
    position_.push_back(position);
    const auto blocks = static_cast<int64_t>(tables_[row].size());
    block_table_stride_ = std::max(block_table_stride_, blocks);
    computed_[row] = length;
  }
  for (const auto& [row, tokens] : windows) {
    block_table_.insert(block_table_.end(), tables_[row].begin(), tables_[row].end());
    block_table_.resize(block_table_.size() + block_table_stride_ - tables_[row].size(), -1);
  }
}

void Rows::forward(int64_t decodes, std::span<const int32_t> wanted, const PassOutput& output) {
  REPLAYSSM_CHECK(
      !output.logits || std::ssize(wanted) * model_.config().vocab_size <= logits_.size(),
      "wanted=", wanted.size());
  model_.forward(batch(decodes, wanted), state(), output);
}

Batch Rows::batch(int64_t decodes, std::span<const int32_t> wanted) const {
  return {.token_ids = token_ids_,
          .query_start = query_start_,
          .slot = slot_,
          .position = position_,
          .block_table = block_table_,
          .block_table_stride = block_table_stride_,
          .decodes = decodes,
          .logit_tokens = wanted};
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
