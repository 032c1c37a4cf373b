// The dense ops as plain loops in double: their definition, and the oracle of the tests. Arguments
// and layouts are those of ops/cpu/dense.h; everything is double, contiguous and unrounded.
#pragma once

#include <cstdint>
#include <vector>

namespace replayssm::reference {

using Values = std::vector<double>;

double silu(double x);
double sigmoid(double x);

// x: [rows, dim], also [rows * heads, dim].
Values rms_norm(const Values& x, const Values& weight, int64_t rows, int64_t dim, double eps);

struct GatedNorm {
  int64_t rows = 0;
  int64_t groups = 0;
  int64_t group_dim = 0;
  bool weight_per_group = false;
  bool gate_first = false;
  bool sigmoid = false;
  double eps = 0;
};
// An empty weight: gate only.
Values gated_rms_norm(const GatedNorm& shape, const Values& x, const Values& gate,
                      const Values& weight);

Values swiglu(const Values& gate_up, int64_t rows, int64_t dim);
Values relu_squared(const Values& x);
Values sigmoid_gate(const Values& x, const Values& gate);

// The angle position * inverse_frequency is rounded to fp32.
Values rotary(const Values& x, const std::vector<int64_t>& position,
              const std::vector<float>& inverse_frequency, int64_t rows, int64_t heads, int64_t dim,
              int64_t rotary_dim);

// Attention of one query over `keys` keys: k, v: [keys, head_dim].
Values attention(const Values& q, const Values& k, const Values& v, int64_t keys, double scale);

struct Routing {
  std::vector<int32_t> expert;
  Values weight;
};
struct RouterShape {
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t groups = 1;
  int64_t top_groups = 1;
  bool sigmoid = false;
  bool renormalize = true;
  double scale = 1;
};
// One token.
Routing route_experts(const RouterShape& shape, const Values& logits, const Values& bias);

}  // namespace replayssm::reference
