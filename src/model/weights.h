// A model's weights under family-blind names, in the normal form that every backend loads:
// projections are [out, in]; norm weights multiply directly (a stored w that means 1 + w has been
// folded in fp32); interleaved projections have been separated.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/tensor.h"

namespace replayssm {

struct Mamba2Weights {
  Tensor in_proj;        // [inner + conv_channels + heads, hidden]: z | x | B | C | dt
  Tensor in_proj_bias;   // [the same] or absent
  Tensor conv_weight;    // [conv_channels, conv_kernel]
  Tensor conv_bias;      // [conv_channels] or absent
  Tensor dt_bias;        // [heads]
  Tensor a_log;          // [heads]
  Tensor d;              // [heads]
  Tensor norm;           // [inner]; absent without a norm
  Tensor out_proj;       // [hidden, inner]
  Tensor out_proj_bias;  // [hidden] or absent
};

struct GatedDeltaWeights {
  Tensor qkv;          // [conv_channels, hidden]: q | k | v
  Tensor z;            // [inner, hidden]
  Tensor beta;         // [value_heads, hidden]
  Tensor alpha;        // [value_heads, hidden]
  Tensor conv_weight;  // [conv_channels, conv_kernel]
  Tensor dt_bias;      // [value_heads]
  Tensor a_log;        // [value_heads]
  Tensor norm;         // [value_dim]
  Tensor out_proj;     // [hidden, inner]
};

struct KimiDeltaWeights {
  Tensor q, k, v;                 // [inner, hidden] each
  Tensor beta;                    // [heads, hidden]
  Tensor decay_down, decay_up;    // [head_dim, hidden], [inner, head_dim]: the decay's raw gates
  Tensor gate_down, gate_up;      // the same: the output's gate
  Tensor q_conv, k_conv, v_conv;  // [inner, conv_kernel] each
  Tensor dt_bias;                 // [inner]
  Tensor a_log;                   // [heads]
  Tensor norm;                    // [head_dim]
  Tensor out_proj;                // [hidden, inner]
};

struct AttentionWeights {
  Tensor q, k, v;         // [heads * head_dim, hidden], [kv_heads * head_dim, hidden] twice
  Tensor gate;            // [heads * head_dim, hidden] or absent
  Tensor q_norm, k_norm;  // [head_dim] or absent
  Tensor o;               // [hidden, heads * head_dim]
  Tensor q_bias, k_bias, v_bias, o_bias;  // or absent
};

struct LatentAttentionWeights {
  Tensor q;         // [heads * query_dim, hidden]: per head, what meets key_up | what is shared
  Tensor latent;    // [cached, hidden]: latent vector | shared part of the keys
  Tensor norm;      // [latent], of the latent vector
  Tensor key_up;    // [heads * key_dim, latent]
  Tensor value_up;  // [heads * value_dim, latent]
  Tensor o;         // [hidden, heads * value_dim]
};

struct MlpWeights {
  Tensor gate;                           // [intermediate, hidden]; absent without a gate
  Tensor up;                             // [intermediate, hidden]
  Tensor down;                           // [hidden, intermediate]
  Tensor gate_bias, up_bias, down_bias;  // or absent
};

struct MoeWeights {
  Tensor router;           // [experts, hidden]
  Tensor correction_bias;  // [experts] or absent
  std::vector<MlpWeights> experts;
  MlpWeights shared;   // members absent without a shared expert
  Tensor shared_gate;  // [1, hidden] or absent
  Tensor latent_in;    // [latent, hidden] or absent
  Tensor latent_out;   // [hidden, latent] or absent
};

struct LayerWeights {
  Tensor mixer_norm;     // [hidden]; absent without a mixer
  Tensor channel_norm;   // [hidden]; absent without a channel mix
  Mamba2Weights mamba2;  // the members that the layer's configuration names are filled
  GatedDeltaWeights gated_delta;
  KimiDeltaWeights kimi_delta;
  AttentionWeights attention;
  LatentAttentionWeights latent_attention;
  MlpWeights mlp;
  MoeWeights moe;
};

// One block that predicts the token after next.
struct MtpWeights {
  Tensor fc;                                 // [hidden, 2 * hidden]: embedding | hidden state
  Tensor embedding_norm, hidden_norm, norm;  // [hidden]
  std::vector<LayerWeights> layers;          // ModelConfig::mtp
};

struct ModelWeights {
  Tensor embedding;   // [vocab, hidden]
  Tensor final_norm;  // [hidden]
  Tensor lm_head;     // [vocab, hidden]; absent when tied to the embedding
  std::vector<LayerWeights> layers;
  std::vector<MtpWeights> mtp;       // as many as the files hold: re-saved checkpoints drop them
  std::vector<std::string> skipped;  // tensors of the files that text generation does not use
};

// Maps a checkpoint folder's safetensors files (one, or shards with an index) and names every
// tensor in them. Throws Error for a malformed file, a missing, misshapen or unknown tensor.
ModelWeights load_weights(const std::filesystem::path& folder, const ModelConfig& config);

// Random weights of the same shapes.
ModelWeights dummy_weights(const ModelConfig& config);

}  // namespace replayssm
