#include "model/sharding.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "model/tensor_ops.h"

namespace replayssm {
namespace {

class Slicer {
 public:
  Slicer(const ModelConfig& whole, const Shard& shard) : whole_(whole), shard_(shard) {}

  void slice(LayerWeights& layer) const {
    slice(layer.mamba2);
    slice(layer.gated_delta);
    slice(layer.kimi_delta);
    slice(layer.attention);
    slice(layer.latent_attention);
    slice(layer.mlp);
    for (MlpWeights& expert : layer.moe.experts) slice(expert);
    slice(layer.moe.shared);
  }

 private:
  using Ranges = std::vector<RowRange>;

  RowRange part(int64_t first, int64_t count) const {
    const int64_t each = count / shard_.world;
    return {first + shard_.rank * each, each};
  }
  // Of `count` units that several ranks may share, `size` rows each.
  RowRange shared_part(int64_t first, int64_t count, int64_t size) const {
    if (count % shard_.world == 0) return part(first, count * size);
    return {first + shard_.rank * count / shard_.world * size, size};
  }

  static void rows(Tensor& tensor, const Ranges& ranges) {
    if (tensor) tensor = gather_rows(tensor, ranges);
  }
  void rows(Tensor& tensor) const {
    if (tensor) rows(tensor, {part(0, tensor.shape[0])});
  }
  void columns(Tensor& tensor) const {
    if (tensor) tensor = gather_columns(tensor, part(0, tensor.shape[1]));
  }
  // What is added once, not by every rank.
  void once(Tensor& tensor) const {
    if (shard_.rank > 0) tensor = {};
  }

  void slice(Mamba2Weights& w) const {
    const Mamba2Config& c = whole_.mamba2;
    const int64_t inner = c.inner(), keys = c.groups * c.state_dim;
    const Ranges conv = {part(0, inner), shared_part(inner, c.groups, c.state_dim),
                         shared_part(inner + keys, c.groups, c.state_dim)};
    Ranges projected = {part(0, inner)};
    for (const RowRange& range : conv) projected.push_back({inner + range.first, range.count});
    projected.push_back(part(2 * inner + 2 * keys, c.heads));
    for (Tensor* tensor : {&w.in_proj, &w.in_proj_bias}) rows(*tensor, projected);
    for (Tensor* tensor : {&w.conv_weight, &w.conv_bias}) rows(*tensor, conv);
    for (Tensor* tensor : {&w.dt_bias, &w.a_log, &w.d, &w.norm}) rows(*tensor);
    columns(w.out_proj);
    once(w.out_proj_bias);
  }

  void slice(GatedDeltaWeights& w) const {
    const GatedDeltaConfig& c = whole_.gated_delta;
    const int64_t keys = c.key_heads * c.key_dim;
    const Ranges qkv = {part(0, keys), part(keys, keys), part(2 * keys, c.inner())};
    for (Tensor* tensor : {&w.qkv, &w.conv_weight}) rows(*tensor, qkv);
    for (Tensor* tensor : {&w.z, &w.beta, &w.alpha, &w.dt_bias, &w.a_log}) rows(*tensor);
    columns(w.out_proj);
  }

  void slice(KimiDeltaWeights& w) const {
    for (Tensor* tensor : {&w.q, &w.k, &w.v, &w.beta, &w.decay_up, &w.gate_up, &w.q_conv, &w.k_conv,
                           &w.v_conv, &w.dt_bias, &w.a_log})
      rows(*tensor);
    columns(w.out_proj);
  }

  void slice(AttentionWeights& w) const {
    const AttentionConfig& c = whole_.attention;
    const Ranges keys = {shared_part(0, c.kv_heads, c.head_dim)};
    for (Tensor* tensor : {&w.q, &w.gate, &w.q_bias}) rows(*tensor);
    for (Tensor* tensor : {&w.k, &w.v, &w.k_bias, &w.v_bias}) rows(*tensor, keys);
    columns(w.o);
    once(w.o_bias);
  }

  void slice(LatentAttentionWeights& w) const {
    for (Tensor* tensor : {&w.q, &w.key_up, &w.value_up}) rows(*tensor);
    columns(w.o);
  }

  void slice(MlpWeights& w) const {
    for (Tensor* tensor : {&w.gate, &w.up, &w.gate_bias, &w.up_bias}) rows(*tensor);
    columns(w.down);
    once(w.down_bias);
  }

  const ModelConfig& whole_;
  Shard shard_;
};

// Each rank has its own, or some ranks share one.
int64_t shared_count(int64_t count, int64_t world) { return std::max<int64_t>(1, count / world); }

ModelConfig rank_config(ModelConfig config, int64_t world) {
  for (int64_t* count :
       {&config.mamba2.heads, &config.gated_delta.key_heads, &config.gated_delta.value_heads,
        &config.kimi_delta.heads, &config.attention.heads, &config.latent_attention.heads,
        &config.intermediate, &config.moe.intermediate, &config.moe.shared_intermediate})
    *count /= world;
  if (config.mamba2.norm_groups > 0)
    config.mamba2.norm_groups = shared_count(config.mamba2.norm_groups, world);
  config.mamba2.groups = shared_count(config.mamba2.groups, world);
  config.attention.kv_heads = shared_count(config.attention.kv_heads, world);
  return config;
}

}  // namespace

std::string shard_obstacle(const ModelConfig& config, int64_t world) {
  std::string obstacle;
  const auto expect = [&](bool fits, const char* what, int64_t count) {
    if (!fits && obstacle.empty())
      obstacle = concat(count, " ", what, " cannot be cut into ", world, " equal parts");
  };
  const auto divides = [&](int64_t count) { return count % world == 0; };
  const auto shareable = [&](int64_t count) {
    return divides(count) || (count > 0 && world % count == 0);
  };
  if (config.count(Mixer::kMamba2) > 0) {
    const Mamba2Config& c = config.mamba2;
    expect(divides(c.heads), "heads of Mamba-2", c.heads);
    expect(shareable(c.groups), "groups of Mamba-2", c.groups);
    expect(divides(c.norm_groups), "groups of Mamba-2's norm", c.norm_groups);
  }
  if (config.count(Mixer::kGatedDelta) > 0)
    expect(divides(config.gated_delta.key_heads), "key heads", config.gated_delta.key_heads);
  if (config.count(Mixer::kKimiDelta) > 0)
    expect(divides(config.kimi_delta.heads), "heads of Kimi Delta", config.kimi_delta.heads);
  if (config.count(Mixer::kAttention) > 0) {
    expect(divides(config.attention.heads), "attention heads", config.attention.heads);
    expect(shareable(config.attention.kv_heads), "heads of keys", config.attention.kv_heads);
  }
  if (config.count(Mixer::kLatentAttention) > 0)
    expect(divides(config.latent_attention.heads), "attention heads",
           config.latent_attention.heads);
  if (config.has(ChannelMix::kDense))
    expect(divides(config.intermediate), "rows of an MLP", config.intermediate);
  if (config.has(ChannelMix::kMoe)) {
    expect(divides(config.moe.intermediate), "rows of an expert", config.moe.intermediate);
    expect(divides(config.moe.shared_intermediate), "rows of a shared expert",
           config.moe.shared_intermediate);
  }
  return obstacle;
}

void take_shard(ModelConfig& config, ModelWeights& weights, const Shard& shard) {
  REPLAYSSM_CHECK(shard.world > 0 && shard.rank >= 0 && shard.rank < shard.world,
                  "rank=", shard.rank, " world=", shard.world);
  if (shard.world == 1) return;
  if (const std::string obstacle = shard_obstacle(config, shard.world); !obstacle.empty())
    fail("ranks: ", obstacle);
  const Slicer slicer(config, shard);
  for (LayerWeights& layer : weights.layers) slicer.slice(layer);
  config = rank_config(std::move(config), shard.world);
}

}  // namespace replayssm
