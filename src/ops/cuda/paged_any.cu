// Paged decode steps of any shape, alignment and mix of element types: correct, not fast.
//
// Grid: (heads, sequences). A warp takes a row of the state at a time, its lanes the columns. The
// sums are those of paged_window.cuh; a single token is a window of one whose flush folds it too.

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/paged_block.cuh"
#include "ops/cuda/paged_instances.h"

namespace replayssm::cuda {
namespace {

constexpr int kWarps = 4;

__device__ float warp_sum(float x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(kAllLanes, x, bit);
  return x;
}

class AnyStep {
 public:
  __device__ AnyStep(const PagedStep& p, const PagedLaunch& launch, const PagedItem& b,
                     float* shared)
      : p_(p),
        l_(launch.layout),
        b_(b),
        shared_(shared),
        gates_(p, gate_inputs(p, b)),
        delta_(p.family != REPLAYSSM_MAMBA2),
        single_(p.rule == REPLAYSSM_PAGED_SINGLE),
        state_dim_(static_cast<int>(p.state_dim)),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {}

  __device__ static PagedGateInputs gate_inputs(const PagedStep& p, const PagedItem& b) {
    PagedGateInputs inputs;
    inputs.load(p, b, b.head, threadIdx.x % 32);
    return inputs;
  }

  __device__ void run() {
    if (warp_ == 0) form_gates();
    form_scales();
    __syncthreads();
    form_products();
    if (keeps_window() && b_.owns_keys) cache_keys();
    __syncthreads();
    for (int row = warp_; row < p_.head_dim; row += kWarps) {
      for (int first = 0; first < b_.row.window; first += kPagedChunk) read_row(row, first);
      if (b_.row.flushes) store_state(row);
    }
  }

 private:
  __device__ bool keeps_window() const { return !single_ || !b_.row.flushes; }
  __device__ int place(int j) const { return b_.row.place(j, p_.ring, !single_); }
  __device__ int history() const { return b_.row.history; }
  // Rows that the readout mixes in; a flush folds them first.
  __device__ int mixed() const { return b_.row.flushes ? 0 : history(); }
  __device__ float* query_scale() const { return shared_ + l_.queries; }
  __device__ float* key_scale() const { return shared_ + l_.keys; }
  __device__ float* weights() const { return shared_ + l_.weights; }
  __device__ float decay() const { return shared_[l_.decay]; }
  __device__ float& product(int base, int j, int s) const {
    return shared_[base + j * l_.padded_window + s];
  }
  __device__ float& within(int s, int i) const {
    return shared_[l_.within + s * l_.padded_window + i];
  }

  __device__ float query(int s, int e) const {
    return value_at(p_.q, index(p_.q, b_.row.token + s, b_.key_head) + e) * query_scale()[s];
  }
  __device__ float fresh_key(int i, int e) const {
    const float k = value_at(p_.k, index(p_.k, b_.row.token + i, b_.key_head) + e) * key_scale()[i];
    return single_ ? k : rounded_as(p_.cache_k, k);
  }
  __device__ float cached_key(int j, int e) const {
    return value_at(p_.cache_k, index(p_.cache_k, b_.row.slot, b_.key_head, place(j)) + e);
  }
  __device__ float key(int j, int e) const {
    return j < history() ? cached_key(j, e) : fresh_key(j - history(), e);
  }
  __device__ float cached_value(int j, int row) const {
    return value_at(p_.cache_v, index(p_.cache_v, b_.row.slot, b_.head, place(j)) + row);
  }
  __device__ float fresh_value(int i, int row) const {
    return value_at(p_.v, index(p_.v, b_.row.token + i, b_.head) + row);
  }

  __device__ void form_gates() const {
    const PagedGateInputs inputs = gate_inputs(p_, b_);
    form_weights(p_, b_, gates_, inputs.cached, b_.head, 0.0f, weights(), shared_ + l_.decay);
    PagedGate own{0, 0, 0};
    const bool live = lane_ < b_.row.window;
    if (live) {
      own = gates_.fresh(inputs.dt.read(p_.dt), !single_);
      if (delta_) shared_[l_.beta + lane_] = inputs.strength(p_);
      if (keeps_window())
        *at<float>(p_.cache_g, b_.row.slot, b_.head, place(history() + lane_)) = own.cached;
    }
    float since = 0, all = 0;
    for (int s = 0; s < b_.row.window; ++s) {
      const float next = __shfl_sync(kAllLanes, own.log_decay, s);
      if (s > lane_) since += next;
      if (s <= lane_) all += next;
      if (live && s >= lane_) within(s, lane_) = own.weight * expf(fminf(since, 0.0f));
    }
    if (live) shared_[l_.prefix + lane_] = expf(fminf(all, 0.0f));
  }

  __device__ float inverse_norm(const PagedValues& x, int i) const {
    if (!delta_ || !p_.normalise) return 1.0f;
    float sum = 0;
    for (int e = lane_; e < state_dim_; e += 32) {
      const float value = value_at(x, index(x, b_.row.token + i, b_.key_head) + e);
      sum = fmaf(value, value, sum);
    }
    return rsqrtf(warp_sum(sum) + 1e-6f);
  }
  __device__ void form_scales() const {
    for (int i = warp_; i < b_.row.window; i += kWarps) {
      const float q = inverse_norm(p_.q, i), k = inverse_norm(p_.k, i);
      if (lane_ != 0) continue;
      query_scale()[i] = delta_ ? q * p_.scale : 1.0f;
      key_scale()[i] = k;
    }
  }
  __device__ void form_products() const {
    const int window = b_.row.window, first = history() - mixed();
    const int rows = mixed() + window;
    for (int n = warp_; n < rows * window; n += kWarps) {
      const int j = first + n / window, s = n % window;
      float with_q = 0, with_k = 0;
      for (int e = lane_; e < state_dim_; e += 32) {
        const float k = key(j, e);
        with_q = fmaf(k, query(s, e), with_q);
        if (delta_) with_k = fmaf(k, fresh_key(s, e), with_k);
      }
      with_q = warp_sum(with_q);
      if (delta_) with_k = warp_sum(with_k);
      if (lane_ != 0) continue;
      product(l_.key_query, j, s) = with_q;
      if (delta_) product(l_.key_key, j, s) = with_k;
    }
  }
  __device__ void cache_keys() const {
    for (int i = warp_; i < b_.row.window; i += kWarps)
      for (int e = lane_; e < state_dim_; e += 32)
        set_value(p_.cache_k, index(p_.cache_k, b_.row.slot, b_.key_head, place(history() + i)) + e,
                  fresh_key(i, e));
  }

  __device__ int64_t state_index(int row, int e) const {
    return index(p_.state, b_.row.slot, b_.head, row) + e;
  }
  // With the cached rows folded in where the step flushes.
  __device__ float state(int row, int e) const {
    const float s = value_at(p_.state, state_index(row, e));
    if (!b_.row.flushes) return s;
    float folded = decay() * s;
    for (int j = 0; j < history(); ++j)
      folded = fmaf(weights()[j] * cached_value(j, row), cached_key(j, e), folded);
    return folded;
  }

  __device__ void read_row(int row, int first) {
    const int count = min(b_.row.window - first, kPagedChunk);
    float o[kPagedChunk] = {}, known[kPagedChunk] = {};
    for (int e = lane_; e < state_dim_; e += 32) {
      const float s = state(row, e) * (b_.row.flushes ? 1.0f : decay());
      for (int n = 0; n < count; ++n) {
        o[n] = fmaf(s, query(first + n, e), o[n]);
        if (delta_) known[n] = fmaf(s, fresh_key(first + n, e), known[n]);
      }
    }
    for (int j = lane_; j < mixed(); j += 32) {
      const float v = weights()[j] * cached_value(j, row);
      for (int n = 0; n < count; ++n) {
        o[n] = fmaf(v, product(l_.key_query, j, first + n), o[n]);
        if (delta_) known[n] = fmaf(v, product(l_.key_key, j, first + n), known[n]);
      }
    }
    for (int n = 0; n < count; ++n) {
      const float prefix = shared_[l_.prefix + first + n];
      o[n] = prefix * warp_sum(o[n]);
      known[n] = prefix * warp_sum(known[n]);
    }
    finish_row(row, first, count, o, known);
  }

  __device__ void finish_row(int row, int first, int count, const float* o, const float* known) {
    for (int n = 0; n < count; ++n) {
      const int s = first + n, j = history() + s;
      float out = o[n], corrected = 0;
      const float v = fresh_value(s, row);
      if (delta_) {
        float sum = known[n];
        for (int i = 0; i < s; ++i)
          sum = fmaf(within(s, i) * product(l_.key_key, history() + i, s), value_of(i, row), sum);
        corrected = shared_[l_.beta + s] * (v - sum);
        if (lane_ == s) corrected_ = corrected;
      }
      for (int i = 0; i < s; ++i)
        out = fmaf(within(s, i) * product(l_.key_query, history() + i, s), value_of(i, row), out);
      const float own = delta_ ? corrected : v;
      out = fmaf(within(s, s) * product(l_.key_query, j, s), own, out);
      if (lane_ == 0) keep(s, row, own, out);
    }
  }
  // Of the window's row i, for all lanes of the warp.
  __device__ float value_of(int i, int row) const {
    return delta_ ? __shfl_sync(kAllLanes, corrected_, i) : fresh_value(i, row);
  }
  __device__ void keep(int s, int row, float own, float out) const {
    const int64_t token = b_.row.token + s;
    if (keeps_window())
      set_value(p_.cache_v, index(p_.cache_v, b_.row.slot, b_.head, place(history() + s)) + row,
                own);
    PagedFinish finish;
    finish.load(p_, token, b_.head, row);
    if (!delta_) out = finish.apply(p_, out, own);
    set_value(p_.out, index(p_.out, token, b_.head) + row, out);
  }
  __device__ void store_state(int row) const {
    if (!single_ && history() == 0) return;
    const float own = single_ ? within(0, 0) * value_of(0, row) : 0.0f;
    const float decay = single_ ? shared_[l_.prefix] : 1.0f;
    for (int e = lane_; e < state_dim_; e += 32) {
      float s = decay * state(row, e);
      if (single_) s = fmaf(own, fresh_key(0, e), s);
      set_value(p_.state, state_index(row, e), s);
    }
  }

  const PagedStep& p_;
  const PagedLayout& l_;
  const PagedItem& b_;
  float* const shared_;
  const PagedHeadGates gates_;
  const bool delta_, single_;
  const int state_dim_, lane_, warp_;
  float corrected_ = 0;  // Gated Delta's d of the window's row `lane`
};

}  // namespace

__global__ void __launch_bounds__(32 * kWarps)
    paged_any_kernel(const __grid_constant__ PagedStep p,
                     const __grid_constant__ PagedLaunch launch) {
  extern __shared__ __align__(256) char memory[];
  release_successor();
  wait_for_predecessor();
  const PagedItem b({p, launch, static_cast<int>(blockIdx.x)}, launch, paged_row(p, blockIdx.y));
  if (b.row.slot < 0) {
    if (threadIdx.x < 32) pad_outputs(p, b);
    return;
  }
  if (b.row.window <= 0 && !b.row.flushes) return;
  AnyStep(p, launch, b, reinterpret_cast<float*>(memory)).run();
}

void launch_paged_any(const PagedStep& step, cudaStream_t stream) {
  PagedStep as_window = step;
  as_window.rule = REPLAYSSM_PAGED_WINDOW;
  if (step.rule == REPLAYSSM_PAGED_SINGLE) as_window.max_window = 1;
  PagedLaunch launch;
  launch.rows = static_cast<int>(step.head_dim);
  launch.group = static_cast<int>(step.heads / step.key_heads);
  launch.by_group = FastDivide(static_cast<uint32_t>(launch.group));
  launch.layout = paged_layout(as_window, 0);
  const int bytes = launch.layout.total * int(sizeof(float));
  reserve_shared("paged_step", paged_any_kernel, bytes);
  const dim3 grid(static_cast<unsigned>(step.heads), static_cast<unsigned>(step.sequences));
  launch_dependent("paged_step", paged_any_kernel, grid, 32 * kWarps, bytes, stream, step, launch);
}

}  // namespace replayssm::cuda
