// A layer's step as the ops that it is made of, and what those hand to each other.
#pragma once

#include "replayssm/ops.h"

namespace replayssm {

// The memory between the ops of one call. Without memory: only its size.
struct LayerWorkspace {
  explicit LayerWorkspace(const LayerStepParams& p, void* memory = nullptr) {
    const auto take = [&](int64_t count, DType dtype) {
      void* const at = memory ? static_cast<char*>(memory) + bytes : nullptr;
      bytes += (count * dtype_bytes(dtype) + 255) / 256 * 256;
      return at;
    };
    const int64_t heads = p.tokens * p.shape.heads;
    o = static_cast<float*>(take(heads * p.shape.head_dim, DType::kFloat32));
    convolved = take(p.tokens * p.conv.channels, p.state.activation_dtype);
    b = static_cast<float*>(take(heads, DType::kFloat32));
    g = static_cast<float*>(take(heads, DType::kFloat32));
  }

  float* o;         // [tokens, HV, V]
  void* convolved;  // [tokens, channels] activation dtype
  float *b, *g;     // [tokens, HV]
  int64_t bytes = 0;
};

inline ConvParams conv_part(const LayerStepParams& p, const LayerWorkspace& w) {
  ConvParams c;
  c.batch = p.batch;
  c.channels = p.conv.channels;
  c.activation_dtype = p.state.activation_dtype;
  c.x_dtype = p.projected_dtype;
  c.x = p.conv.x;
  c.x_stride = p.conv.x_stride;
  c.weight = p.conv.weight;
  c.bias = p.conv.bias;
  c.inputs = p.conv.inputs;
  c.y = w.convolved;
  return c;
}

inline RecurrentStepParams recurrent_part(const LayerStepParams& p, const LayerWorkspace& w) {
  const auto from = [&](int64_t channel) {
    return static_cast<const char*>(w.convolved) + channel * dtype_bytes(p.state.activation_dtype);
  };
  RecurrentStepParams r;
  r.shape = p.shape;
  r.route = p.route;
  r.batch = p.batch;
  r.state = p.state;
  r.v = from(p.conv.v);
  r.k = from(p.conv.k);
  r.q = from(p.conv.q);
  r.v_stride = r.k_stride = r.q_stride = p.conv.channels;
  r.b = w.b;
  r.g = w.g;
  r.gate = p.gate;
  r.gate_stride = p.gate_stride;
  r.channel_gate = p.channel_gate;
  r.skip = p.skip;
  r.rounding = p.rounding;
  r.o = w.o;
  return r;
}

}  // namespace replayssm
