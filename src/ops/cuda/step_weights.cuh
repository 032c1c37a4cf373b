// Per head and token, from products of keys and queries: what each row adds to the output, and what
// the product of state and target is scaled by. A warp per head and token, a lane per row.
#pragma once

#include "ops/cuda/step_context.cuh"

namespace replayssm::cuda {

template <class Context>
class Weights {
 public:
  static constexpr int kTogether = !Context::kManyTokens                 ? 1
                                   : Context::kFamily == Family::kMamba2 ? 5
                                                                         : 3;

  __device__ explicit Weights(const Context& context) : c_(context) {}

  // Mamba-2: c_j = b_j e^{D_j} k_j . q, for tokens from i on.
  __device__ void weigh(int head, int i) const {
    const float skip = c_.skip(head);
    uint32_t path[kTogether];
    float carried[kTogether] = {}, newer[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) path[u] = c_.path(c_.together(i, u));
#pragma unroll 1
    for (int first = (c_.b.rows - 1) / 32 * 32; first >= 0; first -= 32) {
      const int j = first + c_.lane();
      const bool exists = j < c_.b.rows;
      const float strength = exists ? c_.shared.strengths(head)[j] : 0.0f;
      const float log_decay = exists ? c_.shared.log_decays(head)[j] : 0.0f;
      sum_newer(head, i, path, j, log_decay, newer, carried);
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int token = c_.together(i, u);
        const bool on = c_.on_path(path[u], j);
        const float c = on ? strength * expf(newer[u]) * c_.shared.query_products(token)[j] : 0.0f;
        if (j < round_up(c_.b.rows, 16)) c_.store_weight(head, token, j, c, skip);
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
      if (c_.lane() == 0) c_.shared.output_scale(head, c_.together(i, u)) = expf(carried[u]);
  }

  // The delta rule with a scalar decay, up to kMostGramRows rows, for tokens from i on: with raw
  // keys and f = 1 / |k|
  //
  //   r_j = k_j . t, where t = q - sum of s_m k_m over newer rows m, and s_j = b_j f_j^2 r_j
  //   c_j = b_j f_j e^{D_j} r_j
  __device__ void solve(int head, int i) const {
    const int j = c_.lane(), rows = c_.b.rows;
    const bool exists = j < rows;
    const float skip = c_.skip(head);
    const float factor = exists ? 1.0f / sqrtf(c_.shared.row_products(j)[j] + kL2NormEps) : 0.0f;
    const float strength = exists ? c_.shared.strengths(head)[j] : 0.0f;
    const float log_decay = exists ? c_.shared.log_decays(head)[j] : 0.0f;
    bool on[kTogether];
    uint32_t path[kTogether];
    float scale[kTogether], write[kTogether], rest[kTogether], each[kTogether], step[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int token = c_.together(i, u);
      path[u] = c_.path(token);
      on[u] = c_.on_path(path[u], j);
      scale[u] = query_scale(token);
      write[u] = on[u] ? strength * factor : 0.0f;
      rest[u] = on[u] ? scale[u] * c_.shared.query_products(token)[j] : 0.0f;
      each[u] = write[u] * factor;
      step[u] = each[u] * rest[u];
    }
#pragma unroll 4
    for (int m = rows - 1; m > c_.b.first_mixed(); --m) {
      const float product = j < m ? c_.shared.row_products(m)[j] : 0.0f;
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const float s = __shfl_sync(kAllLanes, step[u], m);
        step[u] = fmaf(-s, each[u] * product, step[u]);
        rest[u] = fmaf(-s, product, rest[u]);
      }
    }
    float carried[kTogether] = {}, newer[kTogether];
    sum_newer(head, i, path, j, log_decay, newer, carried);
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int token = c_.together(i, u);
      if (j < round_up(rows, 16))
        c_.store_weight(head, token, j, on[u] ? write[u] * expf(newer[u]) * rest[u] : 0.0f, skip);
      store_steps(head, token, -step[u], scale[u]);
      if (j == 0) c_.shared.output_scale(head, token) = expf(carried[u]);
    }
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
    const int j = c_.lane(), count = c_.b.aside;
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
      FoldMatrix& delta = c_.shared.fold_matrix(head);
      terms.write[j] = strength * factor;
      delta.known[j] = factor;
      float decay = j < count ? log_decays[j] : 0.0f;  // of the rows from m + 1 to j
      for (int m = j - 1; m >= 0; --m) {
        delta.matrix[m][j] = j < count ? expf(decay) * c_.shared.row_products(j)[m] : 0.0f;
        decay += j < count ? log_decays[m] : 0.0f;
      }
      delta.before[j] = expf(decay);
    }
  }

 private:
  // The log decays of what is newer than row j on the paths of the tokens from i on, of rows that
  // lanes hold, newest first. carried: of all rows before these; grows by them. Where products are
  // not those of the path alone to the bit, nor need sums be: there a chain's token adds its own
  // decay to what the one before it has.
  __device__ void sum_newer(int head, int i, const uint32_t (&path)[kTogether], int j,
                            float log_decay, float (&sum)[kTogether],
                            float (&carried)[kTogether]) const {
    const bool grows = Context::kOperands && c_.b.rows <= 32 && !c_.p.batch.parent;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (u == 0 || !grows) {
        const float mine = c_.on_path(path[u], j) ? log_decay : 0.0f;
        sum[u] = newer(head, path[u], j, mine, carried[u]);
        continue;
      }
      const int row = c_.b.history + c_.together(i, u);
      const float own = __shfl_sync(kAllLanes, log_decay, row);
      const bool again = i + u >= c_.b.window;
      carried[u] = again ? carried[u - 1] : carried[u - 1] + own;
      sum[u] = again ? sum[u - 1] : j < row ? sum[u - 1] + own : 0.0f;
    }
  }
  __device__ float newer(int head, uint32_t path, int j, float log_decay, float& carried) const {
    if (Context::kOperands && c_.b.rows <= 32) return sum_above(log_decay, carried);
    float all = 0;
    const float in_window = c_.newer_in_window(head, path, j, all);
    if (j / 32 == (c_.b.rows - 1) / 32) carried = all;  // the first rows
    const float in_history = sum_above(j < c_.b.history ? log_decay : 0.0f, carried);
    return j < c_.b.history ? in_history : in_window;
  }

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
