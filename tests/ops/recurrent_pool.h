// A pool of slots in which everything that no sequence has written is NaN.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "ops/cpu/recurrent.h"
#include "ops/recurrent_inputs.h"
#include "replay/cursor.h"

namespace replayssm::testing {

// One array of a pool. A byte of 0xff everywhere is NaN in every floating-point type.
struct PoolArray {
  std::vector<uint8_t> bytes;
  int64_t slot_bytes = 0;

  void allocate(int64_t slots, int64_t bytes_of_slot) {
    slot_bytes = bytes_of_slot;
    bytes.assign(slots * slot_bytes, 0xff);
  }
  std::span<uint8_t> slot(int64_t s) {
    return std::span(bytes).subspan(s * slot_bytes, slot_bytes);
  }
  void* data() { return bytes.empty() ? nullptr : bytes.data(); }
};

class Pool {
 public:
  Pool(const Case& c, const RingConfig& ring, int64_t slots)
      : cursors(slots, reset_cursor(ring)), seeds(slots, 1), case_(c), ring_(ring) {
    const auto& s = c.shape;
    const int64_t rows = ring_rows(ring.buffer_len, ring.max_window);
    const int64_t act = dtype_bytes(c.activation), single = sizeof(float);
    checkpoint.allocate(slots, elements() * dtype_bytes(c.checkpoint));
    if (c.read_copy) read_copy.allocate(slots, elements() * dtype_bytes(*c.read_copy));
    if (scaled()) read_scale.allocate(slots, s.heads * s.head_dim * single);
    ring_v.allocate(slots, rows * s.heads * s.head_dim * act);
    ring_k.allocate(slots, rows * s.key_heads * s.state_dim * act);
    ring_b.allocate(slots, rows * s.heads * single);
    if (c.kimi()) {
      ring_gate.allocate(slots, rows * s.heads * s.state_dim * act);
    } else {
      ring_g.allocate(slots, rows * s.heads * single);
    }
    for (int64_t h = 0; h < s.heads; ++h) {
      skip_.push_back(skip_of(h));
      scale_.push_back(channel_scale(h));
      for (int64_t k = 0; k < s.state_dim; ++k) bias_.push_back(channel_bias(h, k));
    }
  }

  int64_t elements() const {
    return case_.shape.heads * case_.shape.head_dim * case_.shape.state_dim;
  }
  const RingConfig& ring() const { return ring_; }
  bool scaled() const { return case_.read_copy && dtype_bytes(*case_.read_copy) == 1; }

  std::array<PoolArray*, 8> arrays() {
    return {&checkpoint, &read_copy, &read_scale, &ring_v, &ring_k, &ring_b, &ring_g, &ring_gate};
  }
  // What a slot's checkpoint holds.
  std::span<uint8_t> slot(int64_t s) { return checkpoint.slot(s); }
  std::vector<double> slot_values(int64_t s) {
    std::vector<double> values(elements());
    dispatch_float(case_.checkpoint, [&]<class T>() {
      const T* data = reinterpret_cast<const T*>(slot(s).data());
      for (size_t i = 0; i < values.size(); ++i) values[i] = to_float(data[i]);
    });
    return values;
  }

  // An empty sequence moves in.
  void clear(int64_t s) {
    for (PoolArray* array : {&checkpoint, &read_copy, &read_scale})
      std::ranges::fill(array->slot(s), 0);
    cursors[s] = reset_cursor(ring_);
    poison_ring(s);
  }
  // Every ring row that holds nothing becomes NaN.
  void poison_ring(int64_t s) {
    const int64_t rows = ring_rows(ring_.buffer_len, ring_.max_window);
    for (PoolArray* array : {&ring_v, &ring_k, &ring_b, &ring_g, &ring_gate}) {
      const int64_t row_bytes = array->slot_bytes / rows;
      for (int64_t j = cursors[s].ring_count; j < rows; ++j) {
        const int64_t row = (cursors[s].ring_start + j) % rows;
        std::ranges::fill(array->slot(s).subspan(row * row_bytes, row_bytes), 0xff);
      }
    }
  }
  // All that a slot holds, one array behind another.
  std::vector<uint8_t> contents(int64_t s) {
    std::vector<uint8_t> all;
    for (PoolArray* array : arrays()) {
      const auto bytes = array->slot(s);
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  // The definition of compaction: row path[i] of the window becomes its row i.
  void move_rows(int64_t s, const std::vector<int64_t>& path) {
    const int64_t rows = ring_rows(ring_.buffer_len, ring_.max_window);
    const int64_t first = cursors[s].ring_start + cursors[s].ring_count;
    for (PoolArray* array : {&ring_v, &ring_k, &ring_b, &ring_g, &ring_gate}) {
      const int64_t row_bytes = array->slot_bytes / rows;
      if (row_bytes == 0) continue;  // not kept for this family
      for (size_t i = 0; i < path.size(); ++i) {
        const auto at = [&](int64_t row) { return (first + row) % rows * row_bytes; };
        std::memmove(array->slot(s).data() + at(static_cast<int64_t>(i)),
                     array->slot(s).data() + at(path[i]), row_bytes);
      }
    }
  }
  bool untouched(int64_t s) {
    return std::ranges::all_of(contents(s), [](uint8_t byte) { return byte == 0xff; });
  }

  RecurrentState state() {
    RecurrentState state;
    state.checkpoint = checkpoint.data();
    state.ring_v = ring_v.data();
    state.ring_k = ring_k.data();
    state.ring_b = static_cast<float*>(ring_b.data());
    state.ring_g = static_cast<float*>(ring_g.data());
    state.ring_gate = ring_gate.data();
    state.checkpoint_dtype = case_.checkpoint;
    state.activation_dtype = case_.activation;
    if (case_.read_copy)
      state.read_copy = {read_copy.data(), static_cast<float*>(read_scale.data()),
                         *case_.read_copy};
    return state;
  }
  // Scratch memory of a call, NaN again at each.
  float* workspace(int threads) {
    const int64_t floats = cpu::recurrent_workspace_bytes(case_.shape, ring_, threads) /
                           static_cast<int64_t>(sizeof(float));
    if (!workspace_ || workspace_->size() < floats)
      workspace_ = std::make_shared<Array<float>>(floats);
    std::ranges::fill(*workspace_, kNaN);
    return workspace_->data();
  }
  ChannelGate channel_gate() const {
    if (!case_.kimi()) return {};
    return {scale_.data(), bias_.data(), case_.lower_bound};
  }
  const float* skip() const { return skip_.data(); }
  StochasticRounding rounding() const {
    if (!case_.rounding) return {};
    return {seeds.data(), *case_.rounding};
  }

  PoolArray checkpoint, read_copy, read_scale, ring_v, ring_k, ring_b, ring_g, ring_gate;
  std::vector<Cursor> cursors;
  std::vector<uint64_t> seeds;

 private:
  Case case_;
  RingConfig ring_;
  std::vector<float> skip_, scale_, bias_;
  std::shared_ptr<Array<float>> workspace_;
};

}  // namespace replayssm::testing
