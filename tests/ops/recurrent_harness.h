// Drives the CPU recurrence over random sequences and schedules.
#pragma once

#include <cmath>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/thread_pool.h"
#include "ops/cpu/recurrent.h"
#include "ops/recurrent_inputs.h"
#include "ops/recurrent_pool.h"
#include "replay/cursor.h"

namespace replayssm::testing {

enum class Op { kStep, kPrefill };

// The arguments of one call and the memory behind them. Tokens lie apart from each other by strides
// that are larger than a token, with NaN in between (pitfalls 11: strides assumed contiguous).
class Call {
 public:
  Call(const Case& c, Pool& pool, const std::vector<Window>& windows, int threads) : case_(c) {
    const auto& s = c.shape;
    for (const Window& w : windows) {
      query_start_.push_back(query_start_.back() + static_cast<int32_t>(w.tokens()));
      slot_.push_back(w.slot);
    }
    const int64_t tokens = query_start_.back();
    p.v_stride = pack(v_, windows, &Inputs::v, s.heads * s.head_dim, 3);
    p.k_stride = pack(k_, windows, &Inputs::k, s.key_heads * s.state_dim, 1);
    p.q_stride = pack(q_, windows, &Inputs::q, s.key_heads * s.state_dim, 2);
    p.gate_stride = pack(gate_, windows, &Inputs::gate, s.heads * s.state_dim, 5);
    p.z_stride = pack(z_, windows, &Inputs::z, s.heads * s.head_dim, 4);
    gather(b_, windows, &Inputs::b);
    gather(g_, windows, &Inputs::g);
    make_parents(windows);
    o_.assign(tokens * s.heads * s.head_dim * dtype_bytes(c.output), 0xff);
    workspace_ = pool.workspace(threads);

    p.shape = s;
    p.batch = {static_cast<int64_t>(windows.size()),
               query_start_.data(),
               slot_.data(),
               pool.cursors.data(),
               pool.ring(),
               parent_.empty() ? nullptr : parent_.data()};
    p.state = pool.state();
    p.v = v_.data();
    p.k = k_.data();
    p.q = q_.data();
    p.b = b_.data();
    if (s.family == Family::kKimiDelta) {
      p.gate = gate_.data();
      p.channel_gate = pool.channel_gate();
    } else {
      p.g = g_.data();
    }
    if (c.finish) {
      p.skip = pool.skip();
      p.z = z_.data();
    }
    p.rounding = pool.rounding();
    p.o = o_.data();
    p.o_dtype = c.output;
  }

  float* workspace() { return workspace_; }
  // The outputs of window w, [tokens, HV, V].
  std::vector<float> outputs(size_t w) const {
    const int64_t width = case_.shape.heads * case_.shape.head_dim;
    std::vector<float> out((query_start_[w + 1] - query_start_[w]) * width);
    dispatch_float(case_.output, [&]<class T>() {
      const T* from = reinterpret_cast<const T*>(o_.data()) + query_start_[w] * width;
      for (size_t i = 0; i < out.size(); ++i) out[i] = to_float(from[i]);
    });
    return out;
  }

  RecurrentPrefillParams p;

 private:
  // Returns the stride.
  int64_t pack(std::vector<uint8_t>& to, const std::vector<Window>& windows,
               std::vector<float> Inputs::* from, int64_t width, int64_t gap) {
    dispatch_float(case_.activation, [&]<class T>() {
      to.assign((query_start_.back() * (width + gap) + 1) * sizeof(T), 0xff);
      T* row = reinterpret_cast<T*>(to.data());
      for (const Window& w : windows) {
        for (int64_t t = w.begin; t < w.end; ++t, row += width + gap) {
          const auto& x = w.inputs->*from;
          for (int64_t i = 0; i < width && !x.empty(); ++i)
            row[i] = from_float<T>(x[t * width + i]);
        }
      }
    });
    return width + gap;
  }
  void gather(std::vector<float>& to, const std::vector<Window>& windows,
              std::vector<float> Inputs::* from) {
    const int64_t heads = case_.shape.heads;
    for (const Window& w : windows) {
      const auto& x = w.inputs->*from;
      to.insert(to.end(), x.begin() + w.begin * heads, x.begin() + w.end * heads);
    }
  }
  void make_parents(const std::vector<Window>& windows) {
    for (const Window& w : windows) {
      if (w.parent.empty()) continue;
      parent_.clear();
      for (const Window& each : windows) {
        for (int64_t i = 0; i < each.tokens(); ++i)
          parent_.push_back(each.parent.empty() ? static_cast<int32_t>(i) - 1 : each.parent[i]);
      }
      return;
    }
  }

  Case case_;
  std::vector<int32_t> query_start_{0}, slot_, parent_;
  std::vector<uint8_t> v_, k_, q_, gate_, z_, o_;
  std::vector<float> b_, g_;
  float* workspace_ = nullptr;
};

// Runs one call over the windows; returns each window's outputs [tokens, HV, V]. Does not commit.
inline std::vector<std::vector<float>> run(const Case& c, Pool& pool, Op op, Route route,
                                           const std::vector<Window>& windows,
                                           ThreadPool& threads) {
  for (const Window& w : windows) {
    if (w.slot >= 0 && op == Op::kStep) begin_step(pool.cursors[w.slot], w.tokens(), pool.ring());
  }
  Call call(c, pool, windows, threads.size());
  call.p.route = route;
  if (op == Op::kStep) {
    cpu::recurrent_step(call.p, call.workspace(), threads);
  } else {
    cpu::recurrent_prefill(call.p, call.workspace(), threads);
  }
  std::vector<std::vector<float>> outputs;
  for (size_t w = 0; w < windows.size(); ++w) outputs.push_back(call.outputs(w));
  return outputs;
}

// Folds all of a slot into its checkpoint, or (a snapshot) into that of another slot.
inline void fold(const Case& c, Pool& pool, int32_t slot, ThreadPool& threads,
                 std::optional<int32_t> target = {}) {
  RecurrentFoldParams p;
  p.shape = c.shape;
  p.batch = {1, nullptr, &slot, pool.cursors.data(), pool.ring()};
  p.state = pool.state();
  p.channel_gate = pool.channel_gate();
  p.rounding = pool.rounding();
  if (target) p.target_slot = &*target;
  cpu::recurrent_fold(p, pool.workspace(threads.size()), threads);
  if (target) pool.cursors[*target] = pool.cursors[slot];
  commit_fold(pool.cursors[target.value_or(slot)]);
}

// Decodes tokens [begin, end) of a sequence in `slot` by windows of `window` tokens, all accepted.
inline std::vector<float> decode(const Case& c, Pool& pool, Route route, const Inputs& in,
                                 int64_t begin, int64_t end, int64_t window, ThreadPool& threads,
                                 int32_t slot = 0) {
  std::vector<float> o;
  for (int64_t t = begin; t < end; t += window) {
    const int64_t behind = std::min(end, t + window);
    const auto out = run(c, pool, Op::kStep, route, {{&in, t, behind, slot, {}}}, threads)[0];
    o.insert(o.end(), out.begin(), out.end());
    commit_step(pool.cursors[slot], behind - t, route);
  }
  return o;
}

}  // namespace replayssm::testing
