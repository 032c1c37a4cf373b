// Drives layer steps of any backend over random sequences.
#pragma once

#include "ops/layer_inputs.h"
#include "ops/recurrent_pool.h"
#include "replay/cursor.h"

namespace replayssm::testing {

// A pool and the convolution's inputs beside it.
struct LayerPool {
  LayerPool(const LayerCase& c, RingConfig ring, int64_t slots)
      : LayerPool(c, slots, [&] {
          ring.conv_kernel = c.conv_kernel;
          return ring;
        }()) {}

  // An empty sequence moves in; counters may start anywhere.
  void clear(int64_t slot, int64_t start = 0) {
    pool.clear(slot);
    pool.cursors[slot].ring_start += start;
    std::ranges::fill(conv.slot(slot), 0);
    poison(slot);
  }
  // Every row that no committed token needs becomes NaN.
  void poison(int64_t slot) {
    pool.poison_ring(slot);
    for (int64_t i = 0; i < pool.ring().max_window; ++i) std::ranges::fill(conv_row(slot, i), 0xff);
  }
  // Commits the tokens of a path of the window: the definition of compaction.
  void accept(int64_t slot, const std::vector<int64_t>& path, Route route) {
    pool.move_rows(slot, path);
    for (size_t i = 0; i < path.size(); ++i) {
      const auto from = conv_row(slot, path[i]);
      std::memmove(conv_row(slot, static_cast<int64_t>(i)).data(), from.data(), from.size());
    }
    commit_step(pool.cursors[slot], std::ssize(path), route);
  }
  std::vector<uint8_t> contents(int64_t slot) {
    auto all = pool.contents(slot);
    const auto inputs = conv.slot(slot);
    all.insert(all.end(), inputs.begin(), inputs.end());
    return all;
  }

  Pool pool;
  PoolArray conv;

 private:
  LayerPool(const LayerCase& c, int64_t slots, const RingConfig& ring)
      : pool(c.base, ring, slots),
        rows_(conv_rows(ring.conv_kernel, ring.max_window)),
        row_bytes_(c.channels() * dtype_bytes(c.base.activation)) {
    conv.allocate(slots, rows_ * row_bytes_);
  }
  // Of the token i behind the last committed one.
  std::span<uint8_t> conv_row(int64_t slot, int64_t i) {
    const Cursor& cursor = pool.cursors[slot];
    const int64_t row = (cursor.ring_start + cursor.ring_count + i) % rows_;
    return conv.slot(slot).subspan(row * row_bytes_, row_bytes_);
  }

  int64_t rows_, row_bytes_;
};

struct LayerWindow {
  const LayerInputs* inputs = nullptr;
  int64_t begin = 0, end = 0;
  int32_t slot = 0;
  std::vector<int32_t> parent;

  int64_t tokens() const { return end - begin; }
};

// The arrays of one call on the host. Tokens lie apart by strides that are larger than a token,
// with NaN in between; one token more than windows have lies in front of them and one or more
// behind.
class LayerCall {
 public:
  // capacity: rows that x, y and the like have at least.
  LayerCall(const LayerCase& c, const std::vector<LayerWindow>& windows, int64_t capacity = 0)
      : constants(c), case_(c) {
    bool trees = false;
    for (const LayerWindow& w : windows) {
      query_start.push_back(query_start.back() + static_cast<int32_t>(w.tokens()));
      slot.push_back(w.slot);
      trees |= !w.parent.empty();
    }
    if (trees) {
      parent.push_back(-1);
      for (const LayerWindow& w : windows)
        for (int64_t i = 0; i < w.tokens(); ++i)
          parent.push_back(w.parent.empty() ? static_cast<int32_t>(i) - 1 : w.parent[i]);
    }
    tokens_ = std::max<int64_t>(capacity, query_start.back() + 1);
    const auto& s = c.base.shape;
    pack(x, windows, &LayerInputs::x, c.channels(), c.projected);
    pack(strength, windows, &LayerInputs::strength, s.heads, c.projected);
    pack(decay, windows, &LayerInputs::decay, s.heads, c.projected);
    pack(gate, windows, &LayerInputs::gate, s.heads * s.state_dim, c.base.activation);
    pack(z, windows, &LayerInputs::z, c.values(), c.projected);
    y.assign(tokens_ * c.values() * dtype_bytes(c.base.output), 0xff);
  }

  // place(vector) gives the memory that the backend sees of an array; the pool's is given.
  template <class Place>
  LayerStepParams params(const Place& place, const RingConfig& ring, const RecurrentState& state,
                         const Cursor* cursors, void* conv_inputs) {
    const auto& s = case_.base.shape;
    LayerStepParams p;
    p.shape = s;
    p.batch = {std::ssize(slot), place(query_start), place(slot), cursors, ring, place(parent)};
    p.state = state;
    p.tokens = tokens_;
    p.projected_dtype = case_.projected;
    p.conv = {.channels = case_.channels(),
              .v = first_value(case_),
              .k = first_key(case_),
              .q = first_query(case_),
              .x = place(x),
              .x_stride = case_.channels() + kGap,
              .weight = place(constants.conv_weight),
              .bias = place(constants.conv_bias),
              .inputs = conv_inputs};
    p.gates = {.strength = place(strength),
               .decay = place(decay),
               .stride = s.heads + kGap,
               .bias = place(constants.gate_bias),
               .a = place(constants.a),
               .min = kLeastStrength,
               .max = kMostStrength};
    if (case_.base.kimi()) {
      p.gate = place(gate);
      p.gate_stride = s.heads * s.state_dim + kGap;
      p.channel_gate = {place(constants.channel_scale), place(constants.channel_bias),
                        case_.base.lower_bound};
    }
    p.skip = place(constants.skip);
    p.norm = {.z = place(z),
              .z_stride = case_.values() + kGap,
              .weight = place(constants.norm_weight),
              .group_dim = case_.group_dim,
              .weight_per_group = case_.weight_per_group,
              .gate_first = case_.gate_first,
              .activation = case_.sigmoid ? GateActivation::kSigmoid : GateActivation::kSilu,
              .eps = kNormEps};
    p.y = place(y);
    p.y_dtype = case_.base.output;
    return p;
  }

  // The outputs of each window, [tokens, HV, V]; those of no window must be as they were.
  std::vector<std::vector<float>> outputs(const std::vector<uint8_t>& bytes) const {
    const int64_t width = case_.values(), row = width * dtype_bytes(case_.base.output);
    EXPECT_TRUE(std::all_of(bytes.begin(), bytes.begin() + row, untouched));
    EXPECT_TRUE(std::all_of(bytes.begin() + query_start.back() * row, bytes.end(), untouched));
    std::vector<std::vector<float>> all;
    for (size_t w = 0; w + 1 < query_start.size(); ++w) {
      std::vector<float> out((query_start[w + 1] - query_start[w]) * width);
      dispatch_float(case_.base.output, [&]<class T>() {
        const T* from = reinterpret_cast<const T*>(bytes.data()) + query_start[w] * width;
        for (size_t i = 0; i < out.size(); ++i) out[i] = to_float(from[i]);
      });
      all.push_back(out);
    }
    return all;
  }

  LayerConstants constants;
  std::vector<int32_t> query_start{1}, slot, parent;
  std::vector<uint8_t> x, strength, decay, gate, z, y;

 private:
  static constexpr int64_t kGap = 8;
  static bool untouched(uint8_t byte) { return byte == 0xff; }

  void pack(std::vector<uint8_t>& to, const std::vector<LayerWindow>& windows,
            std::vector<float> LayerInputs::* from, int64_t width, DType dtype) const {
    dispatch_float(dtype, [&]<class T>() {
      to.assign(tokens_ * (width + kGap) * sizeof(T), 0xff);
      T* row = reinterpret_cast<T*>(to.data()) + width + kGap;
      for (const LayerWindow& w : windows) {
        for (int64_t t = w.begin; t < w.end; ++t, row += width + kGap) {
          if (!w.inputs) continue;
          const auto& values = w.inputs->*from;
          for (int64_t i = 0; i < width && !values.empty(); ++i)
            row[i] = from_float<T>(values[t * width + i]);
        }
      }
    });
  }

  LayerCase case_;
  int64_t tokens_ = 0;
};

// Decodes 40 tokens by random windows of which random paths are accepted, and compares every output
// with the definition. run(pool, route, windows) begins and runs a step.
template <class Run>
void expect_definition(const LayerCase& c, Route route, int32_t max_window, bool trees, Run&& run) {
  SCOPED_TRACE(name(c) + " " + route_name(route) + " T=" + std::to_string(max_window));
  std::mt19937 random(7);
  LayerPool pool(c, {.buffer_len = 7, .max_window = max_window}, 2);
  pool.clear(1, 5);
  const reference::Layer layer = reference_layer(c);
  reference::LayerSequence sequence(layer);
  const auto in = layer_inputs(c, 40 + max_window, 3);
  std::vector<double> want;
  std::vector<float> got;
  for (int64_t t = 0; t < 40;) {
    const auto count = static_cast<int32_t>(1 + random() % max_window);
    const auto parent = trees ? random_tree(random, count) : reference::chain(count);
    const auto o = run(pool, route,
                       std::vector<LayerWindow>{
                           {&in, t, t + count, 1, trees ? parent : std::vector<int32_t>()}})[0];
    got.insert(got.end(), o.begin(), o.end());
    const auto tokens = layer_tokens(c, in, t, t + count);
    for (const auto& values : sequence.outputs(tokens, parent))
      want.insert(want.end(), values.begin(), values.end());
    // A conventional step has stored all of its window.
    const auto last = route == Route::kConventional
                          ? count - 1
                          : static_cast<int32_t>(random() % (count + 1)) - 1;
    const auto path = last < 0 ? std::vector<int64_t>() : reference::path_to(parent, last);
    pool.accept(1, path, route);
    pool.poison(1);
    for (const int64_t i : path) sequence.commit(tokens[i]);
    t += count;
  }
  EXPECT_LT(relative_error(got, want), layer_tolerance(c));
  EXPECT_TRUE(pool.pool.untouched(0));
}

// Windows of several lengths, padding whose inputs are NaN, and an idle slot in one batch: each
// gives the bits that it gives alone.
template <class Run>
void expect_independence(const LayerCase& c, Route route, int32_t max_window, Run&& run) {
  SCOPED_TRACE(name(c) + " " + route_name(route) + " T=" + std::to_string(max_window));
  std::mt19937 random(11);
  const RingConfig ring{.buffer_len = 5, .max_window = max_window};
  LayerPool alone(c, ring, 2), together(c, ring, 4);
  for (const int slot : {0, 1}) alone.clear(slot);
  for (const int slot : {1, 3}) together.clear(slot);
  const auto in = layer_inputs(c, 30 + max_window, 5), other = layer_inputs(c, 30 + max_window, 6);
  for (int64_t t = 0, u = 0; t < 30 && u < 30;) {
    const int64_t a = 1 + random() % max_window, b = 1 + random() % max_window;
    const auto batch = run(together, route,
                           std::vector<LayerWindow>{{&other, u, u + b, 1, {}},
                                                    {nullptr, 0, max_window, -1, {}},
                                                    {&in, t, t + a, 3, {}},
                                                    {&in, 0, 0, 2, {}}});
    EXPECT_EQ(run(alone, route, std::vector<LayerWindow>{{&in, t, t + a, 0, {}}})[0], batch[2]);
    EXPECT_EQ(run(alone, route, std::vector<LayerWindow>{{&other, u, u + b, 1, {}}})[0], batch[0]);
    EXPECT_EQ(std::ranges::count(batch[1], 0.0f), std::ssize(batch[1]));
    const auto whole = [](int64_t tokens) {
      std::vector<int64_t> path(tokens);
      std::iota(path.begin(), path.end(), 0);
      return path;
    };
    alone.accept(0, whole(a), route);
    alone.accept(1, whole(b), route);
    together.accept(3, whole(a), route);
    together.accept(1, whole(b), route);
    t += a, u += b;
  }
  EXPECT_EQ(alone.contents(0), together.contents(3));
  EXPECT_EQ(alone.contents(1), together.contents(1));
  for (const int unused : {0, 2}) EXPECT_TRUE(together.pool.untouched(unused));
}

}  // namespace replayssm::testing
