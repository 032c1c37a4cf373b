// What a fused step does behind the recurrence: the gated norm of the outputs, which all warps of a
// block have left in shared memory. Sums add up as gated_rms_norm adds them.
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
        rule_{static_cast<int>(launch.norm.group_dim), launch.norm.weight != nullptr,
              launch.norm.gate_first, launch.norm.activation, launch.norm.eps} {}

  // All threads of the block call, and of its cluster.
  __device__ void run() const {
    __syncthreads();
    if (launch_.cluster_blocks > 1) {
      norm_in_cluster();
    } else {
      norm_in_block();
    }
  }

 private:
  using Values = float[1][kNormRun];

  struct Place {
    int64_t token, channel;  // of the layer's
  };
  __device__ Place place(int i, int column) const {
    return {b_.token + i, b_.head * launch_.head_dim + b_.row + column};
  }
  __device__ void load_gate(const Place& at, Values& gate) const {
    const OutputNorm& norm = launch_.norm;
    load_run<kNormRun>(norm.z, launch_.projected, at.token * norm.z_stride + at.channel, gate[0]);
  }
  __device__ void load_weight(const Place& at, Values& weight) const {
    const OutputNorm& norm = launch_.norm;
    if (!norm.weight) return;
    const auto group_dim = static_cast<int>(norm.group_dim);
    const int channel = static_cast<int>(at.channel);
    load_constants<kNormRun>(norm.weight + (norm.weight_per_group ? channel % group_dim : channel),
                             weight[0]);
  }
  __device__ void store(const Place& at, const Values& y) const {
    store_run<kNormRun>(p_.o, p_.o_dtype,
                        at.token * (launch_.heads * launch_.head_dim) + at.channel, y[0]);
  }

  // Whole groups: a team of threads for each and token.
  __device__ void norm_in_block() const {
    const int team = launch_.norm_team, teams = blockDim.x / team;
    const int groups = launch_.layout.columns / rule_.group_dim, count = groups * b_.window;
    const int at = threadIdx.x % team * kNormRun;
#pragma unroll 1
    for (int first = 0; first < count; first += teams) {
      const int n = first + threadIdx.x / team, i = n / groups;
      const int column = (n - i * groups) * rule_.group_dim + at;
      const bool exists = n < count && at < rule_.group_dim;
      const Place to = place(i, column);
      Values x, gate, weight;
      if (exists) {
        load_gate(to, gate);
        load_weight(to, weight);
        load_run<float, kNormRun>(shared_.outputs(i) + column, x[0]);
      }
      gated_norm<kNormRun, 1>(rule_, [&](int) { return exists; }, team, nullptr, x, gate, weight);
      if (exists) store(to, x);
    }
  }

  // One group, of which each block of the cluster has some runs: blocks read the sums of all runs
  // from each other.
  __device__ void norm_in_cluster() const {
    const int runs = launch_.layout.columns / kNormRun;
    // Where the states came through.
    auto* const sums = reinterpret_cast<float*>(shared_.stream_of_warps());
#pragma unroll 1
    for (int n = threadIdx.x; n < runs * b_.window; n += blockDim.x) {
      const int i = n / runs, column = (n - i * runs) * kNormRun;
      float* const outputs = shared_.outputs(i) + column;
      Values x, gate;
      load_gate(place(i, column), gate);
      load_run<float, kNormRun>(outputs, x[0]);
      sums[n] = gate_run(rule_, x[0], gate[0]);
      if (rule_.gate_first) store_run<float, kNormRun>(outputs, x[0]);
    }
    arrive_at_cluster();
    wait_for_cluster();
#pragma unroll 1
    for (int i = 0; i < b_.window; ++i) {
      const float scale = rule_.scale(sum_of_cluster(sums + i * runs, runs));
#pragma unroll 1
      for (int run = threadIdx.x; run < runs; run += blockDim.x) {
        const Place to = place(i, run * kNormRun);
        Values x, gate, weight;
        load_weight(to, weight);
        load_run<float, kNormRun>(shared_.outputs(i) + run * kNormRun, x[0]);
        if (!rule_.gate_first) {
          load_gate(to, gate);
          gate_run(rule_, x[0], gate[0]);
        }
        scale_run(rule_, scale, x[0], gate[0], weight[0]);
        store(to, x);
      }
    }
    arrive_at_cluster();
    wait_for_cluster();  // nobody leaves while its sums are read
  }

  // In every thread: the sum over all runs of the group.
  __device__ float sum_of_cluster(const float* sums, int runs) const {
    const int team = launch_.norm_team, all = runs * launch_.cluster_blocks;
    const int slices = launch_.config.slices, columns = launch_.cluster_blocks / slices;
    float parts = 0;  // lane l: of the runs from 32 l on
#pragma unroll 1
    for (int first = 0; first < team; first += 32) {
      const int run = first + threadIdx.x % min(team, 32);
      float x = 0;
      if (run < all) {
        const int block = run / runs, column = block / slices;
        x = load_from_block(sums + run - block * runs,
                            column + (block - column * slices) * columns);
      }
      x = team_sum(x, min(team, 32), nullptr);
      if (team <= 32) return x;
      if (threadIdx.x % 32 == first / 32) parts = x;
    }
    return team_sum(parts, 32, nullptr);
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const NormRule rule_;
};

}  // namespace replayssm::cuda
