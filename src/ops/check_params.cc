#include "ops/check_params.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

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
  const bool known = p.route == Route::kConventional || p.route == Route::kStateAndOutput ||
                     p.route == Route::kOutputOnly;
  if (!known) fail("route: expected one of the three, got ", int{uint8_t(p.route)});
  const bool ring = p.route != Route::kConventional;
  check_tokens(p, ring, alignment);
  if (!ring) expect_null("batch.parent", p.batch.parent, "with the conventional route");
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
  if (p.x_dtype != DType::kFloat32 && p.x_dtype != p.activation_dtype) {
    fail("x_dtype: expected float32 or activation_dtype = ", dtype_name(p.activation_dtype),
         ", got ", dtype_name(p.x_dtype));
  }
  if (p.batch.sequences == 0) return;
  expect_rows("x", "x_stride", p.x, p.x_dtype, p.channels, p.x_stride,
              std::min(alignment, dtype_bytes(p.x_dtype)));
  check_pointer("weight", p.weight, kSingle);
  expect_optional_pointer("bias", p.bias, kSingle);
  const int64_t element = dtype_bytes(p.activation_dtype);
  check_pointer("inputs", p.inputs, std::max(alignment, element));
  check_pointer("y", p.y, std::max(alignment, element));
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
