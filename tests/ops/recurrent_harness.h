// Drives the CPU recurrence over random sequences and schedules, beside the reference in double.
#pragma once

#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/thread_pool.h"
#include "ops/cpu/recurrent.h"
#include "ops/reference/recurrent.h"
#include "replay/cursor.h"

namespace replayssm::testing {

struct Case {
  RecurrentShape shape;
  DType activation = DType::kFloat32;
  DType checkpoint = DType::kFloat32;
};

inline std::string name(const Case& c) {
  return std::string(c.shape.family == Family::kMamba2 ? "mamba2" : "gdn") +
         " heads=" + std::to_string(c.shape.heads) + "/" + std::to_string(c.shape.key_heads) +
         " V=" + std::to_string(c.shape.head_dim) + " K=" + std::to_string(c.shape.state_dim) +
         " " + dtype_name(c.activation) + "/" + dtype_name(c.checkpoint);
}

inline const std::vector<Case>& cases() {
  constexpr auto m = Family::kMamba2, g = Family::kGatedDelta;
  constexpr auto f32 = DType::kFloat32, b16 = DType::kBFloat16, f16 = DType::kFloat16;
  static const std::vector<Case> all = {
      {{m, 6, 2, 64, 128}, f32, f32},  {{m, 4, 1, 80, 128}, b16, f32},
      {{m, 3, 3, 7, 1}, f32, f32},     {{m, 2, 1, 5, 7}, f16, f32},
      {{m, 4, 2, 16, 48}, f32, b16},   {{m, 2, 2, 33, 256}, b16, f16},
      {{g, 4, 2, 128, 128}, f32, f32}, {{g, 6, 2, 48, 32}, b16, f32},
      {{g, 2, 1, 7, 7}, f32, f32},     {{g, 3, 3, 9, 1}, f16, f32},
      {{g, 2, 2, 16, 96}, f32, f16},   {{g, 2, 1, 31, 112}, b16, b16},
      {{g, 2, 1, 16, 192}, f32, f32},  {{m, 2, 1, 17, 80}, f32, f32},
      {{g, 2, 1, 64, 64}, b16, f32},
  };
  return all;
}

// The inputs of one sequence, already rounded to the activation dtype.
struct Inputs {
  std::vector<float> v, k, q, b, g;  // [tokens, HV, V], [tokens, H, K] twice, [tokens, HV] twice
};

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
  return in;
}

// One token of one head as the reference takes it.
inline reference::Token token_of(const Case& c, const Inputs& in, int64_t t, int64_t head) {
  const auto& s = c.shape;
  const int64_t key_head = head / (s.heads / s.key_heads);
  const auto slice = [](const std::vector<float>& x, int64_t index, int64_t count) {
    return std::vector<double>(x.begin() + index * count, x.begin() + (index + 1) * count);
  };
  return {.v = slice(in.v, t * s.heads + head, s.head_dim),
          .k = slice(in.k, t * s.key_heads + key_head, s.state_dim),
          .q = slice(in.q, t * s.key_heads + key_head, s.state_dim),
          .b = in.b[t * s.heads + head],
          .g = in.g[t * s.heads + head]};
}

// A pool of slots in which everything that no sequence has written yet is NaN.
class Pool {
 public:
  Pool(const Case& c, const RingConfig& ring, int64_t slots) : case_(c), ring_(ring) {
    const auto& s = c.shape;
    const int64_t rows = slots * ring_rows(ring.buffer_len, ring.max_window);
    const int64_t act = dtype_bytes(c.activation);
    checkpoint.assign(slots * slot_elements() * dtype_bytes(c.checkpoint), 0xff);
    ring_v.assign(rows * s.heads * s.head_dim * act, 0xff);
    ring_k.assign(rows * s.key_heads * s.state_dim * act, 0xff);
    ring_b.assign(rows * s.heads, std::numeric_limits<float>::quiet_NaN());
    ring_g = ring_b;
    cursors.resize(slots, reset_cursor(ring));
  }

  int64_t slot_elements() const {
    return case_.shape.heads * case_.shape.head_dim * case_.shape.state_dim;
  }
  // Bytes of a slot's checkpoint.
  std::span<uint8_t> slot(int64_t slot) {
    const int64_t bytes = slot_elements() * dtype_bytes(case_.checkpoint);
    return std::span(checkpoint).subspan(slot * bytes, bytes);
  }
  std::vector<double> slot_values(int64_t s) {
    std::vector<double> values(slot_elements());
    dispatch_float(case_.checkpoint, [&]<class T>() {
      const T* data = reinterpret_cast<const T*>(slot(s).data());
      for (size_t i = 0; i < values.size(); ++i) values[i] = to_float(data[i]);
    });
    return values;
  }
  void clear(int64_t s) {
    for (uint8_t& byte : slot(s)) byte = 0;
    cursors[s] = reset_cursor(ring_);
  }
  RecurrentState state() {
    RecurrentState state;
    state.checkpoint = checkpoint.data();
    state.ring_v = ring_v.data();
    state.ring_k = ring_k.data();
    state.ring_b = ring_b.data();
    state.ring_g = ring_g.data();
    state.checkpoint_dtype = case_.checkpoint;
    state.activation_dtype = case_.activation;
    return state;
  }
  const RingConfig& ring() const { return ring_; }

  std::vector<uint8_t> checkpoint, ring_v, ring_k;
  std::vector<float> ring_b, ring_g;
  std::vector<Cursor> cursors;

 private:
  Case case_;
  RingConfig ring_;
};

// One row of a batch: tokens [begin, end) of a sequence, in a slot.
struct Window {
  const Inputs* inputs = nullptr;
  int64_t begin = 0, end = 0;
  int32_t slot = 0;
};

enum class Op { kStep, kPrefill };

// Runs one call over the windows; returns each window's outputs [tokens, HV, V]. Does not commit.
inline std::vector<std::vector<float>> run(const Case& c, Pool& pool, Op op, Route route,
                                           const std::vector<Window>& windows,
                                           ThreadPool& threads) {
  const auto& s = c.shape;
  Inputs packed;
  std::vector<int32_t> query_start{0}, slots;
  const auto append = [](const std::vector<float>& from, std::vector<float>& to, int64_t begin,
                         int64_t end, int64_t width) {
    to.insert(to.end(), from.begin() + begin * width, from.begin() + end * width);
  };
  for (const Window& w : windows) {
    append(w.inputs->v, packed.v, w.begin, w.end, s.heads * s.head_dim);
    append(w.inputs->k, packed.k, w.begin, w.end, s.key_heads * s.state_dim);
    append(w.inputs->q, packed.q, w.begin, w.end, s.key_heads * s.state_dim);
    append(w.inputs->b, packed.b, w.begin, w.end, s.heads);
    append(w.inputs->g, packed.g, w.begin, w.end, s.heads);
    query_start.push_back(query_start.back() + static_cast<int32_t>(w.end - w.begin));
    slots.push_back(w.slot);
    if (w.slot >= 0 && op == Op::kStep)
      begin_step(pool.cursors[w.slot], w.end - w.begin, pool.ring());
  }
  const auto activation = [&](const std::vector<float>& x) {
    std::vector<uint8_t> bytes(x.size() * dtype_bytes(c.activation));
    dispatch_float(c.activation, [&]<class T>() {
      for (size_t i = 0; i < x.size(); ++i)
        reinterpret_cast<T*>(bytes.data())[i] = from_float<T>(x[i]);
    });
    return bytes;
  };
  const auto v = activation(packed.v), k = activation(packed.k), q = activation(packed.q);
  std::vector<float> o(packed.v.size(), std::numeric_limits<float>::quiet_NaN());

  RecurrentPrefillParams p;
  p.shape = s;
  p.route = route;
  p.batch = {static_cast<int64_t>(windows.size()), query_start.data(), slots.data(),
             pool.cursors.data(), pool.ring()};
  p.state = pool.state();
  p.v = v.data();
  p.k = k.data();
  p.q = q.data();
  p.v_stride = s.heads * s.head_dim;
  p.k_stride = p.q_stride = s.key_heads * s.state_dim;
  p.b = packed.b.data();
  p.g = packed.g.data();
  p.o = o.data();
  Array<float> workspace(cpu::recurrent_workspace_bytes(s, pool.ring(), threads.size()) / 4);
  std::fill(workspace.begin(), workspace.end(), std::numeric_limits<float>::quiet_NaN());
  if (op == Op::kStep) {
    cpu::recurrent_step(p, workspace.data(), threads);
  } else {
    cpu::recurrent_prefill(p, workspace.data(), threads);
  }
  std::vector<std::vector<float>> outputs;
  for (size_t w = 0; w < windows.size(); ++w)
    outputs.emplace_back(o.begin() + query_start[w] * s.heads * s.head_dim,
                         o.begin() + query_start[w + 1] * s.heads * s.head_dim);
  return outputs;
}

inline void fold(const Case& c, Pool& pool, int32_t slot, ThreadPool& threads) {
  RecurrentFoldParams p;
  p.shape = c.shape;
  p.batch = {1, nullptr, &slot, pool.cursors.data(), pool.ring()};
  p.state = pool.state();
  Array<float> workspace(cpu::recurrent_workspace_bytes(c.shape, pool.ring(), threads.size()) / 4);
  cpu::recurrent_fold(p, workspace.data(), threads);
  commit_fold(pool.cursors[slot]);
}

// Reference outputs [tokens, HV, V] and final state [HV, V, K] of a whole sequence.
struct Expected {
  std::vector<double> o, state;
};
inline Expected expected(const Case& c, const Inputs& in, int64_t tokens) {
  const auto& s = c.shape;
  Expected e;
  e.o.resize(tokens * s.heads * s.head_dim);
  e.state.resize(s.heads * s.head_dim * s.state_dim);
  for (int64_t h = 0; h < s.heads; ++h) {
    const auto state =
        std::span(e.state).subspan(h * s.head_dim * s.state_dim, s.head_dim * s.state_dim);
    for (int64_t t = 0; t < tokens; ++t) {
      const auto token = token_of(c, in, t, h);
      reference::update(s.family, token, state);
      const auto o = reference::read(s.family, token, state);
      std::copy(o.begin(), o.end(), e.o.begin() + (t * s.heads + h) * s.head_dim);
    }
  }
  return e;
}

// ||actual - expected|| / ||expected||; NaN where anything is.
template <class A, class B>
double relative_error(const A& actual, const B& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += double{expected[i]} * expected[i];
  }
  return std::sqrt(error / (norm + 1e-30));
}

// A sum of n random fp32 products has a relative error of about sqrt(n) 2^-24; a token makes three
// of them (known value, write, read), and they live as long as the decay lets them, here some ten
// tokens, whose errors add like a random walk.
inline double fp32_tolerance(const Case& c) {
  return 4 * std::sqrt(static_cast<double>(c.shape.state_dim) + 16) * 0x1p-24;
}
// A 16-bit checkpoint adds its half ulp at every store.
inline double step_tolerance(const Case& c) {
  const double store = c.checkpoint == DType::kFloat32   ? 0
                       : c.checkpoint == DType::kFloat16 ? 0x1p-11
                                                         : 0x1p-8;
  return fp32_tolerance(c) + 4 * store;
}

}  // namespace replayssm::testing
