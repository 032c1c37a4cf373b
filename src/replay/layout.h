// The arrays that a layer keeps per slot, as memory: what clearing, copying and compacting a slot
// have in common on every backend.
#pragma once

#include <array>
#include <cstdint>

#include "replay/cursor.h"
#include "replayssm/ops.h"

namespace replayssm {

// [slots, rows, row_bytes]; null data: the layer has none.
struct LayerArray {
  enum class Kind : uint8_t { kState, kRing, kConv };

  void* data = nullptr;
  Kind kind = Kind::kState;
  int64_t rows = 1;  // of a ring: the row of a token is its counter modulo this
  int64_t row_bytes = 0;

  constexpr int64_t slot_bytes() const { return rows * row_bytes; }
  // Bytes from `data` to the row of a slot's token.
  constexpr int64_t offset(int64_t slot, int64_t counter) const {
    return (slot * rows + counter % rows) * row_bytes;
  }
  char* row(int64_t slot, int64_t counter) const {
    return static_cast<char*>(data) + offset(slot, counter);
  }
};

inline std::array<LayerArray, 9> layer_arrays(const RecurrentShape& shape, const RingConfig& ring,
                                              const RecurrentState& state, void* conv_inputs,
                                              int64_t channels) {
  using Kind = LayerArray::Kind;
  constexpr auto kSingle = static_cast<int64_t>(sizeof(float));
  const int64_t values = shape.heads * shape.head_dim, keys = shape.key_heads * shape.state_dim;
  const int64_t element = dtype_bytes(state.activation_dtype);
  const int64_t rows = ring_rows(ring.buffer_len, ring.max_window);
  const auto in_state = [](void* data, int64_t bytes) {
    return LayerArray{data, Kind::kState, 1, bytes};
  };
  const auto in_ring = [&](void* data, int64_t bytes) {
    return LayerArray{data, Kind::kRing, rows, bytes};
  };
  return {
      in_state(state.checkpoint, values * shape.state_dim * dtype_bytes(state.checkpoint_dtype)),
      in_state(state.read_copy.data, values * shape.state_dim * dtype_bytes(state.read_copy.dtype)),
      in_state(state.read_copy.scale, values * kSingle),
      in_ring(state.ring_v, values * element),
      in_ring(state.ring_k, keys * element),
      in_ring(state.ring_b, shape.heads * kSingle),
      in_ring(state.ring_g, shape.heads * kSingle),
      in_ring(state.ring_gate, shape.heads * shape.state_dim * element),
      LayerArray{conv_inputs, Kind::kConv, conv_rows(ring.conv_kernel, ring.max_window),
                 channels * element}};
}

}  // namespace replayssm
