// Where the rows of a block that is prepared ahead lie, and how they get there and back
// (step_prepare.cuh). Rows are counted backwards: row u came u tokens before the window's.
#pragma once

#include "ops/cuda/step_targets.cuh"

namespace replayssm::cuda {

template <Family kFamily, class Source, int kState>
class PreparedRows {
 public:
  using Act = Bf16;
  using Context = StepContext<kFamily, Act, kState, false>;
  using Shared = typename Context::Shared;

  // memory: the block's. handed: where its results go.
  __device__ PreparedRows(const RecurrentStepParams& p, const StepLaunch& launch,
                          const BlockPlace& b, const Shared& handed, char* memory)
      : p_(p),
        launch_(launch),
        b_(b),
        handed_(handed),
        context_{p, launch, b, handed},
        memory_(memory),
        rows_(min(b.history + 1, kRows)),
        ring_k_(static_cast<Act*>(p.state.ring_k) +
                (b.ring_row * launch.key_heads + b.key_head) * kState),
        ring_v_(static_cast<Act*>(p.state.ring_v) +
                (b.ring_row * launch.heads + b.head) * launch.head_dim),
        ring_gates_(b.ring_row * launch.heads + b.head) {}

 protected:
  using Target = Targets<Context, std::conditional_t<std::is_same_v<Source, float>, void, Source>>;

  static constexpr bool kScalarDecay = kFamily != Family::kKimiDelta;
  static constexpr int kRows = kMostPreparedRows, kHalf = 16;  // lanes
  static constexpr int kUnit = 16 / sizeof(Act);               // elements of a copy
  static constexpr int kElems = kState / 32;                   // of a lane, where a warp has a row
  static constexpr int kKeyStride = row_stride(kState, sizeof(Act));
  // Keys, then the query.
  static constexpr int kKeyBytes = (kRows + 1) * kKeyStride * int(sizeof(Act));
  static_assert(kState == kHalf * kUnit && kRows == kHalf);

  // Strength and log decay (not Kimi Delta) of a row of a head.
  struct Gates {
    float strength = 0, decay = 0;
  };

  __device__ int warps() const { return launch_.config.preparing; }
  __device__ int heads() const { return launch_.config.heads; }

  // Row u of the ring, counted from the slot's first physical row.
  __device__ int ring_row(int u) const {
    return b_.physical(b_.history - u, static_cast<int>(launch_.ring_rows.divisor));
  }
  __device__ Act* ring_key(int row) const { return ring_k_ + row * (launch_.key_heads * kState); }
  __device__ Act* ring_value(int row) const {
    return ring_v_ + row * (launch_.heads * launch_.head_dim);
  }
  __device__ Act* ring_gate(int row, int head) const {
    return static_cast<Act*>(p_.state.ring_gate) +
           (ring_gates_ + row * launch_.heads + head) * kState;
  }
  // The window's.
  __device__ const Act* input(const void* rows, int64_t stride, int at) const {
    return static_cast<const Act*>(rows) + b_.token * stride + at;
  }
  __device__ static void move(void* to, const void* from) {
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
  }

  // Those of the window, u = 0, once the kernel before is done.
  __device__ Gates gates(int head, int u) const {
    const float *b = p_.state.ring_b, *g = p_.state.ring_g;
    int64_t at = ring_gates_ + ring_row(u) * launch_.heads + head;
    if (u == 0) {
      b = p_.b, g = p_.g;
      at = static_cast<int64_t>(b_.token) * launch_.heads + b_.head + head;
    }
    return {b[at], kScalarDecay ? g[at] : 0.0f};
  }
  __device__ void append(int head, const Gates& gates) const {
    const int64_t at = ring_gates_ + ring_row(0) * launch_.heads + head;
    p_.state.ring_b[at] = gates.strength;
    if constexpr (kScalarDecay) p_.state.ring_g[at] = gates.decay;
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& handed_;
  const Context context_;
  char* const memory_;
  const int rows_;

 private:
  // Of the slot's first physical row.
  Act *const ring_k_, *const ring_v_;
  const int64_t ring_gates_;
};

}  // namespace replayssm::cuda
