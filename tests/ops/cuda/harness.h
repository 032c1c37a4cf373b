// Drives the CUDA recurrence over the sequences and pools of the CPU's tests: a pool is mirrored on
// the device around every call.
#pragma once

#include <optional>

#include "ops/cuda/device_memory.h"
#include "ops/cuda/recurrent.h"
#include "ops/recurrent_inputs.h"
#include "ops/recurrent_oracle.h"
#include "ops/recurrent_pool.h"

namespace replayssm::testing {

// A pool's mirror.
class DevicePool {
 public:
  explicit DevicePool(Pool& pool) : pool_(pool) {
    skip_ = std::vector<float>();
    upload();
  }
  void upload() {
    size_t i = 0;
    for (PoolArray* array : pool_.arrays()) arrays_[i++] = array->bytes;
    cursors_ = pool_.cursors;
  }
  void download() {
    size_t i = 0;
    for (PoolArray* array : pool_.arrays()) arrays_[i++].download(array->bytes);
    cursors_.download(pool_.cursors);
  }
  RecurrentState state() const {
    RecurrentState s = pool_.state();
    s.checkpoint = arrays_[0].data();
    s.read_copy.data = arrays_[1].data();
    s.read_copy.scale = reinterpret_cast<float*>(arrays_[2].data());
    s.ring_v = arrays_[3].data();
    s.ring_k = arrays_[4].data();
    s.ring_b = reinterpret_cast<float*>(arrays_[5].data());
    s.ring_g = reinterpret_cast<float*>(arrays_[6].data());
    s.ring_gate = arrays_[7].data();
    return s;
  }
  Cursor* cursors() const { return cursors_.data(); }

 private:
  Pool& pool_;
  DeviceArray<uint8_t> arrays_[8];
  DeviceArray<Cursor> cursors_;
  DeviceArray<float> skip_;
};

// The arguments of one call and the device memory behind them. Tokens lie apart from each other by
// strides that are larger than a token, with NaN in between.
class DeviceCall {
 public:
  DeviceCall(const Case& c, const Pool& pool, const DevicePool& device,
             const std::vector<Window>& windows)
      : case_(c) {
    const auto& s = c.shape;
    std::vector<int32_t> slots;
    for (const Window& w : windows) {
      query_start.push_back(query_start.back() + static_cast<int32_t>(w.tokens()));
      slots.push_back(w.slot);
    }
    p.v_stride = pack(v_, windows, &Inputs::v, s.heads * s.head_dim);
    p.k_stride = pack(k_, windows, &Inputs::k, s.key_heads * s.state_dim);
    p.q_stride = pack(q_, windows, &Inputs::q, s.key_heads * s.state_dim);
    p.gate_stride = pack(gate_, windows, &Inputs::gate, s.heads * s.state_dim);
    p.z_stride = pack(z_, windows, &Inputs::z, s.heads * s.head_dim);
    b_ = gather(windows, &Inputs::b);
    g_ = gather(windows, &Inputs::g);
    std::vector<float> skip, scale, bias;
    for (int64_t h = 0; h < s.heads; ++h) {
      skip.push_back(skip_of(h));
      scale.push_back(channel_scale(h));
      for (int64_t k = 0; k < s.state_dim; ++k) bias.push_back(channel_bias(h, k));
    }
    skip_ = skip;
    scale_ = scale;
    bias_ = bias;
    query_start_ = query_start;
    slot_ = slots;
    parent_ = parents(windows);
    plan_ = std::vector<SequencePlan>(slots.size());
    o_ = std::vector<uint8_t>(query_start.back() * s.heads * s.head_dim * dtype_bytes(c.output),
                              0xff);

    p.shape = s;
    p.batch = {static_cast<int64_t>(windows.size()),
               query_start_.data(),
               slot_.data(),
               device.cursors(),
               pool.ring(),
               parent_.data()};
    // Calls of two sequences take them as they come.
    if (slots.size() != 2) p.batch.plan = plan_.data();
    p.state = device.state();
    p.v = v_.data();
    p.k = k_.data();
    p.q = q_.data();
    p.b = b_.data();
    if (c.kimi()) {
      p.gate = gate_.data();
      p.channel_gate = {scale_.data(), bias_.data(), c.lower_bound};
    } else {
      p.g = g_.data();
    }
    if (c.finish) {
      p.skip = skip_.data();
      p.z = z_.data();
    }
    if (c.rounding) {
      seeds_ = pool.seeds;
      p.rounding = {seeds_.data(), *c.rounding};
    }
    p.o = o_.data();
    p.o_dtype = c.output;
  }

  std::vector<uint8_t> output_bytes() const {
    std::vector<uint8_t> bytes;
    o_.download(bytes);
    return bytes;
  }
  // The outputs of window w, [tokens, HV, V].
  std::vector<float> outputs(size_t w) const {
    const auto bytes = output_bytes();
    const int64_t width = case_.shape.heads * case_.shape.head_dim;
    std::vector<float> out((query_start[w + 1] - query_start[w]) * width);
    dispatch_float(case_.output, [&]<class T>() {
      const T* from = reinterpret_cast<const T*>(bytes.data()) + query_start[w] * width;
      for (size_t i = 0; i < out.size(); ++i) out[i] = to_float(from[i]);
    });
    return out;
  }

  RecurrentStepParams p;
  std::vector<int32_t> query_start{0};

 private:
  // Returns the stride. Rows stay multiples of 16 bytes apart.
  int64_t pack(DeviceArray<uint8_t>& to, const std::vector<Window>& windows,
               std::vector<float> Inputs::* from, int64_t width) {
    const int64_t gap = 8;
    std::vector<uint8_t> bytes;
    dispatch_float(case_.activation, [&]<class T>() {
      bytes.assign((query_start.back() + 1) * (width + gap) * sizeof(T), 0xff);
      T* row = reinterpret_cast<T*>(bytes.data());
      for (const Window& w : windows) {
        for (int64_t t = w.begin; t < w.end; ++t, row += width + gap) {
          const auto& x = w.inputs->*from;
          for (int64_t i = 0; i < width && !x.empty(); ++i)
            row[i] = from_float<T>(x[t * width + i]);
        }
      }
    });
    to = bytes;
    return width + gap;
  }
  std::vector<float> gather(const std::vector<Window>& windows, std::vector<float> Inputs::* from) {
    const int64_t heads = case_.shape.heads;
    std::vector<float> to;
    for (const Window& w : windows) {
      if (w.tokens() == 0) continue;
      const auto& x = w.inputs->*from;
      to.insert(to.end(), x.begin() + w.begin * heads, x.begin() + w.end * heads);
    }
    return to;
  }
  static std::vector<int32_t> parents(const std::vector<Window>& windows) {
    std::vector<int32_t> parent;
    bool trees = false;
    for (const Window& w : windows) {
      trees |= !w.parent.empty();
      for (int64_t i = 0; i < w.tokens(); ++i)
        parent.push_back(w.parent.empty() ? static_cast<int32_t>(i) - 1 : w.parent[i]);
    }
    return trees ? parent : std::vector<int32_t>{};
  }

  Case case_;
  DeviceArray<int32_t> query_start_, slot_, parent_;
  DeviceArray<uint8_t> v_, k_, q_, gate_, z_, o_;
  DeviceArray<SequencePlan> plan_;
  DeviceArray<float> b_, g_, skip_, scale_, bias_;
  DeviceArray<uint64_t> seeds_;
};

inline void synchronize() { cuda::check_cuda(cudaDeviceSynchronize(), "kernel"); }

// Begins and runs one step over the windows; returns each window's outputs. Does not commit. The
// general kernel is not cut otherwise than it wants.
inline std::vector<std::vector<float>> run_once(const Case& c, Pool& pool, Route route,
                                                const std::vector<Window>& windows,
                                                const std::optional<cuda::LaunchConfig>& config) {
  DevicePool device(pool);
  DeviceCall call(c, pool, device, windows);
  call.p.route = route;
  cuda::begin_steps(call.p.batch, device.cursors(), nullptr);
  const cuda::Device current = cuda::current_device();
  if (config && cuda::step_kernel_config(call.p, current)) {
    const DeviceArray<uint8_t> workspace(
        std::vector<uint8_t>(cuda::recurrent_workspace_bytes(call.p, *config), 0xff));
    cuda::recurrent_step(call.p, workspace.data(), *config, nullptr);
  } else {
    cuda::recurrent_step(call.p, nullptr, current, nullptr);
  }
  synchronize();
  device.download();
  std::vector<std::vector<float>> outputs;
  for (size_t w = 0; w < windows.size(); ++w) outputs.push_back(call.outputs(w));
  return outputs;
}

// A launch of its own prepares what steps do not need states for: up to four heads of a key group
// together.
inline cuda::LaunchConfig prepared_launch(const RecurrentShape& shape) {
  const int group = static_cast<int>(shape.heads / shape.key_heads);
  return {.heads = group % 4 == 0   ? 4
                   : group % 2 == 0 ? 2
                                    : 1,
          .warps = 2,
          .preparing = 1 + group / 2 % 2};
}

inline bool same_bytes(Pool& x, Pool& y) {
  const auto a = x.arrays(), b = y.arrays();
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i]->bytes != b[i]->bytes) return false;
  return true;
}

// As many rows a warp as may be.
inline cuda::LaunchConfig ahead_launch(const RecurrentShape& shape, int warps) {
  cuda::LaunchConfig config{.warps = warps, .ahead = true};
  while (!cuda::cuts(shape, config)) ++config.slices;
  return config;
}

// As many blocks to a fold as may be.
inline cuda::LaunchConfig shared_fold_launch(const RecurrentShape& shape) {
  cuda::LaunchConfig config{.heads = shape.heads / shape.key_heads % 2 == 0 ? 2 : 1, .warps = 2};
  for (cuda::LaunchConfig next = config; cuda::cuts(shape, next); next.fold_blocks *= 2)
    config = next;
  return config;
}

// Of outputs that are sums of some hundred products in other orders; of the largest.
inline constexpr double kReordered = 1e-5;

// Takes the same steps otherwise cut, and expects the same bytes of them. Outputs may be rounded
// apart by a unit in the last place besides.
inline void expect_same(const Case& c, const Pool& before, Pool& after, Route route,
                        const std::vector<Window>& windows,
                        const std::vector<std::vector<float>>& outputs,
                        const cuda::LaunchConfig& config, double reordered) {
  Pool pool = before;
  const auto others = run_once(c, pool, route, windows, config);
  EXPECT_TRUE(same_bytes(pool, after)) << name(c) << " " << to_string(config);
  const double rounding = c.output == DType::kFloat32   ? 0
                          : c.output == DType::kFloat16 ? 0x1p-10
                                                        : 0x1p-7;
  for (size_t w = 0; w < windows.size(); ++w) {
    float most = 0;
    for (const float x : outputs[w]) most = std::max(most, std::fabs(x));
    for (size_t i = 0; i < outputs[w].size(); ++i)
      EXPECT_NEAR(others[w][i], outputs[w][i],
                  reordered * most + rounding * std::fabs(outputs[w][i]))
          << name(c) << " " << to_string(config) << " window " << w << " at " << i;
  }
}

// Where not told how, takes the step as is chosen for so small a batch; and in all other ways that
// there are besides.
inline std::vector<std::vector<float>> run(const Case& c, Pool& pool, Route route,
                                           const std::vector<Window>& windows,
                                           const std::optional<cuda::LaunchConfig>& config = {},
                                           double reordered = kReordered) {
  if (config) return run_once(c, pool, route, windows, config);
  const Pool before = pool;
  const auto outputs = run_once(c, pool, route, windows, {});
  if (route == Route::kConventional || !cuda::are_operands(c.activation)) return outputs;
  const auto compare = [&](const cuda::LaunchConfig& other) {
    expect_same(c, before, pool, route, windows, outputs, other, reordered);
  };
  if (route == Route::kOutputOnly &&
      cuda::can_prepare(c.shape.family, c.activation, pool.ring().max_window > 1))
    compare(prepared_launch(c.shape));
  if (c.shape.head_dim % cuda::kPassRows != 0) return outputs;
  for (const int warps : {1, 4}) compare(ahead_launch(c.shape, warps));
  compare(shared_fold_launch(c.shape));
  return outputs;
}

// Folds all of a slot into its checkpoint, or (a snapshot) into that of another slot.
inline void fold(const Case& c, Pool& pool, int32_t slot, std::optional<int32_t> target = {}) {
  DevicePool device(pool);
  DeviceCall call(c, pool, device, {{nullptr, 0, 0, slot, {}}});
  RecurrentFoldParams p;
  p.shape = c.shape;
  p.batch = call.p.batch;
  p.state = device.state();
  p.channel_gate = call.p.channel_gate;
  p.rounding = call.p.rounding;
  DeviceArray<int32_t> targets;
  if (target) {
    targets = std::vector<int32_t>{*target};
    p.target_slot = targets.data();
  }
  cuda::recurrent_fold(p, cuda::current_device(), nullptr);
  if (!target) cuda::commit_folds(p.batch, device.cursors(), nullptr);
  synchronize();
  device.download();
  if (target && *target >= 0) {
    pool.cursors[*target] = pool.cursors[slot];
    commit_fold(pool.cursors[*target]);
  }
}

// Decodes tokens [begin, end) of a sequence in `slot` by windows of `window` tokens, all accepted.
inline std::vector<float> decode(const Case& c, Pool& pool, Route route, const Inputs& in,
                                 int64_t begin, int64_t end, int64_t window, int32_t slot = 0,
                                 const std::optional<cuda::LaunchConfig>& config = {},
                                 double reordered = kReordered) {
  std::vector<float> o;
  for (int64_t t = begin; t < end; t += window) {
    const int64_t behind = std::min(end, t + window);
    const auto out = run(c, pool, route, {{&in, t, behind, slot, {}}}, config, reordered)[0];
    o.insert(o.end(), out.begin(), out.end());
    commit_step(pool.cursors[slot], behind - t, route);
  }
  return o;
}

// The fp32 checkpoint behind the first tokens of a sequence that is decoded one by one,
// conventional.
inline std::vector<uint8_t> conventional_checkpoint(Case c, const Inputs& in, int64_t tokens) {
  c.read_copy.reset();
  Pool pool(c, {}, 1);
  pool.clear(0);
  decode(c, pool, Route::kConventional, in, 0, tokens, 1);
  return pool.checkpoint.bytes;
}

// Half a unit of an element of a copy, of a row's largest, against the row's norm.
inline double copy_tolerance(const Case& c) {
  if (!c.read_copy) return 0;
  switch (*c.read_copy) {
    case DType::kFloat8E4M3: return 0x1p-4;
    case DType::kInt8: return 0x1p-6;
    default: return rounding_error(*c.read_copy);
  }
}

// What the step kernel takes, in every family, with every pair of types.
inline const std::vector<Case>& device_cases() {
  static const std::vector<Case> all = [] {
    constexpr auto m = Family::kMamba2, g = Family::kGatedDelta, k = Family::kKimiDelta;
    constexpr auto f32 = DType::kFloat32, b16 = DType::kBFloat16, f16 = DType::kFloat16;
    constexpr auto f8 = DType::kFloat8E4M3, i8 = DType::kInt8;
    return std::vector<Case>{
        {{m, 8, 2, 64, 128}, b16, f32},
        {{m, 4, 1, 80, 128}, b16, f32, b16, true},
        {{m, 2, 2, 16, 128}, f32, b16, f32, true},
        {{m, 4, 2, 64, 128}, f16, f16, f16},
        {{g, 4, 2, 128, 128}, b16, f32},
        {{g, 4, 2, 48, 128}, f32, f32, f32, true},
        {{g, 2, 1, 128, 128}, b16, f16, b16},
        {{g, 2, 2, 8, 128}, f16, b16, f16},
        {{k, 2, 2, 128, 128}, b16, f32},
        {{k, 4, 2, 64, 128}, f32, f32, f32, true},
        {{k, 2, 2, 72, 128}, f16, f16, f16, false, -5.0f},
        {{k, 2, 1, 32, 128}, b16, b16, b16, true},
        {{m, 8, 2, 64, 128}, b16, f32, f32, false, 0, f8},
        {{g, 4, 2, 128, 128}, b16, f32, f32, false, 0, f8},
        {{k, 2, 2, 128, 128}, b16, f32, f32, false, 0, f8},
        {{m, 4, 1, 80, 128}, b16, f32, f32, true, 0, i8},
        {{g, 4, 2, 64, 128}, f16, b16, f32, false, 0, i8},
        {{k, 2, 1, 64, 128}, f16, f32, f32, false, 0, i8},
        {{m, 4, 1, 64, 128}, b16, f16, f32, false, 0, f8},
        {{g, 2, 1, 64, 128}, b16, b16, f32, false, 0, f8},
    };
  }();
  return all;
}

// And what it leaves to the general one: sizes, read copies, stochastic rounding.
inline const std::vector<Case>& step_cases() {
  static const std::vector<Case> all = [] {
    constexpr auto m = Family::kMamba2, g = Family::kGatedDelta, k = Family::kKimiDelta;
    constexpr auto f32 = DType::kFloat32, b16 = DType::kBFloat16, f16 = DType::kFloat16;
    constexpr auto f8 = DType::kFloat8E4M3, i8 = DType::kInt8;
    const std::vector<Case> general{
        {{m, 9, 1, 5, 7}, f16, f32},
        {{m, 4, 2, 64, 64}, b16, f32, b16, true},
        {{m, 2, 2, 33, 256}, b16, f16},
        {{g, 2, 1, 7, 7}, f32, f32},
        {{g, 2, 2, 48, 96}, b16, f32, f32, true},
        {{g, 2, 1, 31, 112}, b16, b16},
        {{g, 4, 2, 64, 256}, b16, f32},
        {{k, 2, 1, 1, 192}, b16, f32},
        {{k, 2, 2, 64, 64}, f16, f16, f32, false, -5.0f},
        {{k, 1, 1, 6, 300}, f32, f32},
        {{g, 3, 3, 9, 1}, f16, f32},
        {{m, 4, 1, 80, 128}, b16, f32, f32, true, 0, f16},
        {{g, 2, 1, 64, 48}, b16, f32, f32, false, 0, i8},
        {{k, 2, 1, 16, 128}, f32, f32, f32, false, 0, f8},
        {{g, 2, 1, 24, 64}, f32, b16, f32, false, 0, b16},
        {{m, 2, 1, 16, 128}, b16, b16, f32, false, 0, {}, 7},
        {{g, 2, 1, 9, 20}, b16, f16, f32, false, 0, {}, 7},
        {{k, 2, 1, 9, 64}, b16, b16, f32, false, 0, i8, 7},
    };
    std::vector<Case> list = device_cases();
    list.insert(list.end(), general.begin(), general.end());
    return list;
  }();
  return all;
}

}  // namespace replayssm::testing
