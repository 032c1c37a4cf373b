// The cases of the recurrence's tests and their random inputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "replayssm/ops.h"

namespace replayssm::testing {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A layer: its shape and types, and what else it asks of a step.
struct Case {
  RecurrentShape shape;
  DType activation = DType::kFloat32;
  DType checkpoint = DType::kFloat32;
  DType output = DType::kFloat32;
  bool finish = false;                    // skip and z
  float lower_bound = 0;                  // of Kimi Delta's gates
  std::optional<DType> read_copy = {};    // there is one
  std::optional<uint32_t> rounding = {};  // stochastic, of this stream

  bool kimi() const { return shape.family == Family::kKimiDelta; }
};

inline std::string name(const Case& c) {
  const auto& s = c.shape;
  return std::string(family_name(s.family)) + " heads=" + std::to_string(s.heads) + "/" +
         std::to_string(s.key_heads) + " V=" + std::to_string(s.head_dim) +
         " K=" + std::to_string(s.state_dim) + " " + dtype_name(c.activation) + "/" +
         dtype_name(c.checkpoint) + (c.read_copy ? "/" : "") +
         (c.read_copy ? dtype_name(*c.read_copy) : "");
}

// Every size of head_dim and state_dim that models have, and those that no vector divides, in every
// family; every pair of types.
inline const std::vector<Case>& cases() {
  static const std::vector<Case> all = [] {
    constexpr auto m = Family::kMamba2, g = Family::kGatedDelta, k = Family::kKimiDelta;
    constexpr auto f32 = DType::kFloat32, b16 = DType::kBFloat16, f16 = DType::kFloat16;
    std::vector<Case> list = {
        {{m, 6, 2, 64, 128}, f32, f32},
        {{m, 4, 1, 80, 128}, b16, f32},
        {{m, 9, 1, 5, 7}, f16, f32},
        {{m, 2, 2, 33, 256}, b16, f16},
        {{g, 4, 2, 128, 128}, f32, f32},
        {{g, 2, 1, 7, 7}, f32, f32},
        {{g, 3, 3, 9, 1}, f16, f32},
        {{g, 2, 1, 31, 112}, b16, b16},
        {{g, 2, 1, 13, 64}, b16, f32},
        {{k, 2, 2, 128, 128}, b16, f32},
        {{k, 2, 1, 7, 7}, f32, f32},
        {{k, 2, 1, 13, 80}, b16, f32},
        {{k, 2, 2, 64, 64}, f16, f16, f32, false, -5.0f},
    };
    const int64_t dims[] = {1, 7, 48, 64, 80, 96, 112, 128, 192, 256};
    const DType types[] = {f32, b16, f16};
    for (const Family family : {m, g, k}) {
      for (int64_t i = 0; i < 10; ++i) {
        Case c{{family, 2 + i % 2 * 2, 1 + i % 2, dims[i], dims[9 - i]}};
        c.activation = types[i % 3];
        c.checkpoint = types[i / 3 % 3];
        c.output = types[(i + 1) % 3];
        c.finish = i % 2 == 0;
        c.lower_bound = family == k && i % 4 == 3 ? -5.0f : 0;
        list.push_back(c);
      }
    }
    return list;
  }();
  return all;
}

// Two thirds of them with a read copy of some type.
inline std::vector<Case> cases_with_copies() {
  std::vector<Case> list = cases();
  constexpr DType kCopies[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kInt8};
  for (size_t i = 0; i < list.size(); ++i)
    if (i % 3 != 0) list[i].read_copy = kCopies[i % 4];
  return list;
}

// Kimi Delta's scale of a head and bias of its columns, Mamba-2's D.
inline float channel_scale(int64_t head) { return -0.1f * static_cast<float>(1 + head % 5); }
inline float channel_bias(int64_t head, int64_t column) {
  return 0.1f * static_cast<float>((7 * head + 3 * column) % 11) - 0.5f;
}
inline float skip_of(int64_t head) { return 0.5f - 0.25f * static_cast<float>(head % 4); }

// The inputs of one sequence, already rounded to the activation dtype where they have it.
struct Inputs {
  std::vector<float> v, k, q;  // [tokens, HV, V], [tokens, H, K] twice
  std::vector<float> b, g;     // [tokens, HV]
  std::vector<float> gate;     // [tokens, HV, K], Kimi Delta only
  std::vector<float> z;        // [tokens, HV, V], where the case has it
};

// One token in eight forgets nearly all.
inline Inputs random_inputs(const Case& c, int64_t tokens, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](int64_t count, bool round) {
    std::vector<float> x(count);
    for (float& value : x) {
      value = normal(random);
      if (round) dispatch_float(c.activation, [&]<class T>() { value = rounded<T>(value); });
    }
    return x;
  };
  const auto& s = c.shape;
  Inputs in;
  in.v = fill(tokens * s.heads * s.head_dim, true);
  in.k = fill(tokens * s.key_heads * s.state_dim, true);
  in.q = fill(tokens * s.key_heads * s.state_dim, true);
  in.b = fill(tokens * s.heads, false);
  in.g = fill(tokens * s.heads, false);
  for (float& b : in.b) b = 1 / (1 + std::exp(-b));
  for (float& g : in.g) g = -std::abs(g) * (random() % 8 == 0 ? 20.0f : 0.2f);
  if (c.kimi()) {
    in.gate = fill(tokens * s.heads * s.state_dim, true);
    for (int64_t t = 0; t < tokens; t += 8) {
      for (int64_t i = 0; i < s.heads * s.state_dim; ++i)
        in.gate[t * s.heads * s.state_dim + i] = 20;
    }
  }
  if (c.finish) in.z = fill(tokens * s.heads * s.head_dim, true);
  return in;
}

// ||actual - expected|| / ||expected||; NaN where anything is.
template <class A, class B>
double relative_error(const A& actual, const B& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += double{expected[i]} * expected[i];
  }
  return std::sqrt(error / (norm + 1e-30));
}

// Half a unit in the last place.
inline double rounding_error(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return 0x1p-11;
    case DType::kBFloat16: return 0x1p-8;
    default: return 0;
  }
}

// A sum of n random fp32 products has a relative error of about sqrt(n) 2^-24; a token makes three
// of them (known value, write, read), and they live as long as the decay lets them, here some ten
// tokens, whose errors add like a random walk. Kimi Delta's decays are exponentials of fp32 log
// decays of up to 10, formed by two more functions.
inline double fp32_tolerance(const Case& c) {
  return (c.kimi() ? 8 : 4) * std::sqrt(static_cast<double>(c.shape.state_dim) + 16) * 0x1p-24;
}
// A 16-bit checkpoint adds its half ulp at every store.
inline double state_tolerance(const Case& c) {
  return fp32_tolerance(c) + 4 * rounding_error(c.checkpoint);
}
// Outputs are rounded once more. The gate and the skip add nothing that is not smaller than that.
inline double output_tolerance(const Case& c) {
  return state_tolerance(c) + rounding_error(c.output);
}

inline constexpr Route kRoutes[] = {Route::kConventional, Route::kStateAndOutput,
                                    Route::kOutputOnly};

// One row of a batch: tokens [begin, end) of `inputs`, in a slot. `parent` makes it a tree.
struct Window {
  const Inputs* inputs = nullptr;
  int64_t begin = 0, end = 0;
  int32_t slot = 0;
  std::vector<int32_t> parent;

  int64_t tokens() const { return end - begin; }
};

// `in`, but with the tokens of `other` from `begin` on.
inline Inputs spliced(const Case& c, const Inputs& in, const Inputs& other, int64_t begin) {
  const auto& s = c.shape;
  Inputs out = in;
  const auto replace = [&](std::vector<float> Inputs::* x, int64_t width) {
    if ((in.*x).empty()) return;
    std::copy((other.*x).begin() + begin * width, (other.*x).end(),
              (out.*x).begin() + begin * width);
  };
  replace(&Inputs::v, s.heads * s.head_dim);
  replace(&Inputs::k, s.key_heads * s.state_dim);
  replace(&Inputs::b, s.heads);
  replace(&Inputs::g, s.heads);
  replace(&Inputs::gate, s.heads * s.state_dim);
  return out;
}

// A tree of so many tokens.
inline std::vector<int32_t> random_tree(std::mt19937& random, int32_t nodes) {
  std::vector<int32_t> parent(nodes);
  for (int32_t i = 0; i < nodes; ++i) parent[i] = static_cast<int32_t>(random() % (i + 1)) - 1;
  return parent;
}

// The tokens of a path as inputs of their own.
inline Inputs gathered(const Case& c, const Inputs& in, int64_t begin,
                       const std::vector<int64_t>& path) {
  const auto& s = c.shape;
  Inputs out;
  const auto take = [&](std::vector<float> Inputs::* x, int64_t width) {
    if ((in.*x).empty()) return;
    for (const int64_t i : path) {
      const auto row = (in.*x).begin() + (begin + i) * width;
      (out.*x).insert((out.*x).end(), row, row + width);
    }
  };
  take(&Inputs::v, s.heads * s.head_dim);
  take(&Inputs::k, s.key_heads * s.state_dim);
  take(&Inputs::q, s.key_heads * s.state_dim);
  take(&Inputs::b, s.heads);
  take(&Inputs::g, s.heads);
  take(&Inputs::gate, s.heads * s.state_dim);
  take(&Inputs::z, s.heads * s.head_dim);
  return out;
}

}  // namespace replayssm::testing
