// Cases of the layer step: constants and random projections, and the reference over them.
#pragma once

#include <string>
#include <vector>

#include "ops/recurrent_inputs.h"
#include "ops/reference/layer.h"

namespace replayssm::testing {

// A layer: `base` without finish and output, and what surrounds the recurrence.
struct LayerCase {
  Case base;
  int32_t conv_kernel = 4;
  bool conv_bias = true;
  int64_t group_dim = 0;
  bool weight = true, weight_per_group = false, gate_first = false, sigmoid = false;
  DType projected = DType::kFloat32;

  int64_t values() const { return base.shape.heads * base.shape.head_dim; }
  int64_t keys() const { return base.shape.key_heads * base.shape.state_dim; }
  int64_t channels() const { return values() + 2 * keys(); }
};

inline std::string name(const LayerCase& c) {
  return name(c.base) + " taps=" + std::to_string(c.conv_kernel) +
         " group=" + std::to_string(c.group_dim);
}

// What the projections give for the tokens of one sequence.
struct LayerInputs {
  std::vector<float> x;                // [tokens, channels]
  std::vector<float> strength, decay;  // [tokens, HV]
  std::vector<float> gate;             // [tokens, HV, K]
  std::vector<float> z;                // [tokens, HV, V]
};

inline std::vector<float> normal_values(int64_t count, uint32_t seed, float scale = 1,
                                        std::optional<DType> dtype = {}) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& value : x) {
    value = scale * normal(random);
    if (dtype) dispatch_float(*dtype, [&]<class T>() { value = rounded<T>(value); });
  }
  return x;
}

inline LayerInputs layer_inputs(const LayerCase& c, int64_t tokens, uint32_t seed) {
  const auto& s = c.base.shape;
  const uint32_t first = seed * 5;
  LayerInputs in;
  in.x = normal_values(tokens * c.channels(), first, 1, c.projected);
  in.strength = normal_values(tokens * s.heads, first + 1, 1, c.projected);
  in.decay = normal_values(tokens * s.heads, first + 2, 1, c.projected);
  in.z = normal_values(tokens * c.values(), first + 3, 1, c.projected);
  if (c.base.kimi())
    in.gate = normal_values(tokens * s.heads * s.state_dim, first + 4, 1, c.base.activation);
  return in;
}

// What does not change from token to token.
struct LayerConstants {
  explicit LayerConstants(const LayerCase& c) {
    const auto& s = c.base.shape;
    conv_weight = normal_values(c.conv_kernel * c.channels(), 101, 0.6f);
    if (c.conv_bias) conv_bias = normal_values(c.channels(), 102, 0.3f);
    if (c.weight) norm_weight = normal_values(c.weight_per_group ? c.group_dim : c.values(), 103);
    for (int64_t h = 0; h < s.heads; ++h) {
      gate_bias.push_back(0.3f * static_cast<float>(h % 3) - 0.2f);
      a.push_back(-0.1f * static_cast<float>(1 + h % 4));
      if (s.family == Family::kMamba2) skip.push_back(skip_of(h));
      if (!c.base.kimi()) continue;
      channel_scale.push_back(replayssm::testing::channel_scale(h));
      for (int64_t k = 0; k < s.state_dim; ++k)
        channel_bias.push_back(replayssm::testing::channel_bias(h, k));
    }
  }

  std::vector<float> conv_weight, conv_bias, norm_weight, gate_bias, a, skip, channel_scale,
      channel_bias;
};

// Mamba-2's limits of b, which some tokens meet.
inline constexpr float kLeastStrength = 0.05f, kMostStrength = 2;
inline constexpr float kNormEps = 1e-5f;

// Models order the channels v k q (Mamba-2) or q k v.
inline int64_t first_value(const LayerCase& c) {
  return c.base.shape.family == Family::kMamba2 ? 0 : 2 * c.keys();
}
inline int64_t first_key(const LayerCase& c) {
  return c.base.shape.family == Family::kMamba2 ? c.values() : c.keys();
}
inline int64_t first_query(const LayerCase& c) {
  return c.base.shape.family == Family::kMamba2 ? c.values() + c.keys() : 0;
}

template <class T>
double round_to(double x) {
  return to_float(from_float<T>(static_cast<float>(x)));
}

inline reference::Layer reference_layer(const LayerCase& c) {
  const auto& s = c.base.shape;
  const LayerConstants constants(c);
  const auto wide = [](const std::vector<float>& x) {
    return reference::Values(x.begin(), x.end());
  };
  reference::Layer l;
  l.family = s.family;
  l.heads = s.heads;
  l.key_heads = s.key_heads;
  l.head_dim = s.head_dim;
  l.state_dim = s.state_dim;
  l.channels = c.channels();
  l.v = first_value(c);
  l.k = first_key(c);
  l.q = first_query(c);
  l.conv_weight = wide(constants.conv_weight);
  l.conv_bias = wide(constants.conv_bias);
  l.gate_bias = wide(constants.gate_bias);
  l.a = wide(constants.a);
  l.min = kLeastStrength;
  l.max = kMostStrength;
  l.channel_scale = wide(constants.channel_scale);
  l.channel_bias = wide(constants.channel_bias);
  l.lower_bound = c.base.lower_bound;
  l.skip = wide(constants.skip);
  l.norm = {.rows = 1,
            .groups = c.values() / c.group_dim,
            .group_dim = c.group_dim,
            .weight_per_group = c.weight_per_group,
            .gate_first = c.gate_first,
            .sigmoid = c.sigmoid,
            .eps = kNormEps};
  l.norm_weight = wide(constants.norm_weight);
  // Of an fp32 activation double keeps more: its rounding is part of the tolerance.
  l.round = [](double x) { return x; };
  if (c.base.activation == DType::kBFloat16) l.round = round_to<bf16>;
  if (c.base.activation == DType::kFloat16) l.round = round_to<fp16>;
  return l;
}

inline std::vector<reference::LayerToken> layer_tokens(const LayerCase& c, const LayerInputs& in,
                                                       int64_t begin, int64_t end) {
  const auto& s = c.base.shape;
  const auto row = [](const std::vector<float>& x, int64_t t, int64_t width) {
    if (x.empty()) return reference::Values();
    return reference::Values(x.begin() + t * width, x.begin() + (t + 1) * width);
  };
  std::vector<reference::LayerToken> tokens;
  for (int64_t t = begin; t < end; ++t) {
    tokens.push_back({.x = row(in.x, t, c.channels()),
                      .strength = row(in.strength, t, s.heads),
                      .decay = row(in.decay, t, s.heads),
                      .gate = row(in.gate, t, s.heads * s.state_dim),
                      .z = row(in.z, t, c.values())});
  }
  return tokens;
}

// Convolution, norms and gates add to the recurrence's error a few roundings each; a group of small
// outputs counts as much as one of large ones. A value of the convolution, known to 8 units of
// fp32, is rounded to another neighbour in one case out of so many that the root mean square of
// what that changes is the geometric mean of the two precisions.
inline double layer_tolerance(const LayerCase& c) {
  const double half = rounding_error(c.base.activation);
  return 2 * state_tolerance(c.base) + rounding_error(c.base.output) +
         4 * std::sqrt(8 * 0x1p-24 * half);
}

// In every family, with the norms and the types that models have. All fit the CUDA kernels.
inline const std::vector<LayerCase>& layer_cases() {
  static const std::vector<LayerCase> all = [] {
    constexpr auto m = Family::kMamba2, g = Family::kGatedDelta, k = Family::kKimiDelta;
    constexpr auto f32 = DType::kFloat32, b16 = DType::kBFloat16, f16 = DType::kFloat16;
    std::vector<LayerCase> list;
    const auto add = [&](const Case& base, int64_t group_dim, auto&& change) {
      LayerCase c{.base = base, .group_dim = group_dim};
      change(c);
      list.push_back(c);
    };
    const auto plain = [](LayerCase&) {};
    const auto gate_first = [](LayerCase& c) { c.gate_first = true; };
    const auto per_head = [](LayerCase& c) { c.weight_per_group = true, c.conv_bias = false; };
    const auto sigmoid = [&](LayerCase& c) { per_head(c), c.sigmoid = true; };
    add({{m, 8, 2, 64, 128}, f32, f32, f32}, 256, gate_first);
    add({{m, 8, 2, 64, 128}, b16, f32, b16}, 512, gate_first);
    add({{m, 4, 1, 80, 128}, b16, f32, f32}, 160, plain);
    add({{m, 4, 2, 64, 128}, f16, f16, f16}, 64, [](LayerCase& c) { c.weight = false; });
    add({{m, 2, 1, 64, 128}, f32, f32, b16}, 64, [](LayerCase& c) { c.conv_kernel = 2; });
    add({{g, 4, 2, 128, 128}, f32, f32, f32}, 128, per_head);
    add({{g, 4, 2, 128, 128}, b16, f32, b16}, 128, per_head);
    add({{g, 2, 1, 48, 128}, b16, b16, f32}, 48, per_head);
    add({{g, 2, 2, 64, 128}, f16, f32, f16}, 128, [](LayerCase& c) { c.conv_kernel = 8; });
    add({{k, 2, 2, 128, 128}, f32, f32, f32}, 128, sigmoid);
    add({{k, 2, 2, 128, 128}, b16, f32, b16}, 128, sigmoid);
    add({{k, 4, 2, 72, 128}, f16, f16, f32, false, -5.0f}, 72, sigmoid);
    add({{k, 2, 1, 32, 128}, b16, b16, b16}, 32, [&](LayerCase& c) {
      sigmoid(c);
      c.conv_kernel = 1;
    });
    return list;
  }();
  return all;
}

}  // namespace replayssm::testing
