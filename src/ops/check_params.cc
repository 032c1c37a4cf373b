#include "ops/check_params.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <tuple>

#include "core/check.h"

namespace replayssm {
namespace {

// Checks of single arguments, under the names that a caller knows them by.

void expect_at_least(const char* name, int64_t least, int64_t value) {
  if (value < least) fail(name, ": expected at least ", least, ", got ", value);
}

void expect_at_most(const char* name, int64_t most, int64_t value) {
  if (value > most) fail(name, ": expected at most ", most, ", got ", value);
}

void expect_optional_pointer(const char* name, const void* pointer, int64_t alignment) {
  if (pointer != nullptr) check_pointer(name, pointer, alignment);
}

void expect_null(const char* name, const void* pointer, const char* why) {
  if (pointer != nullptr) fail(name, ": expected null ", why, ", got a pointer");
}

void expect_float(const char* name, DType dtype) {
  for (const DType known : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (dtype == known) return;
  }
  fail(name, ": expected float32, float16 or bfloat16, got ", dtype_name(dtype));
}

// A tensor of rows `stride` elements apart.
void expect_rows(const char* name, const char* stride_name, const void* data, DType dtype,
                 int64_t width, int64_t stride, int64_t alignment) {
  const int64_t element = dtype_bytes(dtype);
  check_pointer(name, data, std::max(alignment, element));
  expect_at_least(stride_name, width, stride);
  if (stride * element % alignment != 0) {
    fail(stride_name, ": expected rows of ", alignment, "-byte alignment, got ", stride,
         " elements of ", element, " bytes");
  }
}

constexpr int64_t kSingle = sizeof(float);

void check_ring(const RingConfig& ring) {
  expect_at_least("batch.ring.buffer_len", 1, ring.buffer_len);
  expect_at_least("batch.ring.max_window", 1, ring.max_window);
  expect_at_least("batch.ring.conv_kernel", 1, ring.conv_kernel);
  expect_at_most("batch.ring.conv_kernel", kMaxConvKernel, ring.conv_kernel);
}

// What of a batch an op reads.
struct BatchUse {
  bool windows = true, cursors = true;
};

void check_sequences(const SequenceBatch& batch, BatchUse use) {
  expect_at_least("batch.sequences", 0, batch.sequences);
  check_ring(batch.ring);
  if (batch.sequences == 0) return;
  check_pointer("batch.slot", batch.slot, alignof(int32_t));
  if (use.windows) check_pointer("batch.query_start", batch.query_start, alignof(int32_t));
  if (use.cursors) check_pointer("batch.cursors", batch.cursors, alignof(Cursor));
  if (use.windows) expect_optional_pointer("batch.parent", batch.parent, alignof(int32_t));
}

void check_shape(const RecurrentShape& shape) {
  const bool known = shape.family == Family::kMamba2 || shape.family == Family::kGatedDelta ||
                     shape.family == Family::kKimiDelta;
  if (!known) fail("shape.family: expected mamba2, gdn or kda, got ", int{uint8_t(shape.family)});
  expect_at_least("shape.heads", 1, shape.heads);
  expect_at_least("shape.key_heads", 1, shape.key_heads);
  if (shape.heads % shape.key_heads != 0) {
    fail("shape.key_heads: expected a divisor of heads = ", shape.heads, ", got ", shape.key_heads);
  }
  expect_at_least("shape.head_dim", 1, shape.head_dim);
  expect_at_least("shape.state_dim", 1, shape.state_dim);
  expect_at_most("shape.state_dim", kMaxStateDim, shape.state_dim);
}

void check_read_copy(const ReadCopy& copy, int64_t alignment) {
  if (copy.data == nullptr) return;
  const int64_t element = dtype_bytes(copy.dtype);
  if (element == 0) {
    fail("state.read_copy.dtype: expected one of the types, got ", int{uint8_t(copy.dtype)});
  }
  check_pointer("state.read_copy.data", copy.data, std::max(alignment, element));
  if (element == 1) check_pointer("state.read_copy.scale", copy.scale, kSingle);
}

// Memory of a ring is needed by what reads or writes one.
void check_state(const RecurrentShape& shape, const RecurrentState& state, bool ring,
                 int64_t alignment) {
  expect_float("state.checkpoint_dtype", state.checkpoint_dtype);
  expect_float("state.activation_dtype", state.activation_dtype);
  check_pointer("state.checkpoint", state.checkpoint,
                std::max(alignment, dtype_bytes(state.checkpoint_dtype)));
  check_read_copy(state.read_copy, alignment);
  const int64_t activation = std::max(alignment, dtype_bytes(state.activation_dtype));
  const bool channels = shape.family == Family::kKimiDelta;
  const auto expect = [&](const char* name, const void* pointer, int64_t bytes) {
    if (ring) {
      check_pointer(name, pointer, bytes);
    } else {
      expect_optional_pointer(name, pointer, bytes);
    }
  };
  expect("state.ring_v", state.ring_v, activation);
  expect("state.ring_k", state.ring_k, activation);
  expect("state.ring_b", state.ring_b, kSingle);
  if (channels) {
    expect("state.ring_gate", state.ring_gate, activation);
  } else {
    expect("state.ring_g", state.ring_g, kSingle);
  }
}

void check_channel_gate(const RecurrentShape& shape, const ChannelGate& gate) {
  if (shape.family != Family::kKimiDelta) return;
  check_pointer("channel_gate.scale", gate.scale, kSingle);
  check_pointer("channel_gate.bias", gate.bias, kSingle);
}

void check_route(Route route, const SequenceBatch& batch) {
  const bool known = route == Route::kConventional || route == Route::kStateAndOutput ||
                     route == Route::kOutputOnly;
  if (!known) fail("route: expected one of the three, got ", int{uint8_t(route)});
  if (route == Route::kConventional)
    expect_null("batch.parent", batch.parent, "with the conventional route");
}

// The type of what comes from a projection.
void check_projected(const char* name, DType dtype, DType activation) {
  if (dtype == DType::kFloat32 || dtype == activation) return;
  fail(name, ": expected float32 or activation_dtype = ", dtype_name(activation), ", got ",
       dtype_name(dtype));
}

void check_layer_conv(const LayerStepParams& p, int64_t alignment) {
  const LayerConv& c = p.conv;
  const int64_t values = p.shape.heads * p.shape.head_dim,
                keys = p.shape.key_heads * p.shape.state_dim;
  const int64_t element = dtype_bytes(p.state.activation_dtype);
  if (c.channels != values + 2 * keys)
    fail("conv.channels: expected HV V + 2 H K = ", values + 2 * keys, ", got ", c.channels);
  for (const auto& [name, first, width] :
       {std::tuple{"conv.v", c.v, values}, {"conv.k", c.k, keys}, {"conv.q", c.q, keys}}) {
    if (first < 0 || first + width > c.channels || first * element % alignment != 0) {
      fail(name, ": expected the first of ", width, " of ", c.channels, " channels, ", alignment,
           "-byte aligned, got ", first);
    }
  }
  if (p.tokens == 0) return;
  expect_rows("conv.x", "conv.x_stride", c.x, p.projected_dtype, c.channels, c.x_stride, alignment);
  check_pointer("conv.weight", c.weight, std::max(alignment, kSingle));
  expect_optional_pointer("conv.bias", c.bias, std::max(alignment, kSingle));
  check_pointer("conv.inputs", c.inputs, std::max(alignment, element));
}

void check_scalar_gates(const LayerStepParams& p) {
  const ScalarGates& g = p.gates;
  const int64_t element = dtype_bytes(p.projected_dtype);
  check_pointer("gates.strength", g.strength, element);
  expect_at_least("gates.stride", p.shape.heads, g.stride);
  if (p.shape.family == Family::kKimiDelta) return;
  if (p.shape.family == Family::kGatedDelta) check_pointer("gates.decay", g.decay, element);
  check_pointer("gates.bias", g.bias, kSingle);
  check_pointer("gates.a", g.a, kSingle);
  if (p.shape.family == Family::kMamba2 && !(g.min <= g.max))
    fail("gates.max: expected at least gates.min = ", g.min, ", got ", g.max);
}

void check_output_norm(const LayerStepParams& p, int64_t alignment) {
  const OutputNorm& n = p.norm;
  const int64_t values = p.shape.heads * p.shape.head_dim;
  expect_at_least("norm.group_dim", 1, n.group_dim);
  if (values % n.group_dim != 0)
    fail("norm.group_dim: expected a divisor of HV V = ", values, ", got ", n.group_dim);
  if (p.tokens == 0) return;
  expect_rows("norm.z", "norm.z_stride", n.z, p.projected_dtype, values, n.z_stride, alignment);
  expect_optional_pointer("norm.weight", n.weight, std::max(alignment, kSingle));
}

// What all ops that take tokens have in common.
void check_tokens(const RecurrentStepParams& p, bool ring, int64_t alignment) {
  check_shape(p.shape);
  check_sequences(p.batch, {});
  check_state(p.shape, p.state, ring, alignment);
  check_channel_gate(p.shape, p.channel_gate);
  expect_optional_pointer("rounding.seed", p.rounding.seed, alignof(uint64_t));
  expect_float("o_dtype", p.o_dtype);
  if (p.batch.sequences == 0) return;
  const RecurrentShape& s = p.shape;
  const DType dtype = p.state.activation_dtype;
  const int64_t values = s.heads * s.head_dim, keys = s.key_heads * s.state_dim;
  expect_rows("v", "v_stride", p.v, dtype, values, p.v_stride, alignment);
  expect_rows("k", "k_stride", p.k, dtype, keys, p.k_stride, alignment);
  expect_rows("q", "q_stride", p.q, dtype, keys, p.q_stride, alignment);
  check_pointer("b", p.b, kSingle);
  if (s.family == Family::kKimiDelta) {
    expect_rows("gate", "gate_stride", p.gate, dtype, s.heads * s.state_dim, p.gate_stride,
                alignment);
  } else {
    check_pointer("g", p.g, kSingle);
  }
  expect_optional_pointer("skip", p.skip, kSingle);
  if (p.z != nullptr) expect_rows("z", "z_stride", p.z, dtype, values, p.z_stride, alignment);
  check_pointer("o", p.o, std::max(alignment, dtype_bytes(p.o_dtype)));
}

void check_conv_inputs(const void* inputs, int64_t channels, DType dtype, int64_t alignment) {
  if (inputs == nullptr) return;
  check_pointer("conv_inputs", inputs, std::max(alignment, dtype_bytes(dtype)));
  expect_at_least("channels", 1, channels);
}

template <class Params>
void check_slots(const Params& p, BatchUse use, int64_t alignment) {
  check_shape(p.shape);
  check_sequences(p.batch, use);
  check_state(p.shape, p.state, false, alignment);
  check_conv_inputs(p.conv_inputs, p.channels, p.state.activation_dtype, alignment);
}

}  // namespace

void check_pointer(const char* name, const void* pointer, int64_t alignment) {
  if (pointer == nullptr) fail(name, ": expected memory, got a null pointer");
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % static_cast<uintptr_t>(alignment) == 0) return;
  fail(name, ": expected ", alignment, "-byte alignment, got an address of ",
       int64_t{1} << std::countr_zero(address), "-byte alignment");
}

void check_params(const RecurrentShape& shape, const RingConfig& ring) {
  check_shape(shape);
  check_ring(ring);
}

void check_params(const RecurrentStepParams& p, int64_t alignment) {
  check_tokens(p, p.route != Route::kConventional, alignment);
  check_route(p.route, p.batch);
}

void check_params(const RecurrentPrefillParams& p, int64_t alignment) {
  check_tokens(p, false, alignment);
  expect_null("batch.parent", p.batch.parent, "for a prefill");
}

void check_params(const SnapshotStepParams& p, int64_t alignment) {
  check_tokens(p, false, alignment);
  expect_null("batch.parent", p.batch.parent, "for snapshots");
  if (p.batch.sequences == 0) return;
  check_pointer("snapshots", p.snapshots,
                std::max(alignment, dtype_bytes(p.state.checkpoint_dtype)));
  check_pointer("source", p.source, alignof(int32_t));
}

void check_params(const RecurrentFoldParams& p, int64_t alignment) {
  check_shape(p.shape);
  check_sequences(p.batch, {.windows = false});
  check_state(p.shape, p.state, true, alignment);
  check_channel_gate(p.shape, p.channel_gate);
  expect_optional_pointer("rounding.seed", p.rounding.seed, alignof(uint64_t));
  expect_optional_pointer("target_slot", p.target_slot, alignof(int32_t));
}

void check_params(const ConvParams& p, int64_t alignment) {
  check_sequences(p.batch, {});
  expect_at_least("channels", 1, p.channels);
  expect_float("activation_dtype", p.activation_dtype);
  check_projected("x_dtype", p.x_dtype, p.activation_dtype);
  if (p.batch.sequences == 0) return;
  expect_rows("x", "x_stride", p.x, p.x_dtype, p.channels, p.x_stride,
              std::min(alignment, dtype_bytes(p.x_dtype)));
  check_pointer("weight", p.weight, kSingle);
  expect_optional_pointer("bias", p.bias, kSingle);
  const int64_t element = dtype_bytes(p.activation_dtype);
  check_pointer("inputs", p.inputs, std::max(alignment, element));
  check_pointer("y", p.y, std::max(alignment, element));
}

void check_params(const LayerStepParams& p, int64_t alignment) {
  check_shape(p.shape);
  check_sequences(p.batch, {});
  check_route(p.route, p.batch);
  check_state(p.shape, p.state, p.route != Route::kConventional, alignment);
  check_channel_gate(p.shape, p.channel_gate);
  check_projected("projected_dtype", p.projected_dtype, p.state.activation_dtype);
  expect_optional_pointer("rounding.seed", p.rounding.seed, alignof(uint64_t));
  expect_float("y_dtype", p.y_dtype);
  expect_at_least("tokens", 0, p.tokens);
  check_layer_conv(p, alignment);
  check_output_norm(p, alignment);
  if (p.tokens == 0) return;
  check_scalar_gates(p);
  if (p.shape.family == Family::kKimiDelta) {
    expect_rows("gate", "gate_stride", p.gate, p.state.activation_dtype,
                p.shape.heads * p.shape.state_dim, p.gate_stride, alignment);
  }
  expect_optional_pointer("skip", p.skip, kSingle);
  check_pointer("y", p.y, std::max(alignment, dtype_bytes(p.y_dtype)));
}

void check_params(const SlotClearParams& p, int64_t alignment) {
  check_slots(p, {.windows = false, .cursors = false}, alignment);
}

void check_params(const SlotCopyParams& p, int64_t alignment) {
  check_slots(p, {.windows = false, .cursors = false}, alignment);
  if (p.batch.sequences > 0) check_pointer("target_slot", p.target_slot, alignof(int32_t));
}

void check_params(const CompactParams& p, int64_t alignment) {
  check_slots(p, {}, alignment);
  if (p.batch.sequences == 0) return;
  check_pointer("path", p.path, alignof(int32_t));
  check_pointer("accepted", p.accepted, alignof(int32_t));
}

}  // namespace replayssm
