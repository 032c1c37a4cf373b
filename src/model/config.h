// A hybrid model's architecture, read from config.json and generation_config.json.
//
// All published dialects of all families are normalised into one description: a list of layers,
// each a mixer over tokens and / or a mix over channels. Everything behind this header is
// family-blind.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "replayssm/types.h"

namespace replayssm {

enum class Mixer : uint8_t {
  kNone,
  kMamba2,
  kGatedDelta,
  kKimiDelta,
  kAttention,
  kLatentAttention,
};
enum class ChannelMix : uint8_t { kNone, kDense, kMoe };
enum class GateKind : uint8_t { kSilu, kSigmoid };
enum class MlpActivation : uint8_t { kSwiGlu, kReluSquared };

struct LayerConfig {
  Mixer mixer = Mixer::kNone;
  ChannelMix channel_mix = ChannelMix::kNone;
  Mixer second = Mixer::kNone;  // reads the same input as `mixer`; both outputs are added
};

struct Mamba2Config {
  int64_t heads = 0, head_dim = 0, groups = 0, state_dim = 0;
  // Groups of the gated norm: `groups`, or 1 in the Hugging Face mamba2 dialect. 0 = the output is
  // gated and not normalised.
  int64_t norm_groups = 0;
  bool gate_first = true;  // norm(y silu(z)), else norm(y) silu(z)
  float dt_min = 0;        // time_step_limit
  float dt_max = std::numeric_limits<float>::infinity();
  bool conv_bias = true;
  bool projection_bias = false;                             // of the input projection
  bool output_bias = false;                                 // of the output projection
  float input_scale = 1, output_scale = 1;                  // of what goes in and what comes out
  std::array<float, 5> projection_scale = {1, 1, 1, 1, 1};  // of the projected z, x, B, C and dt

  int64_t inner() const { return heads * head_dim; }
  int64_t conv_channels() const { return inner() + 2 * groups * state_dim; }
};

struct GatedDeltaConfig {
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  GateKind output_gate = GateKind::kSilu;

  int64_t inner() const { return value_heads * value_dim; }
  int64_t conv_channels() const { return 2 * key_heads * key_dim + inner(); }
};

struct KimiDeltaConfig {
  int64_t heads = 0, head_dim = 0;  // of queries, keys and values alike
  float gate_lower_bound = 0;       // where < 0, the log decay lies between it and 0
  GateKind output_gate = GateKind::kSigmoid;

  int64_t inner() const { return heads * head_dim; }
  int64_t conv_channels() const { return 3 * inner(); }
};

struct AttentionConfig {
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t rotary_dim = 0;  // leading dimensions that are rotated; 0 = none
  double rope_theta = 10000;
  float scale = 0;  // of the scores
  bool qk_norm = false;
  bool output_gate = false;
  bool bias = false;
  float input_scale = 1, output_scale = 1;  // of what goes in and what comes out
};

// Attention whose heads share one latent vector per token, which is all that is cached: a head's
// key is [key_up latent | shared], its value value_up latent.
struct LatentAttentionConfig {
  int64_t heads = 0;
  int64_t latent = 0;      // width of the latent vector
  int64_t key_dim = 0;     // of the part of a key that comes from the latent vector
  int64_t shared_dim = 0;  // of the part that the heads share
  int64_t value_dim = 0;
  float scale = 0;     // of the scores
  float norm_eps = 0;  // of the latent vector's norm

  int64_t query_dim() const { return key_dim + shared_dim; }
  int64_t cached() const { return latent + shared_dim; }
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
  float mlp_gate_scale = 1, mlp_output_scale = 1;  // of a dense mix's gate and of its output
  float embedding_scale = 1;
  float residual_scale = 1;  // of every branch that is added to the residual stream
  float logit_scale = 1;
  float norm_eps = 0;
  bool tied_embeddings = false;
  // The layers of the block that drafts, which the files announce and need not hold
  // (ModelWeights::mtp); one of them has attention.
  std::vector<LayerConfig> mtp;
  int64_t draft_attention_layers = 0;   // of that block, once it is loaded: they cache too
  DType state_dtype = DType::kFloat32;  // what the files recommend for the recurrent state
  std::vector<int32_t> eos_ids;         // union of config.json and generation_config.json
  int32_t bos_id = -1;                  // -1 = none
  std::vector<LayerConfig> layers;

  Mamba2Config mamba2;
  GatedDeltaConfig gated_delta;
  KimiDeltaConfig kimi_delta;
  AttentionConfig attention;
  LatentAttentionConfig latent_attention;
  MoeConfig moe;

  int64_t count(Mixer mixer) const;  // layers that have it
  bool has(ChannelMix mix) const;
  int64_t recurrent_layers() const;
  int64_t attention_layers() const;
};

// Reads a checkpoint folder's configuration. Throws Error naming file, key, expected and actual
// value for anything missing, malformed, contradictory, quantised or unknown.
ModelConfig load_config(const std::filesystem::path& folder);

}  // namespace replayssm
