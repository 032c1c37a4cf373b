// The state-space layers: projection, convolution, gates, recurrence, gated norm, projection.

#include <algorithm>
#include <array>
#include <cmath>

#include "model/cpu/layers.h"
#include "ops/cpu/dense.h"
#include "ops/cpu/precision.h"
#include "ops/cpu/recurrent.h"

namespace replayssm::cpu {
namespace {

// Filters [channels, kernel], one below another, as [kernel, channels].
Array<float> pack_conv(std::initializer_list<const Tensor*> filters) {
  const int64_t kernel = (*filters.begin())->shape[1];
  int64_t channels = 0, first = 0;
  for (const Tensor* filter : filters) channels += filter->shape[0];
  Array<float> packed(channels * kernel);
  for (const Tensor* filter : filters) {
    const auto values = filter->to_floats();
    for (int64_t c = 0; c < filter->shape[0]; ++c) {
      for (int64_t j = 0; j < kernel; ++j)
        packed[j * channels + first + c] = values[c * kernel + j];
    }
    first += filter->shape[0];
  }
  return packed;
}

// The multipliers of Mamba-2's projected z | x | B | C | dt, column by column; empty where all
// are 1.
Array<float> pack_projection_scale(const Mamba2Config& c) {
  if (std::ranges::all_of(c.projection_scale, [](float scale) { return scale == 1; })) return {};
  const int64_t shared = c.groups * c.state_dim;
  const std::array<int64_t, 5> widths = {c.inner(), c.inner(), shared, shared, c.heads};
  Array<float> packed(c.inner() + c.conv_channels() + c.heads);
  float* next = packed.data();
  for (size_t i = 0; i < widths.size(); ++i) {
    next = std::fill_n(next, widths[i], c.projection_scale[i]);
  }
  return packed;
}

// -exp(A_log)
Array<float> pack_decay(const Tensor& a_log) {
  auto a = pack_floats(a_log);
  for (float& value : a) value = -std::exp(value);
  return a;
}

GateActivation activation_of(GateKind kind) {
  return kind == GateKind::kSilu ? GateActivation::kSilu : GateActivation::kSigmoid;
}

// b = sigmoid(beta). beta: [tokens, heads], tokens `stride` apart.
void write_strengths(const float* beta, int64_t stride, int64_t heads, Context& context) {
  const StageTimer timer(context.times.ssm);
  float* b = context.b.get(context.tokens * heads);
  context.pool.for_ranges(context.tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < heads; ++h)
        b[t * heads + h] = 1.0f / (1.0f + std::exp(-beta[t * stride + h]));
    }
  });
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

// Where v, k and q begin in the rows of the convolution's output, in elements, and how long those
// are.
struct ConvLayout {
  int64_t stride, v, k, q;
};

// Runs the decoding sequences of the batch through the ring and the prefilling ones in chunks. `p`
// comes with what is the layer's own.
float* recur(int64_t index, const std::byte* conv_out, const ConvLayout& layout, Context& context,
             RecurrentPrefillParams p = {}) {
  const StageTimer timer(context.times.ssm);
  p.shape = recurrent_shape(context.config);
  p.route = context.state->route;
  p.state = context.state->recurrent[index];
  const int64_t bytes = context.element_bytes();
  p.v = conv_out + layout.v * bytes;
  p.k = conv_out + layout.k * bytes;
  p.q = conv_out + layout.q * bytes;
  p.v_stride = p.k_stride = p.q_stride = layout.stride;
  p.b = context.b.get(0);
  p.g = context.g.get(0);
  float* o = context.mixed.get(context.tokens * p.shape.heads * p.shape.head_dim);
  p.o = o;
  float* workspace = context.workspace.get(
      recurrent_workspace_bytes(p.shape, context.state->ring, context.pool.size()) /
      static_cast<int64_t>(sizeof(float)));

  const auto emulate = [&](const RecurrentStepParams& params, Stored stored) {
    if (const StateEmulation* emulation = context.state->emulation)
      round_stored(*emulation, params, stored, static_cast<uint32_t>(index), context.pool);
  };
  const SequenceBatch all = sequence_batch(context);
  const int64_t decodes = context.batch->decodes;
  if (decodes > 0) {
    p.batch = all;
    p.batch.sequences = decodes;
    recurrent_step(p, workspace, context.pool);
    emulate(p, Stored::kByStep);
  }
  if (decodes < all.sequences) {
    p.batch = all;
    p.batch.sequences = all.sequences - decodes;
    p.batch.query_start += decodes;
    p.batch.slot += decodes;
    recurrent_prefill(p, workspace, context.pool);
    emulate(p, Stored::kByPrefill);
  }
  return o;
}

// The gated norm of a delta rule's outputs, head by head with one weight.
const std::byte* norm_heads(GatedNormParams p, Context& context) {
  const StageTimer timer(context.times.norm);
  std::byte* y =
      context.activated.get(context.tokens * p.groups * p.group_dim * context.element_bytes());
  p.rows = context.tokens;
  p.weight_per_group = true;
  p.eps = context.config.norm_eps;
  p.y = y;
  p.dtype = context.dtype;
  gated_rms_norm(p, context.pool);
  return y;
}

}  // namespace

Mamba2Layer::Mamba2Layer(const Mamba2Weights& weights, Context& context)
    : in_proj_(pack_linear({&weights.in_proj}, context.config.hidden_size, context,
                           &weights.in_proj_bias)),
      out_proj_(pack_linear({&weights.out_proj}, context.config.mamba2.inner(), context,
                            &weights.out_proj_bias)),
      conv_weight_(pack_conv({&weights.conv_weight})),
      conv_bias_(pack_floats(weights.conv_bias)),
      dt_bias_(pack_floats(weights.dt_bias)),
      a_(pack_decay(weights.a_log)),
      d_(pack_floats(weights.d)),
      norm_(pack_floats(weights.norm)),
      projection_scale_(pack_projection_scale(context.config.mamba2)) {}

void Mamba2Layer::forward(int64_t index, const void* normed, float* delta, Context& context) const {
  const Mamba2Config& c = context.config.mamba2;
  const int64_t inner = c.inner(), channels = c.conv_channels(), rows = in_proj_.out_features();
  const int64_t tokens = context.tokens, groups = std::max<int64_t>(c.norm_groups, 1);
  float* z_xbc_dt = context.projected.get(tokens * rows);
  project(in_proj_, normed, z_xbc_dt, context);
  if (projection_scale_.size()) {
    const StageTimer timer(context.times.ssm);
    scale_columns(z_xbc_dt, rows, projection_scale_.data(), tokens, rows, context.pool);
  }
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
  const int64_t c_at = inner + c.groups * c.state_dim;
  RecurrentPrefillParams own;
  own.skip = d_.data();
  const ConvLayout layout{.stride = channels, .v = 0, .k = inner, .q = c_at};
  const float* y = recur(index, xbc, layout, context, own);
  std::byte* gated = context.activated.get(tokens * inner * context.element_bytes());
  {
    const StageTimer timer(context.times.norm);
    gated_rms_norm({.x = y,
                    .gate = z_xbc_dt,
                    .gate_stride = rows,
                    .weight = norm_.size() ? norm_.data() : nullptr,
                    .rows = tokens,
                    .groups = groups,
                    .group_dim = inner / groups,
                    .gate_first = c.gate_first,
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
      conv_weight_(pack_conv({&weights.conv_weight})),
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
  const float* o =
      recur(index, qkv, {.stride = channels, .v = 2 * keys, .k = keys, .q = 0}, context);
  const std::byte* gated = norm_heads({.x = o,
                                       .gate = z,
                                       .gate_stride = rows,
                                       .weight = norm_.data(),
                                       .groups = c.value_heads,
                                       .group_dim = c.value_dim,
                                       .activation = activation_of(c.output_gate)},
                                      context);
  project(out_proj_, gated, delta, context);
}

KimiDeltaLayer::KimiDeltaLayer(const KimiDeltaWeights& weights, Context& context)
    : in_proj_(pack_linear({&weights.q, &weights.k, &weights.v, &weights.beta, &weights.decay_down,
                            &weights.gate_down},
                           context.config.hidden_size, context)),
      conv_weight_(pack_conv({&weights.q_conv, &weights.k_conv, &weights.v_conv})),
      dt_bias_(pack_floats(weights.dt_bias)),
      a_(pack_decay(weights.a_log)),
      norm_(pack_floats(weights.norm)) {
  const KimiDeltaConfig& c = context.config.kimi_delta;
  decay_up_ = pack_linear({&weights.decay_up}, c.head_dim, context);
  gate_up_ = pack_linear({&weights.gate_up}, c.head_dim, context);
  out_proj_ = pack_linear({&weights.out_proj}, c.inner(), context);
}

int64_t KimiDeltaLayer::weight_bytes() const {
  return in_proj_.weight_bytes() + decay_up_.weight_bytes() + gate_up_.weight_bytes() +
         out_proj_.weight_bytes();
}

const float* KimiDeltaLayer::raise(const Linear& up, const float* down, int64_t stride,
                                   Context& context) const {
  const int64_t tokens = context.tokens, rank = up.in_features();
  std::byte* rounded = context.activated.get(tokens * rank * context.element_bytes());
  convert_rows(down, stride, tokens, rank, rounded, context.dtype, context.pool);
  float* raised = context.raised.get(tokens * up.out_features());
  project(up, rounded, raised, context);
  return raised;
}

void KimiDeltaLayer::forward(int64_t index, const void* normed, float* delta,
                             Context& context) const {
  const KimiDeltaConfig& c = context.config.kimi_delta;
  const int64_t inner = c.inner(), rows = in_proj_.out_features(), tokens = context.tokens;
  float* projected = context.projected.get(tokens * rows);
  project(in_proj_, normed, projected, context);
  const std::byte* qkv = convolve(index, projected, rows, 3 * inner, conv_weight_, {}, context);
  const float* beta = projected + 3 * inner;
  write_strengths(beta, rows, c.heads, context);
  const float* decay = raise(decay_up_, beta + c.heads, rows, context);
  std::byte* gates = context.rounded.get(tokens * inner * context.element_bytes());
  convert_rows(decay, inner, tokens, inner, gates, context.dtype, context.pool);
  RecurrentPrefillParams own;
  own.gate = gates;
  own.gate_stride = inner;
  own.channel_gate = {
      .scale = a_.data(), .bias = dt_bias_.data(), .lower_bound = c.gate_lower_bound};
  const ConvLayout layout{.stride = 3 * inner, .v = 2 * inner, .k = inner, .q = 0};
  const float* o = recur(index, qkv, layout, context, own);
  const float* z = raise(gate_up_, beta + c.heads + c.head_dim, rows, context);
  const std::byte* gated = norm_heads({.x = o,
                                       .gate = z,
                                       .gate_stride = inner,
                                       .weight = norm_.data(),
                                       .groups = c.heads,
                                       .group_dim = c.head_dim,
                                       .activation = activation_of(c.output_gate)},
                                      context);
  project(out_proj_, gated, delta, context);
}

}  // namespace replayssm::cpu
