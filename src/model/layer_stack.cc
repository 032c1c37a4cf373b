// The forward pass.

#include "model/layer_stack.h"

#include <utility>

#include "core/check.h"
#include "model/sharding.h"

namespace replayssm {
namespace {

// The embedding in the activation dtype, in the backend's memory.
Buffer pack_embedding(const Tensor& tensor, Context& context) {
  Buffer packed(tensor.elements() * context.element_bytes(), context.memory);
  write_tensor(tensor, context.dtype(), packed.as<>(), context.memory);
  return packed;
}

}  // namespace

LayerStack::LayerStack(ModelWeights weights, Context& context, bool draft_head,
                       const std::function<void(int64_t, int64_t)>& progress) {
  const ModelConfig& config = context.config;
  const auto total = static_cast<int64_t>(config.layers.size());
  for (int64_t i = 0; i < total; ++i) {
    const LayerWeights layer = std::move(weights.layers[static_cast<size_t>(i)]);
    layers_.emplace_back(config.layers[static_cast<size_t>(i)], layer, context);
    if (progress) progress(i + 1, total);
  }
  weights.layers.clear();
  if (draft_head && !weights.mtp.empty()) draft_head_.emplace(weights.mtp.front(), context);
  weights.mtp.clear();
  final_norm_ = pack_floats(weights.final_norm, context, config.logit_scale);
  const Tensor& head = weights.lm_head ? weights.lm_head : weights.embedding;
  lm_head_ = pack_product({&head}, config.hidden_size, context);
  weights.lm_head = {};
  embedding_ = pack_embedding(weights.embedding, context);
}

int64_t LayerStack::weight_bytes() const {
  int64_t bytes = embedding_.bytes() + lm_head_->weight_bytes();
  for (const DecoderLayer& layer : layers_) bytes += layer.weight_bytes();
  if (draft_head_) bytes += draft_head_->weight_bytes();
  return bytes;
}

void LayerStack::run(Context& context, KeepHidden keep_hidden, float* logits) const {
  const PassArrays& arrays = context.arrays;
  const ModelConfig& config = context.config;
  context.pending = {};
  context.backend.begin_pass(arrays, *context.state);
  float* hidden = context.hidden.get(arrays.tokens * config.hidden_size);
  embed(context, hidden);
  Residual residual(context, hidden);
  Places places;
  for (const DecoderLayer& layer : layers_) run_layer(layer, residual, places, context);
  if (keep_hidden != KeepHidden::kNone) {
    float* kept = context.kept_hidden.get(arrays.tokens * config.hidden_size);
    if (keep_hidden == KeepHidden::kAfterNorm) {
      residual.normed(final_norm_, kept);
    } else {
      residual.normed(final_norm_);
      context.backend.copy_heads(hidden, config.hidden_size, config.hidden_size, arrays.tokens, 1,
                                 config.hidden_size, kept, config.hidden_size);
    }
  }
  if (arrays.logits == 0) return;
  const void* x = residual.normed_rows(final_norm_, arrays.logit_tokens, arrays.logits);
  project(*lm_head_, x, arrays.logits, logits, context);
}

void LayerStack::run_draft(Context& context, bool recycled, float* logits) const {
  const PassArrays& arrays = context.arrays;
  const int64_t width = context.config.hidden_size;
  context.pending = {};
  context.backend.begin_pass(arrays, *context.state);
  float* embedded = context.delta.get(arrays.tokens * width);
  embed(context, embedded);
  const float* hidden = (recycled ? context.draft_hidden : context.kept_hidden).get(0);
  float* output =
      recycled ? context.draft_hidden.get(0) : context.draft_hidden.get(arrays.logits * width);
  const void* x = draft_head_->run(context, embedded, hidden, output);
  if (x) project(*lm_head_, x, arrays.logits, logits, context);
}

void LayerStack::embed(Context& context, float* out) const {
  const StageTimer timer(context, Stage::kEmbed);
  context.backend.embed(embedding_.as<>(), context.arrays.token_ids, context.arrays.tokens,
                        context.config.hidden_size, context.config.embedding_scale, out);
}

void compact_windows(Context& context, const int32_t* path, const int32_t* accepted) {
  const PassArrays& a = context.arrays;
  const StateView& state = *context.state;
  for (size_t i = 0; i < state.recurrent.size(); ++i) {
    context.backend.compact({.shape = recurrent_shape(context.config),
                             .batch = {.sequences = a.decodes,
                                       .query_start = a.query_start,
                                       .slot = a.slot,
                                       .cursors = state.cursors,
                                       .ring = state.ring},
                             .state = state.recurrent[i],
                             .conv_inputs = state.conv_inputs[i],
                             .channels = conv_channels(context.config),
                             .path = path,
                             .accepted = accepted});
  }
  const KvShape kv = kv_shape(context.config);
  const KvBatch batch{.sequences = a.decodes,
                      .query_start = a.query_start,
                      .position = a.position,
                      .block_table = a.block_table,
                      .block_table_stride = a.block_table_stride};
  for (int64_t i = 0; i < kv.layers; ++i) {
    context.backend.compact_kv({.k = state.kv_keys[i],
                                .v = state.kv_values[i],
                                .dtype = context.dtype(),
                                .block_size = state.kv_block_size,
                                .kv_heads = kv.heads,
                                .head_dim = kv.head_dim},
                               batch, path, accepted);
  }
}

WindowTrees::WindowTrees(const Batch& batch) {
  if (batch.parent.empty()) return;
  ancestors.resize(batch.token_ids.size());
  depth.resize(batch.token_ids.size());
  for (int64_t s = 0; s < batch.sequences(); ++s) {
    const int32_t begin = batch.query_start[s], end = batch.query_start[s + 1];
    for (int32_t t = begin; t < end; ++t) {
      if (s >= batch.decodes) {  // of any length, a chain: nobody asks for its ancestors
        depth[t] = t - begin;
        continue;
      }
      const int32_t parent = batch.parent[t];
      ancestors[t] = uint64_t{1} << (t - begin);
      if (parent < 0) continue;
      ancestors[t] |= ancestors[begin + parent];
      depth[t] = depth[begin + parent] + 1;
    }
  }
}

ModelWeights read_weights(const ModelSource& source, ModelConfig& config) {
  ModelWeights weights =
      source.dummy_weights ? dummy_weights(config) : load_weights(source.folder, config);
  const Shard shard = source.communicator ? source.communicator->shard() : Shard();
  if (shard.world == 1) return weights;
  // What the head adds to the stream by itself is no part of a sum.
  if (source.draft_head)
    fail("draft head: expected a model in one piece, got one of several ranks");
  take_shard(config, weights, shard);
  return weights;
}

void check_pass(const Batch& batch, const StateView& state, const ModelConfig& config,
                int64_t drawn) {
  const int64_t sequences = batch.sequences();
  REPLAYSSM_CHECK(static_cast<int64_t>(batch.query_start.size()) == sequences + 1 &&
                      static_cast<int64_t>(batch.position.size()) == sequences,
                  "sequences=", sequences);
  REPLAYSSM_CHECK(batch.decodes >= 0 && batch.decodes <= sequences, "decodes=", batch.decodes);
  REPLAYSSM_CHECK(batch.query_start.back() == static_cast<int64_t>(batch.token_ids.size()),
                  "query_start ends at ", batch.query_start.back());
  REPLAYSSM_CHECK(static_cast<int64_t>(state.recurrent.size()) == config.recurrent_layers(),
                  "states=", state.recurrent.size());
  REPLAYSSM_CHECK(static_cast<int64_t>(state.kv_keys.size()) >= config.attention_layers(),
                  "kv layers=", state.kv_keys.size());
  REPLAYSSM_CHECK(batch.parent.empty() || batch.parent.size() == batch.token_ids.size(),
                  "parents=", batch.parent.size());
  for (int64_t s = 0; s < batch.decodes && !batch.parent.empty(); ++s) {
    const int32_t begin = batch.query_start[s], end = batch.query_start[s + 1];
    REPLAYSSM_CHECK(end - begin <= kMaxTreeWindow, "a tree of ", end - begin, " tokens");
    for (int32_t t = begin; t < end; ++t) {
      REPLAYSSM_CHECK(batch.parent[t] >= -1 && batch.parent[t] < t - begin, "token ", t - begin,
                      " has parent ", batch.parent[t]);
    }
  }
  for (const int32_t id : batch.token_ids) {
    if (id <= -2 && -2 - id < drawn) continue;
    if (id < 0 || id >= config.vocab_size)
      fail("token id ", id, " is outside the model's vocabulary of ", config.vocab_size);
  }
}

}  // namespace replayssm
