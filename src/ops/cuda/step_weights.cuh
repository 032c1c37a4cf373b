// Per head and token, from products of keys and queries: what each row adds to the output, and what
// the product of state and target is scaled by. A warp per head and token, a lane per row.
#pragma once

#include "ops/cuda/step_context.cuh"

namespace replayssm::cuda {

template <class Context>
class Weights {
 public:
  __device__ explicit Weights(const Context& context) : c_(context) {}

  // Mamba-2: c_j = b_j e^{D_j} k_j . q.
  __device__ void weigh(int head, int i) const {
    const uint32_t path = c_.path(i);
    float carried = 0;
#pragma unroll 1
    for (int first = (c_.b.rows - 1) / 32 * 32; first >= 0; first -= 32) {
      const int j = first + c_.lane();
      const bool on = c_.on_path(path, j);
      const float newer = sum_above(on ? c_.shared.log_decays(head)[j] : 0.0f, carried);
      const float c = on ? c_.shared.strengths(head)[j] * expf(newer) *
                               c_.shared.query_products(i)[j]
                         : 0.0f;
      if (j < round_up(c_.b.rows, 16)) c_.store_weight(head, i, j, c);
    }
    if (c_.lane() == 0) c_.shared.output_scale(head, i) = expf(carried);
  }

  // The delta rule with a scalar decay, up to kMostGramRows rows: with raw keys and f = 1 / |k|
  //
  //   r_j = k_j . t, where t = q - sum of s_m k_m over newer rows m, and s_j = b_j f_j^2 r_j
  //   c_j = b_j f_j e^{D_j} r_j
  __device__ void solve(int head, int i) const {
    const int j = c_.lane(), rows = c_.b.rows;
    const uint32_t path = c_.path(i);
    const bool on = c_.on_path(path, j);
    const float scale = query_scale(i);
    const float strength = on ? c_.shared.strengths(head)[j] : 0.0f;
    const float factor = on ? 1.0f / sqrtf(c_.shared.row_products(j)[j] + kL2NormEps) : 0.0f;
    float carried = 0;
    const float newer = sum_above(on ? c_.shared.log_decays(head)[j] : 0.0f, carried);
    const float write = strength * factor, step = write * factor;
    float rest = on ? scale * c_.shared.query_products(i)[j] : 0.0f;
#pragma unroll 4
    for (int m = rows - 1; m > c_.b.first_mixed(); --m) {
      const float s = __shfl_sync(kAllLanes, step * rest, m);
      if (j < m) rest = fmaf(-s, c_.shared.row_products(m)[j], rest);
    }
    if (j < round_up(rows, 16)) c_.store_weight(head, i, j, on ? write * expf(newer) * rest : 0.0f);
    store_steps(head, i, on ? -step * rest : 0.0f, scale);
    if (j == 0) c_.shared.output_scale(head, i) = expf(carried);
  }

  // What makes query i one of length K^-1/2.
  __device__ float query_scale(int i) const {
    constexpr int kElems = Context::Shared::kPerLane * kRowLanes / 32;
    float q[kElems];
    load_elements<Bf16, kElems>(c_.shared.query(i) + c_.lane() * kElems, q);
    return 1.0f / (sqrtf(warp_sum(dot<2>(q, q)) + kL2NormEps) * sqrtf(kElems * 32));
  }

  // The delta rule's, and Mamba-2's, of rows that the tensor cores fold: a warp per head, a lane
  // per row. The decays of the rows before and behind each are kept apart.
  __device__ void form_fold(int head) const {
    const int j = c_.lane(), count = c_.b.tiled;
    const float* const log_decays = c_.shared.log_decays(head);
    float total = 0;
    const float behind = sum_above(j < count ? log_decays[j] : 0.0f, total);
    if (j >= kMostTileRows) return;
    FoldTerms& terms = c_.shared.fold_terms(head);
    const float strength = j < count ? c_.shared.strengths(head)[j] : 0.0f;
    terms.behind[j] = expf(behind);
    terms.total = expf(total);
    if constexpr (Context::kFamily == Family::kMamba2) {
      terms.write[j] = strength;
    } else {
      const float factor =
          j < count ? 1.0f / sqrtf(c_.shared.row_products(j)[j] + kL2NormEps) : 0.0f;
      terms.write[j] = strength * factor;
      terms.known[j] = factor;
      float decay = j < count ? log_decays[j] : 0.0f;  // of the rows from m + 1 to j
      for (int m = j - 1; m >= 0; --m) {
        terms.matrix[m][j] = j < count ? expf(decay) * c_.shared.row_products(j)[m] : 0.0f;
        decay += j < count ? log_decays[m] : 0.0f;
      }
      terms.before[j] = expf(decay);
    }
  }

 private:
  // The target of token i is the sum of all keys, then queries, with these factors.
  __device__ void store_steps(int head, int i, float step, float scale) const {
    const int rows = c_.b.rows;
#pragma unroll 1
    for (int k = c_.lane(); k < round_up(rows + c_.b.window, 16); k += 32) {
      const float x = k < rows ? step : k == rows + i ? scale : 0.0f;
      c_.store_operand_parts(c_.shared.steps(0, head, i) + k, c_.launch.layout.step_stride, x);
    }
  }

  const Context& c_;
};

}  // namespace replayssm::cuda
