// What the families share: ranges of configuration values, the wrappers around tensor names, and
// parts that several families store alike.
#pragma once

#include <span>
#include <string>
#include <string_view>

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
MlpWeights read_mlp(WeightReader& reader, const std::string& prefix, int64_t width,
                    int64_t intermediate, const ModelConfig& config);
// Routed experts, one tensor each or fused over all experts.
std::vector<MlpWeights> read_experts(WeightReader& reader, const std::string& prefix,
                                     const ModelConfig& config);

}  // namespace replayssm
