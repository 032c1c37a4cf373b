#include "engine/fake_model.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/check.h"
#include "core/philox.h"
#include "engine/sampler.h"
#include "replay/cursor.h"

namespace replayssm::testing {
namespace {

constexpr uint64_t kEmpty = 0;  // the hash of no tokens: that of zeroed memory

// One sequence of a batch.
struct Row {
  const Batch& batch;
  const StateView& state;
  const ModelConfig& config;
  int64_t index;

  int64_t begin() const { return batch.query_start[index]; }
  int64_t window() const { return batch.query_start[index + 1] - begin(); }
  int32_t slot() const { return batch.slot[index]; }
  bool paged() const { return config.count(Mixer::kAttention) > 0; }
  bool decodes() const { return index < batch.decodes; }
  Cursor& cursor() const { return state.cursors[slot()]; }

  int32_t token(int64_t i) const { return batch.token_ids[begin() + i]; }
  // Of a token within the window; -1 = the last committed one.
  int64_t parent(int64_t i) const {
    return batch.parent.empty() || !decodes() ? i - 1 : batch.parent[begin() + i];
  }

  // Where layer `layer` keeps the key of a position: its first element holds the token.
  float& key(int64_t layer, int64_t position) const {
    const int64_t at = position / state.kv_block_size;
    REPLAYSSM_CHECK(at < batch.block_table_stride, "no block for position ", position);
    const int32_t block = batch.block_table[index * batch.block_table_stride + at];
    REPLAYSSM_CHECK(block >= 0, "block=", block);
    const AttentionConfig& attention = config.attention;
    const int64_t block_size = attention.kv_heads * state.kv_block_size * attention.head_dim;
    return static_cast<float*>(
        state.kv_keys[layer])[block * block_size +
                              position % state.kv_block_size * attention.head_dim];
  }
};

// The memory of one recurrent layer for one slot.
struct Memory {
  const Row& row;
  int64_t layer;

  uint64_t& hash() const {
    const Mamba2Config& mamba = row.config.mamba2;
    auto* checkpoint = static_cast<float*>(row.state.recurrent[layer].checkpoint);
    return *reinterpret_cast<uint64_t*>(checkpoint + row.slot() * mamba.heads * mamba.head_dim *
                                                         mamba.state_dim);
  }
  float& ring(int64_t counter) const {
    const RingConfig& ring = row.state.ring;
    const int64_t rows = ring_rows(ring.buffer_len, ring.max_window);
    auto* v = static_cast<float*>(row.state.recurrent[layer].ring_v);
    return v[(row.slot() * rows + counter % rows) * row.config.mamba2.inner()];
  }
  float& conv(int64_t counter) const {
    const RingConfig& ring = row.state.ring;
    const int64_t rows = conv_rows(ring.conv_kernel, ring.max_window);
    auto* inputs = static_cast<float*>(row.state.conv_inputs[layer]);
    return inputs[(row.slot() * rows + counter % rows) * row.config.mamba2.conv_channels()];
  }
  uint64_t extend(uint64_t hash, int64_t from, int64_t to) const {
    for (int64_t i = from; i < to; ++i) hash = extend_hash(hash, static_cast<int32_t>(ring(i)));
    return hash;
  }
};

void check_batch(const Batch& batch, const StateView& state, const ModelConfig& config) {
  const int64_t sequences = batch.sequences();
  const auto tokens = static_cast<int64_t>(batch.token_ids.size());
  REPLAYSSM_CHECK(sequences > 0 && batch.decodes <= sequences, "sequences=", sequences);
  REPLAYSSM_CHECK(static_cast<int64_t>(batch.query_start.size()) == sequences + 1 &&
                      static_cast<int64_t>(batch.position.size()) == sequences &&
                      batch.query_start.front() == 0 && batch.query_start.back() == tokens,
                  "sizes");
  for (const int32_t id : batch.token_ids) {
    REPLAYSSM_CHECK(id >= 0 && id < config.vocab_size, "id=", id);
  }
  for (const int32_t at : batch.logit_tokens) {
    REPLAYSSM_CHECK(at >= 0 && at < tokens, "logit token ", at);
  }
  const std::set<int32_t> slots(batch.slot.begin(), batch.slot.end());
  REPLAYSSM_CHECK(static_cast<int64_t>(slots.size()) == sequences, "a slot twice");
  const auto layers = static_cast<size_t>(config.count(Mixer::kMamba2));
  REPLAYSSM_CHECK(state.recurrent.size() == layers && state.conv_inputs.size() == layers, "layers");
  std::set<std::pair<int64_t, int32_t>> blocks;  // sequences may share their prompts' blocks
  for (size_t i = 0; i < batch.block_table.size(); ++i) {
    const int32_t block = batch.block_table[i];
    const auto sequence = static_cast<int64_t>(i) / batch.block_table_stride;
    REPLAYSSM_CHECK(block < 0 || blocks.emplace(sequence, block).second, "block ", block, " twice");
  }
}

void check_cursor(const Row& row) {
  const Cursor& cursor = row.cursor();
  const RingConfig& ring = row.state.ring;
  const int64_t window = row.window();
  REPLAYSSM_CHECK(window > 0, "window=", window);
  REPLAYSSM_CHECK(row.batch.position[row.index] == committed_tokens(cursor, ring), "position ",
                  row.batch.position[row.index], " but ", committed_tokens(cursor, ring),
                  " committed");
  if (row.decodes()) {
    REPLAYSSM_CHECK(window <= ring.max_window, "window=", window);
    REPLAYSSM_CHECK(cursor.ring_count == 0 || cursor.ring_count + window <= cursor.ring_limit,
                    "count=", cursor.ring_count, " limit=", cursor.ring_limit);
    REPLAYSSM_CHECK(cursor.ring_limit <= ring.buffer_len, "limit=", cursor.ring_limit);
  } else {
    REPLAYSSM_CHECK(cursor.ring_count == 0 && cursor.fold_count == 0, "prefill on a full ring");
  }
  if (row.state.route == Route::kConventional) {
    REPLAYSSM_CHECK(cursor.ring_count == 0 && cursor.fold_count == 0, "conventional with a ring");
  }
}

// Runs one layer over a row; returns the hash after each of its tokens.
std::vector<uint64_t> run_layer(const Row& row, const Memory& memory) {
  const Cursor& cursor = row.cursor();
  const int64_t head = cursor.ring_start + cursor.ring_count;
  const bool through_ring = row.decodes() && row.state.route != Route::kConventional;
  if (cursor.fold_count > 0) {
    memory.hash() =
        memory.extend(memory.hash(), cursor.ring_start - cursor.fold_count, cursor.ring_start);
  }
  std::vector<uint64_t> hashes;
  const uint64_t before = memory.extend(memory.hash(), cursor.ring_start, head);
  for (int64_t i = 0; i < row.window(); ++i) {
    const int64_t position = row.batch.position[row.index];
    int64_t ancestor = row.parent(i), committed = 0;
    for (int64_t tap = 1; row.paged() && tap < row.state.ring.conv_kernel; ++tap) {
      const int64_t behind = ancestor < 0 ? ++committed : 0;
      const int64_t counter = ancestor < 0 ? head - behind : head + ancestor;
      const float expected = ancestor >= 0 ? static_cast<float>(row.token(ancestor))
                             : position < behind
                                 ? 0.0F
                                 : static_cast<float>(row.key(0, position - behind));
      REPLAYSSM_CHECK(memory.conv(counter) == expected, "conv input of tap ", tap);
      if (ancestor >= 0) ancestor = row.parent(ancestor);
    }
    memory.conv(head + i) = static_cast<float>(row.token(i));
    if (through_ring) memory.ring(head + i) = static_cast<float>(row.token(i));
    hashes.push_back(extend_hash(row.parent(i) < 0 ? before : hashes[row.parent(i)], row.token(i)));
  }
  if (!through_ring) memory.hash() = hashes.back();
  return hashes;
}

// The recurrent state and the KV blocks must hold the same tokens.
void check_history(const Row& row, const std::vector<uint64_t>& hashes) {
  const int64_t position = row.batch.position[row.index];
  uint64_t committed = kEmpty;
  for (int64_t p = 0; p < position; ++p)
    committed = extend_hash(committed, static_cast<int32_t>(row.key(0, p)));
  std::vector<uint64_t> expected;
  for (int64_t i = 0; i < row.window(); ++i) {
    const uint64_t before = row.parent(i) < 0 ? committed : expected[row.parent(i)];
    expected.push_back(extend_hash(before, static_cast<int32_t>(row.key(0, position + i))));
  }
  REPLAYSSM_CHECK(hashes == expected, "recurrent state and KV hold different tokens");
}

int32_t token_of(const std::vector<float>& logits, size_t row, std::span<const TokenDraw> draws) {
  if (draws.empty()) return static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
  const TokenDraw& draw = draws[row];
  const SamplingParams params{.temperature = draw.temperature,
                              .top_k = draw.top_k,
                              .top_p = draw.top_p,
                              .min_p = draw.min_p,
                              .repetition_penalty = draw.repetition_penalty,
                              .presence_penalty = draw.presence_penalty,
                              .frequency_penalty = draw.frequency_penalty,
                              .seed = draw.seed};
  return sample(logits, params, draw.tokens.first(draw.prompt_length),
                draw.tokens.subspan(draw.prompt_length), draw.position)
      .id;
}

}  // namespace

uint64_t extend_hash(uint64_t hash, int32_t token) {
  const auto bits = philox({static_cast<uint32_t>(token), 1, 2, 3},
                           {static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32)});
  return (uint64_t{bits[0]} << 32) | bits[1];
}

std::vector<float> logits_of(uint64_t hash, int64_t vocab) {
  std::vector<float> logits(vocab);
  for (int64_t i = 0; i < vocab; ++i) logits[i] = static_cast<float>(4 * uniform(hash, i));
  return logits;
}

FakeModel::FakeModel(int64_t vocab, int64_t max_positions, bool attention) {
  config_.vocab_size = vocab;
  config_.max_positions = max_positions;
  config_.hidden_size = 8;
  config_.layers = {{.mixer = Mixer::kMamba2}, {.mixer = Mixer::kMamba2}};
  config_.mamba2 = {.heads = 2, .head_dim = 4, .groups = 1, .state_dim = 8, .norm_groups = 1};
  if (!attention) return;
  config_.layers.insert(config_.layers.begin() + 1, 2, {.mixer = Mixer::kAttention});
  config_.attention = {.heads = 2, .kv_heads = 1, .head_dim = 4};
}

void FakeModel::forward(const Batch& batch, const StateView& state, const PassOutput& output) {
  REPLAYSSM_CHECK(started_.empty(), "a pass is under way");
  run(batch, state, output);
}

// Everything that touches the states comes in the order of the calls, as on a device; only the
// tokens come late.
void FakeModel::start(const Batch& batch, const StateView& state, const PassOutput& output) {
  REPLAYSSM_CHECK(behind && started_.size() < 2, "passes=", started_.size());
  std::vector<int32_t> ids(batch.token_ids.begin(), batch.token_ids.end());
  for (int32_t& id : ids) {
    if (id <= -2) id = std::max(given_.at(static_cast<size_t>(-2 - id)), 0);
  }
  Batch known = batch;
  known.token_ids = ids;
  Started pass{.tokens = std::vector<int32_t>(batch.logit_tokens.size()), .to = output.tokens};
  run(known, state, {.tokens = pass.tokens.data(), .draws = output.draws});
  overlapped += !started_.empty();
  given_ = pass.tokens;
  std::fill_n(output.tokens, pass.tokens.size(), -12345);
  started_.push_back(std::move(pass));
}

void FakeModel::finish() {
  REPLAYSSM_CHECK(!started_.empty(), "no pass");
  const Started pass = std::move(started_.front());
  started_.pop_front();
  if (finishes_++ == fail_at_finish) fail("the device has gone");
  std::ranges::copy(pass.tokens, pass.to);
}

void FakeModel::run(const Batch& batch, const StateView& state, const PassOutput& output) {
  if (forwards++ == fail_at_forward) fail("the device is on fire");
  check_batch(batch, state, config_);
  const int64_t attention_layers = config_.count(Mixer::kAttention);
  std::vector<uint64_t> hashes;  // of every token of the batch
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    const Row row{batch, state, config_, s};
    begin_step(row.cursor(), row.window(), state.ring);
    check_cursor(row);
    folds += row.cursor().fold_count > 0;
    for (int64_t layer = 0; layer < attention_layers; ++layer) {
      for (int64_t i = 0; i < row.window(); ++i) {
        row.key(layer, batch.position[s] + i) = static_cast<float>(row.token(i));
      }
    }
    std::vector<uint64_t> first;
    for (int64_t layer = 0; layer < config_.count(Mixer::kMamba2); ++layer) {
      const auto result = run_layer(row, {row, layer});
      REPLAYSSM_CHECK(layer == 0 || result == first, "layers disagree");
      first = result;
    }
    if (row.paged()) check_history(row, first);
    hashes.insert(hashes.end(), first.begin(), first.end());
    if (row.decodes() && batch.deferred) {
      deferred_tokens += row.window();
      REPLAYSSM_CHECK(state.route != Route::kConventional, "a window that cannot be rolled back");
    } else if (row.decodes()) {
      commit_step(row.cursor(), row.window(), state.route);
    } else {
      commit_prefill(row.cursor(), row.window(), state.ring);
    }
  }
  mixed_forwards += batch.decodes > 0 && batch.decodes < batch.sequences();
  for (size_t i = 0; i < batch.logit_tokens.size(); ++i) {
    const int32_t at = batch.logit_tokens[i];
    std::vector<float> row = logits_of(hashes[at] ^ salt, config_.vocab_size);
    const bool bad = batch.token_ids[at] == nan_after;
    if (bad) row[1] = std::nanf("");
    if (output.logits) std::ranges::copy(row, output.logits + i * row.size());
    if (output.tokens) output.tokens[i] = bad ? -1 : token_of(row, i, output.draws);
  }
}

void FakeModel::commit(const Batch& batch, const WindowCommit& commit, const StateView& state) {
  REPLAYSSM_CHECK(batch.deferred && std::ssize(commit.accepted) == batch.decodes, "accepted");
  for (int64_t s = 0; s < batch.decodes; ++s) {
    const Row row{batch, state, config_, s};
    const int64_t accepted = commit.accepted[s];
    REPLAYSSM_CHECK(accepted >= 0 && accepted <= row.window(), "accepted=", accepted);
    const int64_t head = row.cursor().ring_start + row.cursor().ring_count;
    for (int64_t i = 0; i < accepted && !commit.path.empty(); ++i) {
      const int64_t from = commit.path[row.begin() + i];
      REPLAYSSM_CHECK(from >= i && from < row.window(), "path ", from);
      moved_rows += from != i;
      for (int64_t layer = 0; layer < config_.count(Mixer::kMamba2); ++layer) {
        const Memory memory{row, layer};
        memory.ring(head + i) = memory.ring(head + from);
        memory.conv(head + i) = memory.conv(head + from);
      }
      for (int64_t layer = 0; layer < config_.count(Mixer::kAttention); ++layer)
        row.key(layer, batch.position[s] + i) = row.key(layer, batch.position[s] + from);
    }
    commit_step(row.cursor(), accepted, state.route);
  }
}

}  // namespace replayssm::testing
