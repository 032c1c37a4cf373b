// Decays and weights of a window of at most eight new tokens, where four lanes share a token.
#pragma once

#include "ops/cuda/paged_block.cuh"

namespace replayssm::cuda {

struct PagedTokenGates {
  float prefix = 1, strength = 0;  // of token lane / 4: decay up to it, beta
  float within[2] = {0, 0};  // decay and weight in it of the pair of tokens 2 (lane % 4) and on

  // A lane for a token first. Caches the time steps where the head's are `kept`; weights, decay: of
  // the cached rows.
  template <bool kDelta>
  __device__ void form(const PagedStep& p, const PagedItem& b, const PagedGateInputs& inputs,
                       int head, bool kept, float* weights, float* decay) {
    const int lane = threadIdx.x % 32, token = lane / 4, pair = lane % 4 * 2;
    const bool windows = p.rule == REPLAYSSM_PAGED_WINDOW;
    const PagedHeadGates gates(p, inputs);
    form_weights(p, b, gates, inputs.cached, head, 0.0f, weights, decay);
    PagedGate own{0, 0, 0};
    float beta = 0;
    if (lane < b.row.window) {
      own = gates.fresh(inputs.dt.read(p.dt), windows);
      if constexpr (kDelta) beta = inputs.strength(p);
      const int place = b.row.place(b.row.history + lane, p.ring, windows);
      if (b.owns_gates && kept) *at<float>(p.cache_g, b.row.slot, head, place) = own.cached;
    }
    float all = 0, since[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kPagedTokens; ++i) {
      if (i >= b.row.window) break;
      const float next = __shfl_sync(kAllLanes, own.log_decay, i);
      if (i > token) continue;
      all += next;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (i > pair + e) since[e] += next;
    }
    prefix = expf(fminf(all, 0.0f));
    strength = __shfl_sync(kAllLanes, beta, token);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float weight = __shfl_sync(kAllLanes, own.weight, pair + e);
      within[e] = pair + e <= token ? weight * expf(fminf(since[e], 0.0f)) : 0.0f;
    }
  }
};

}  // namespace replayssm::cuda
