// The state-space layers: projection, convolution, gates, recurrence, gated norm, projection.

#include <cmath>

#include "model/cpu/layers.h"
#include "ops/cpu/dense.h"
#include "ops/cpu/recurrent.h"

namespace replayssm::cpu {
namespace {

// [channels, kernel] as [kernel, channels].
Array<float> pack_conv(const Tensor& tensor) {
  const auto values = tensor.to_floats();
  const int64_t channels = tensor.shape[0], kernel = tensor.shape[1];
  Array<float> packed(channels * kernel);
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t j = 0; j < kernel; ++j) packed[j * channels + c] = values[c * kernel + j];
  }
  return packed;
}

// -exp(A_log)
Array<float> pack_decay(const Tensor& a_log) {
  auto a = pack_floats(a_log);
  for (float& value : a) value = -std::exp(value);
  return a;
}

SequenceBatch sequence_batch(const Context& context) {
  const Batch& batch = *context.batch;
  return {.sequences = batch.sequences(),
          .query_start = batch.query_start.data(),
          .slot = batch.slot.data(),
          .cursors = context.state->cursors,
          .ring = context.state->ring};
}

// x: the convolution's inputs within the projection's rows.
const std::byte* convolve(int64_t index, const float* x, int64_t x_stride, int64_t channels,
                          const Array<float>& weight, const Array<float>& bias, Context& context) {
  const StageTimer timer(context.times.conv);
  ConvParams p;
  p.batch = sequence_batch(context);
  p.channels = channels;
  p.activation_dtype = context.dtype;
  p.x = x;
  p.x_stride = x_stride;
  p.weight = weight.data();
  p.bias = bias.size() ? bias.data() : nullptr;
  p.inputs = context.state->conv_inputs[index];
  std::byte* y = context.conv_out.get(context.tokens * channels * context.element_bytes());
  p.y = y;
  causal_conv(p, context.pool);
  return y;
}

// Runs the decoding sequences of the batch through the ring and the prefilling ones in chunks.
// Element offsets of v, k and q within rows of `stride` elements of the convolution's output.
// `skip`: per head, may be null.
float* recur(int64_t index, const std::byte* conv_out, int64_t stride, int64_t v, int64_t k,
             int64_t q, const float* skip, Context& context) {
  const StageTimer timer(context.times.ssm);
  RecurrentPrefillParams p;
  p.shape = recurrent_shape(context.config);
  p.route = context.state->route;
  p.state = context.state->recurrent[index];
  const int64_t bytes = context.element_bytes();
  p.v = conv_out + v * bytes;
  p.k = conv_out + k * bytes;
  p.q = conv_out + q * bytes;
  p.v_stride = p.k_stride = p.q_stride = stride;
  p.b = context.b.get(0);
  p.g = context.g.get(0);
  p.skip = skip;
  float* o = context.mixed.get(context.tokens * p.shape.heads * p.shape.head_dim);
  p.o = o;
  float* workspace = context.workspace.get(
      recurrent_workspace_bytes(p.shape, context.state->ring, context.pool.size()) /
      static_cast<int64_t>(sizeof(float)));

  const SequenceBatch all = sequence_batch(context);
  const int64_t decodes = context.batch->decodes;
  if (decodes > 0) {
    p.batch = all;
    p.batch.sequences = decodes;
    recurrent_step(p, workspace, context.pool);
  }
  if (decodes < all.sequences) {
    p.batch = all;
    p.batch.sequences = all.sequences - decodes;
    p.batch.query_start += decodes;
    p.batch.slot += decodes;
    recurrent_prefill(p, workspace, context.pool);
  }
  return o;
}

}  // namespace

Mamba2Layer::Mamba2Layer(const Mamba2Weights& weights, Context& context)
    : in_proj_(pack_linear({&weights.in_proj}, context.config.hidden_size, context,
                           &weights.in_proj_bias)),
      out_proj_(pack_linear({&weights.out_proj}, context.config.mamba2.inner(), context,
                            &weights.out_proj_bias)),
      conv_weight_(pack_conv(weights.conv_weight)),
      conv_bias_(pack_floats(weights.conv_bias)),
      dt_bias_(pack_floats(weights.dt_bias)),
      a_(pack_decay(weights.a_log)),
      d_(pack_floats(weights.d)),
      norm_(pack_floats(weights.norm)) {}

void Mamba2Layer::forward(int64_t index, const void* normed, float* delta, Context& context) const {
  const Mamba2Config& c = context.config.mamba2;
  const int64_t inner = c.inner(), channels = c.conv_channels(), rows = in_proj_.out_features();
  const int64_t tokens = context.tokens;
  float* z_xbc_dt = context.projected.get(tokens * rows);
  project(in_proj_, normed, z_xbc_dt, context);
  const std::byte* xbc =
      convolve(index, z_xbc_dt + inner, rows, channels, conv_weight_, conv_bias_, context);
  {
    const StageTimer timer(context.times.ssm);
    mamba2_gates({.dt = z_xbc_dt + inner + channels,
                  .dt_stride = rows,
                  .dt_bias = dt_bias_.data(),
                  .a = a_.data(),
                  .dt_min = c.dt_min,
                  .dt_max = c.dt_max,
                  .tokens = tokens,
                  .heads = c.heads,
                  .b = context.b.get(tokens * c.heads),
                  .g = context.g.get(tokens * c.heads)},
                 context.pool);
  }
  float* y =
      recur(index, xbc, channels, 0, inner, inner + c.groups * c.state_dim, d_.data(), context);
  std::byte* gated = context.activated.get(tokens * inner * context.element_bytes());
  {
    const StageTimer timer(context.times.norm);
    gated_rms_norm({.x = y,
                    .gate = z_xbc_dt,
                    .gate_stride = rows,
                    .weight = norm_.data(),
                    .rows = tokens,
                    .groups = c.norm_groups,
                    .group_dim = inner / c.norm_groups,
                    .gate_first = true,
                    .eps = context.config.norm_eps,
                    .y = gated,
                    .dtype = context.dtype},
                   context.pool);
  }
  project(out_proj_, gated, delta, context);
}

GatedDeltaLayer::GatedDeltaLayer(const GatedDeltaWeights& weights, Context& context)
    : in_proj_(pack_linear({&weights.qkv, &weights.z, &weights.beta, &weights.alpha},
                           context.config.hidden_size, context)),
      out_proj_(pack_linear({&weights.out_proj}, context.config.gated_delta.inner(), context)),
      conv_weight_(pack_conv(weights.conv_weight)),
      dt_bias_(pack_floats(weights.dt_bias)),
      a_(pack_decay(weights.a_log)),
      norm_(pack_floats(weights.norm)) {}

void GatedDeltaLayer::forward(int64_t index, const void* normed, float* delta,
                              Context& context) const {
  const GatedDeltaConfig& c = context.config.gated_delta;
  const int64_t inner = c.inner(), channels = c.conv_channels(), rows = in_proj_.out_features();
  const int64_t keys = c.key_heads * c.key_dim, tokens = context.tokens;
  float* qkv_z_beta_alpha = context.projected.get(tokens * rows);
  project(in_proj_, normed, qkv_z_beta_alpha, context);
  const float* z = qkv_z_beta_alpha + channels;
  const std::byte* qkv =
      convolve(index, qkv_z_beta_alpha, rows, channels, conv_weight_, {}, context);
  {
    const StageTimer timer(context.times.ssm);
    delta_gates({.beta = z + inner,
                 .alpha = z + inner + c.value_heads,
                 .stride = rows,
                 .dt_bias = dt_bias_.data(),
                 .a = a_.data(),
                 .tokens = tokens,
                 .heads = c.value_heads,
                 .b = context.b.get(tokens * c.value_heads),
                 .g = context.g.get(tokens * c.value_heads)},
                context.pool);
  }
  const float* o = recur(index, qkv, channels, 2 * keys, keys, 0, nullptr, context);
  std::byte* gated = context.activated.get(tokens * inner * context.element_bytes());
  {
    const StageTimer timer(context.times.norm);
    gated_rms_norm({.x = o,
                    .gate = z,
                    .gate_stride = rows,
                    .weight = norm_.data(),
                    .rows = tokens,
                    .groups = c.value_heads,
                    .group_dim = c.value_dim,
                    .weight_per_group = true,
                    .activation = c.output_gate == GateKind::kSilu ? GateActivation::kSilu
                                                                   : GateActivation::kSigmoid,
                    .eps = context.config.norm_eps,
                    .y = gated,
                    .dtype = context.dtype},
                   context.pool);
  }
  project(out_proj_, gated, delta, context);
}

}  // namespace replayssm::cpu
