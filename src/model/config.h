// A hybrid model's architecture, read from config.json and generation_config.json.
//
// All published dialects of all families are normalised into one description: a list of layers,
// each a mixer over tokens and / or a mix over channels. Everything behind this header is
// family-blind.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "replayssm/types.h"

namespace replayssm {

enum class Mixer : uint8_t { kNone, kMamba2, kGatedDelta, kAttention };
enum class ChannelMix : uint8_t { kNone, kDense, kMoe };
enum class GateKind : uint8_t { kSilu, kSigmoid };
enum class MlpActivation : uint8_t { kSwiGlu, kReluSquared };

struct LayerConfig {
  Mixer mixer = Mixer::kNone;
  ChannelMix channel_mix = ChannelMix::kNone;
};

struct Mamba2Config {
  int64_t heads = 0, head_dim = 0, groups = 0, state_dim = 0;
  int64_t norm_groups =
      0;             // groups of the gated norm: `groups`, or 1 in the Hugging Face mamba2 dialect
  float dt_min = 0;  // time_step_limit
  float dt_max = std::numeric_limits<float>::infinity();
  bool conv_bias = true;
  bool projection_bias = false;

  int64_t inner() const { return heads * head_dim; }
  int64_t conv_channels() const { return inner() + 2 * groups * state_dim; }
};

struct GatedDeltaConfig {
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  GateKind output_gate = GateKind::kSilu;

  int64_t inner() const { return value_heads * value_dim; }
  int64_t conv_channels() const { return 2 * key_heads * key_dim + inner(); }
};

struct AttentionConfig {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t rotary_dim = 0;  // leading dimensions that are rotated; 0 = none
  double rope_theta = 10000;
  float scale = 0;  // of the scores
  bool qk_norm = false;
  bool output_gate = false;
  bool bias = false;
};

struct MoeConfig {
  int64_t experts = 0, top_k = 0, intermediate = 0;
  int64_t shared_intermediate = 0;  // 0 = no shared expert
  int64_t latent = 0;               // width the routed experts work in; 0 = hidden
  int64_t groups = 1, top_groups = 1;
  bool sigmoid_scores = false;  // else softmax
  bool correction_bias = false;
  bool renormalize = true;
  float scale = 1;
  bool shared_gate = false;  // the shared expert's output is scaled by sigmoid(w x)
};

struct ModelConfig {
  std::string model_type;
  int64_t vocab_size = 0, hidden_size = 0;
  int64_t max_positions = 0;  // 0 = the file names none
  int64_t conv_kernel = 4;
  int64_t intermediate = 0;  // of dense channel mixes
  MlpActivation activation = MlpActivation::kSwiGlu;
  bool mlp_bias = false;
  float norm_eps = 0;
  bool tied_embeddings = false;
  int64_t mtp_layers = 0;  // announced; ModelWeights::mtp holds those that the files have
  DType state_dtype = DType::kFloat32;  // what the files recommend for the recurrent state
  std::vector<int32_t> eos_ids;         // union of config.json and generation_config.json
  int32_t bos_id = -1;                  // -1 = none
  std::vector<LayerConfig> layers;

  Mamba2Config mamba2;
  GatedDeltaConfig gated_delta;
  AttentionConfig attention;
  MoeConfig moe;

  int64_t count(Mixer mixer) const;
};

// Reads a checkpoint folder's configuration. Throws Error naming file, key, expected and actual
// value for anything missing, malformed, contradictory, quantised or unknown.
ModelConfig load_config(const std::filesystem::path& folder);

}  // namespace replayssm
