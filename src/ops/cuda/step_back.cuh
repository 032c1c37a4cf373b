// What a fused step does behind the recurrence where the groups of its norm are heads. Outputs are
// in shared memory; a lane takes four channels. Sums add up as gated_rms_norm adds them.
#pragma once

#include "ops/cuda/cluster.cuh"
#include "ops/cuda/gated_norm.cuh"
#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

template <Family kFamily, class Act, int kState>
class LayerBack {
 public:
  using Shared = BlockShared<kFamily, Act, kState>;

  __device__ LayerBack(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                       const Shared& shared)
      : p_(p),
        launch_(launch),
        b_(b),
        shared_(shared),
        rule_{launch.head_dim, launch.norm.weight != nullptr, launch.norm.gate_first,
              launch.norm.activation, launch.norm.eps} {}

  // All threads of the block call, and of its cluster.
  __device__ void run() const {
    if (launch_.config.slices > 1) {
      norm_in_cluster();
    } else {
      norm_in_block();
    }
  }

 private:
  // Four channels of a token: gate and weight, then values.
  struct Quad {
    float x[4], gate[4], weight[4];
  };

  // column: the block's.
  __device__ void load_factors(int i, int column, Quad& quad) const {
    const OutputNorm& norm = launch_.norm;
    const int channel = b_.head * launch_.head_dim + b_.row + column;
    load_run<4>(norm.z, launch_.projected, (b_.token + i) * norm.z_stride + channel, quad.gate);
    if (!norm.weight) return;
    const int from = norm.weight_per_group ? (b_.row + column) % launch_.head_dim : channel;
    load_constants<4>(norm.weight + from, quad.weight);
  }
  __device__ void load_values(int i, int column, Quad& quad) const {
    load_elements<float, 4>(shared_.outputs(i) + column, quad.x);
  }
  __device__ void store(int i, int column, float scale, Quad& quad) const {
    scale_values(rule_, scale, quad.x, quad.gate, quad.weight);
    const int64_t token = b_.token + i;
    store_run<4>(p_.o, p_.o_dtype,
                 (token * launch_.heads + b_.head) * launch_.head_dim + b_.row + column, quad.x);
  }

  // Whole heads: a team of lanes for each and token.
  __device__ void norm_in_block() const {
    const int team = launch_.norm_team, teams = blockDim.x / team;
    const int heads = launch_.config.heads, count = heads * b_.window;
    const int at = threadIdx.x % team * 4;
    bool waited = false;
#pragma unroll 1
    for (int first = 0; first < count; first += teams) {
      const int n = first + threadIdx.x / team, i = n / heads;
      const int column = (n - i * heads) * launch_.head_dim + at;
      const bool exists = n < count && at < launch_.head_dim;
      Quad quad;
      if (exists) load_factors(i, column, quad);
      if (!waited) __syncthreads();
      waited = true;
      float sum = 0;
      if (exists) {
        load_values(i, column, quad);
        sum = gate_values(rule_, quad.x, quad.gate);
      }
      const float scale = rule_.scale(quad_team_sum(sum, team));
      if (exists) store(i, column, scale, quad);
    }
  }

  // A slice of one head: the blocks of all its slices are a cluster and read each other's sums.
  __device__ void norm_in_cluster() const {
    const int quads = launch_.layout.columns / 4;
    // Where the states came through.
    auto* const sums = reinterpret_cast<float*>(shared_.stream_of_warps());
    __syncthreads();
#pragma unroll 1
    for (int n = threadIdx.x; n < quads * b_.window; n += blockDim.x) {
      const int i = n / quads, column = (n - i * quads) * 4;
      Quad quad;
      load_factors(i, column, quad);
      load_values(i, column, quad);
      sums[n] = gate_values(rule_, quad.x, quad.gate);
    }
    arrive_at_cluster();
    wait_for_cluster();
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < b_.window; i += launch_.config.warps) {
      const float scale = rule_.scale(sum_of_cluster(sums + i * quads, quads));
      const int column = threadIdx.x % 32 * 4;
      if (column >= launch_.layout.columns) continue;
      Quad quad;
      load_factors(i, column, quad);
      load_values(i, column, quad);
      gate_values(rule_, quad.x, quad.gate);
      store(i, column, scale, quad);
    }
    arrive_at_cluster();
    wait_for_cluster();  // nobody leaves while its sums are read
  }

  // In every lane: the sum over all quads of the head.
  __device__ float sum_of_cluster(const float* sums, int quads) const {
    const int lane = threadIdx.x % launch_.norm_team, block = lane / quads;
    float x = 0;
    if (block < launch_.config.slices) x = load_from_block(sums + lane - block * quads, block);
    return quad_team_sum(x, launch_.norm_team);
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const NormRule rule_;
};

}  // namespace replayssm::cuda
