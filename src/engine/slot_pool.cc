#include "engine/slot_pool.h"

#include <numeric>

#include "core/check.h"
#include "model/model.h"
#include "replay/bytes.h"
#include "replay/cursor.h"

namespace replayssm {
namespace {

// Bytes of one slot's part in each of a recurrent layer's arrays.
struct LayerBytes {
  int64_t checkpoint, read_copy, read_scale, ring_v, ring_k, ring_b, ring_g, ring_gate, conv,
      snapshots;

  int64_t total() const {
    return checkpoint + read_copy + read_scale + ring_v + ring_k + ring_b + ring_g + ring_gate +
           conv + snapshots;
  }
};

LayerBytes layer_bytes(const ModelConfig& config, const RingConfig& ring, DType checkpoint_dtype,
                       DType activation_dtype, std::optional<DType> read_dtype, int64_t snapshots) {
  const RecurrentShape shape = recurrent_shape(config);
  const int64_t state_rows = shape.heads * shape.head_dim;
  const int64_t read_bytes = read_dtype ? dtype_bytes(*read_dtype) : 0;
  const int64_t rows = ring_rows(ring.buffer_len, ring.max_window);
  const int64_t element = dtype_bytes(activation_dtype);
  const int64_t scalars = rows * shape.heads * static_cast<int64_t>(sizeof(float));
  const bool per_column = shape.family == Family::kKimiDelta;  // decays
  return {.checkpoint = checkpoint_bytes(shape, checkpoint_dtype),
          .read_copy = state_elements(shape) * read_bytes,
          .read_scale = read_bytes == 1 ? state_rows * static_cast<int64_t>(sizeof(float)) : 0,
          .ring_v = rows * state_rows * element,
          .ring_k = rows * shape.key_heads * shape.state_dim * element,
          .ring_b = scalars,
          .ring_g = per_column ? 0 : scalars,
          .ring_gate = per_column ? rows * shape.heads * shape.state_dim * element : 0,
          .conv = conv_rows(ring.conv_kernel, ring.max_window) * conv_channels(config) * element,
          .snapshots = snapshots * checkpoint_bytes(shape, checkpoint_dtype)};
}

}  // namespace

void check_read_copy(DType read_dtype, DType checkpoint_dtype, Route route) {
  if (route == Route::kConventional)
    fail("read copy of ", dtype_name(read_dtype),
         ": expected a replay route, got conventional, which reads the state itself");
  if (dtype_bytes(read_dtype) >= dtype_bytes(checkpoint_dtype))
    fail("read copy: expected a type smaller than the state's ", dtype_name(checkpoint_dtype),
         ", got ", dtype_name(read_dtype));
}

int64_t SlotPool::bytes_per_slot(const ModelConfig& config, const RingConfig& ring,
                                 DType checkpoint_dtype, DType activation_dtype,
                                 std::optional<DType> read_dtype, int64_t snapshots) {
  const int64_t layers = config.recurrent_layers();
  if (layers == 0) return 0;
  return layers *
         layer_bytes(config, ring, checkpoint_dtype, activation_dtype, read_dtype, snapshots)
             .total();
}

SlotPool::SlotPool(const ModelConfig& config, const RingConfig& ring, DType checkpoint_dtype,
                   DType activation_dtype, int32_t slots, std::optional<DType> read_dtype,
                   Memory& memory, int64_t snapshots)
    : ring_(ring), memory_(memory), cursors_(slots, memory), free_(slots), taken_(slots, false) {
  REPLAYSSM_CHECK(slots >= 1 && ring.buffer_len >= 1 && ring.max_window >= 1, "slots=", slots,
                  " buffer_len=", ring.buffer_len, " max_window=", ring.max_window);
  REPLAYSSM_CHECK(ring.conv_kernel == config.conv_kernel, "ring has ", ring.conv_kernel,
                  " taps, model has ", config.conv_kernel);
  std::iota(free_.rbegin(), free_.rend(), 0);  // slot 0 is taken first
  const int64_t layers = config.recurrent_layers();
  if (layers == 0) return;
  const LayerBytes bytes =
      layer_bytes(config, ring, checkpoint_dtype, activation_dtype, read_dtype, snapshots);
  recurrent_.resize(layers);
  if (snapshots > 0) snapshots_.resize(layers);
  conv_inputs_.resize(layers);
  // Sets `member(layer)` to that layer's part.
  const auto array = [&]<class Member>(int64_t slot_bytes, Member member, bool is_ring = false) {
    if (slot_bytes == 0) return;
    constexpr int64_t kAlignment = 256;
    const int64_t stride = (slots * slot_bytes + kAlignment - 1) / kAlignment * kAlignment;
    const LayerMemory& part =
        arrays_.emplace_back(Buffer(layers * stride, memory), slot_bytes, stride, is_ring);
    bytes_ += layers * slots * slot_bytes;
    for (int64_t layer = 0; layer < layers; ++layer) {
      auto& pointer = member(layer);
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(part.memory.as() +
                                                                             layer * stride);
    }
  };
  array(bytes.checkpoint, [&](int64_t i) -> auto& { return recurrent_[i].checkpoint; });
  array(bytes.ring_v, [&](int64_t i) -> auto& { return recurrent_[i].ring_v; }, true);
  array(bytes.ring_k, [&](int64_t i) -> auto& { return recurrent_[i].ring_k; }, true);
  array(bytes.ring_b, [&](int64_t i) -> auto& { return recurrent_[i].ring_b; }, true);
  array(bytes.ring_g, [&](int64_t i) -> auto& { return recurrent_[i].ring_g; }, true);
  array(bytes.ring_gate, [&](int64_t i) -> auto& { return recurrent_[i].ring_gate; }, true);
  array(bytes.read_copy, [&](int64_t i) -> auto& { return recurrent_[i].read_copy.data; });
  array(bytes.read_scale, [&](int64_t i) -> auto& { return recurrent_[i].read_copy.scale; });
  array(bytes.snapshots, [&](int64_t i) -> auto& { return snapshots_[i]; }, true);
  array(bytes.conv, [&](int64_t i) -> auto& { return conv_inputs_[i]; });
  for (RecurrentState& state : recurrent_) {
    state.checkpoint_dtype = checkpoint_dtype;
    state.activation_dtype = activation_dtype;
    if (read_dtype) state.read_copy.dtype = *read_dtype;
  }
}

Cursor SlotPool::cursor(int32_t slot) const {
  Cursor cursor;
  memory_.read(&cursor, cursors_.data() + slot, sizeof cursor);
  return cursor;
}

void SlotPool::set_cursor(int32_t slot, const Cursor& cursor) {
  memory_.write(cursors_.data() + slot, &cursor, sizeof cursor);
}

int32_t SlotPool::acquire() {
  if (free_.empty()) return -1;
  const int32_t slot = free_.back();
  free_.pop_back();
  taken_[slot] = true;
  for (const LayerMemory& part : arrays_) {
    memory_.zero(part.memory.as() + slot * part.slot_bytes, part.slot_bytes, part.layer_stride,
                 std::ssize(recurrent_));
  }
  set_cursor(slot, reset_cursor(ring_));
  return slot;
}

void SlotPool::release(int32_t slot) {
  REPLAYSSM_CHECK(slot >= 0 && slot < slots() && taken_[slot], "slot=", slot);
  taken_[slot] = false;
  free_.push_back(slot);
}

int64_t SlotPool::snapshot_bytes() const {
  int64_t bytes = 0;
  for (const LayerMemory& part : arrays_) {
    if (!part.ring) bytes += part.slot_bytes * std::ssize(recurrent_);
  }
  return bytes;
}

void SlotPool::save_snapshot(int32_t slot, std::byte* to) {
  for (const LayerMemory& part : arrays_) {
    if (part.ring) continue;
    memory_.copy(to, part.slot_bytes, part.memory.as() + slot * part.slot_bytes, part.layer_stride,
                 part.slot_bytes, std::ssize(recurrent_));
    to += part.slot_bytes * std::ssize(recurrent_);
  }
}

void SlotPool::load_snapshot(int32_t slot, const std::byte* from, int64_t tokens) {
  for (const LayerMemory& part : arrays_) {
    if (part.ring) continue;
    memory_.copy(part.memory.as() + slot * part.slot_bytes, part.layer_stride, from,
                 part.slot_bytes, part.slot_bytes, std::ssize(recurrent_));
    from += part.slot_bytes * std::ssize(recurrent_);
  }
  Cursor cursor = reset_cursor(ring_);
  commit_prefill(cursor, tokens, ring_);
  set_cursor(slot, cursor);
}

void SlotPool::read_slot(int32_t slot, std::byte* host) const {
  for (const LayerMemory& part : arrays_) {
    for (int64_t layer = 0; layer < std::ssize(recurrent_); ++layer) {
      memory_.read(host, part.memory.as() + layer * part.layer_stride + slot * part.slot_bytes,
                   part.slot_bytes);
      host += part.slot_bytes;
    }
  }
  memory_.read(host, cursors_.data() + slot, sizeof(Cursor));
}

void SlotPool::write_slot(int32_t slot, const std::byte* host) {
  for (const LayerMemory& part : arrays_) {
    for (int64_t layer = 0; layer < std::ssize(recurrent_); ++layer) {
      memory_.write(part.memory.as() + layer * part.layer_stride + slot * part.slot_bytes, host,
                    part.slot_bytes);
      host += part.slot_bytes;
    }
  }
  memory_.write(cursors_.data() + slot, host, sizeof(Cursor));
}

}  // namespace replayssm
