// What the families share: ranges of configuration values, the wrappers around tensor names, and
// parts that several families store alike.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/families/family.h"
#include "replayssm/ops.h"

namespace replayssm {

inline constexpr ConfigReader::Range kWidthRange{1, 1 << 24};  // channels, vocabulary
inline constexpr ConfigReader::Range kCountRange{1, 1 << 16};  // heads, groups, experts
inline constexpr ConfigReader::Range kHeadDimRange{1, 1 << 14};
inline constexpr ConfigReader::Range kLayersRange{1, 1 << 12};
inline constexpr ConfigReader::Range kKernelRange{1, kMaxConvKernel};
// KV block tables and free lists are made for the longest context.
inline constexpr ConfigReader::Range kPositionsRange{1, int64_t{1} << 26};

// Refuses the file unless `divisor` divides `value`.
void check_divides(const ConfigReader& reader, std::string_view name, int64_t value,
                   std::string_view divisor_name, int64_t divisor);

float read_norm_eps(const ConfigReader& reader, ConfigReader::Names names, double fallback);
DType read_state_dtype(const ConfigReader& reader, ConfigReader::Names names);
void read_time_step_limit(const ConfigReader& reader, ConfigReader::Names names,
                          Mamba2Config& mamba2);
// heads, kv_heads, head_dim, scale and bias.
void read_attention(const ConfigReader& reader, int64_t default_heads, int64_t default_kv_heads,
                    int64_t default_head_dim, AttentionConfig& attention);

// rope_theta and rotary_dim, from rope_parameters, rope_scaling or the flat keys, which must agree.
void read_rope(const ConfigReader& reader, double default_theta, double default_factor,
               AttentionConfig& attention);

// groups and top_groups, by the experts and top_k that are there; the names are for messages.
void read_expert_groups(const ConfigReader& reader, ConfigReader::Names names,
                        std::string_view experts_name, std::string_view top_k_name, MoeConfig& moe);

// `count` numbers from 1e-6 to 1e6; empty when absent.
std::vector<float> read_multipliers(const ConfigReader& reader, std::string_view name,
                                    size_t count);
float read_multiplier(const ConfigReader& reader, std::string_view name);  // 1 when absent

// A choice between two kinds for every layer, and the key that makes it.
struct LayerChoice {
  std::string_view key;
  std::vector<bool> layers;  // empty: the key is absent
};
// The list of names under `key`: true for those of `yes`, false for those of `no`.
LayerChoice read_layer_names(const ConfigReader& reader, std::string_view key, int64_t layers,
                             ConfigReader::Names yes, ConfigReader::Names no);
// The first that is present; empty when none is. Refuses the file where two of them disagree.
std::vector<bool> merge_choices(const ConfigReader& reader,
                                std::initializer_list<LayerChoice> choices);

// Where the tensors of a checkpoint are rooted.
struct Roots {
  std::string body;       // stands before "layers."
  std::string embedding;  // full name of the embedding
  std::string head;       // stands before "lm_head." and "mtp."
};

// The first of `bodies` under which one of `embeddings` is stored.
Roots find_roots(const WeightReader& reader, std::span<const std::string_view> bodies,
                 std::span<const std::string_view> embeddings);

// embedding and lm_head.
void read_vocabulary(WeightReader& reader, const Roots& roots, const ModelConfig& config,
                     ModelWeights& weights);

Mamba2Weights read_mamba2(WeightReader& reader, const std::string& prefix,
                          const ModelConfig& config);
// Query, key, value and output projections with their biases.
AttentionWeights read_plain_attention(WeightReader& reader, const std::string& prefix,
                                      const ModelConfig& config);

struct MlpNames {
  std::string_view gate = "gate_proj", up = "up_proj", down = "down_proj";
};
MlpWeights read_mlp(WeightReader& reader, const std::string& prefix, int64_t width,
                    int64_t intermediate, const ModelConfig& config, const MlpNames& names = {});
// Routed experts, one tensor each or fused over all experts.
std::vector<MlpWeights> read_experts(WeightReader& reader, const std::string& prefix,
                                     const ModelConfig& config, const MlpNames& names = {});
// `in` holds gate and up of every expert.
std::vector<MlpWeights> read_fused_experts(WeightReader& reader, const std::string& in,
                                           const std::string& down, const ModelConfig& config);

}  // namespace replayssm
