// Sampling: a cluster of blocks has a row, each of them a part of the vocabulary, and goes through
// it a few times: for the largest logit; digit by digit for the limits of top-k and top-p; for the
// sum of what is left; for the token where the drawn number falls.
//
// Values are doubles in the order of engine/sampler.h: the larger first, ties to the lower id. A
// limit is the last of the kept in that order. It is found as the bound of an amount, 1 per token
// for top-k and its weight in units of 2^-44 for top-p: whole numbers, so that no order of
// additions changes a bit.

#include "ops/cuda/sampling.h"

#include <cooperative_groups.h>

#include "core/check.h"
#include "core/philox.h"
#include "ops/cuda/activations.cuh"
#include "ops/cuda/check_rows.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/sampling_rank.cuh"

namespace replayssm::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kThreads = 1024, kWarps = kThreads / 32;
constexpr int32_t kSeen = 1 << 30;  // a token of the prompt; lower bits count the output's
constexpr double kUnit = 0x1p-44;   // of amounts

struct Shared {
  uint64_t amount[kBins];
  uint32_t count[kBins];
  uint64_t warp_amount[kWarps];
  double warp_sum[kWarps];
  Rank best[kWarps];
  // What other blocks of the cluster read.
  Rank block_best;
  double block_sum;
  int block_flag;
  // What a search leaves.
  uint32_t digit, found_count;
  uint64_t above, found_amount;
};

class RowSampler {
 public:
  __device__ RowSampler(const SampleParams& p, Shared& shared)
      : p_(p),
        shared_(shared),
        cluster_(cg::this_cluster()),
        row_(blockIdx.x / kBlocks),
        me_(static_cast<int>(threadIdx.x)),
        block_(static_cast<int>(cluster_.block_rank())) {
    const auto span = static_cast<int>((p.vocab + kBlocks - 1) / kBlocks);
    begin_ = min(block_ * span, static_cast<int>(p.vocab));
    end_ = min(begin_ + span, static_cast<int>(p.vocab));
  }

  __device__ void run() {
    if (p_.sampling) sampling_ = p_.sampling[row_];
    const bool penalised = has_penalties();
    if (penalised) count_tokens();
    const int32_t token = choose(penalised);
    if (block_ == 0 && me_ == 0) p_.token[row_] = token;
    if (penalised) forget_tokens();
    cluster_.sync();  // nobody reads this block's memory any more
  }

 private:
  __device__ bool has_penalties() const {
    return p_.history.tokens &&
           (sampling_.repetition_penalty != 1 || sampling_.presence_penalty != 0 ||
            sampling_.frequency_penalty != 0);
  }
  __device__ int32_t* counts() const {
    return static_cast<int32_t*>(p_.workspace) + row_ * p_.vocab;
  }
  // Calls fn(id, is_output) for the row's tokens, over the threads of all blocks.
  template <class Fn>
  __device__ void for_history(Fn&& fn) const {
    const SamplingHistory& h = p_.history;
    const int32_t* tokens = h.tokens + (h.slot ? h.slot[row_] : row_) * h.stride;
    const int prompt = h.prompt_length[row_], length = h.length[row_];
    for (int i = block_ * kThreads + me_; i < length; i += kBlocks * kThreads)
      fn(tokens[i], i >= prompt);
  }
  __device__ void count_tokens() const {
    for_history([&](int32_t id, bool output) {
      if (output) {
        atomicAdd(counts() + id, 1);
      } else {
        atomicOr(counts() + id, kSeen);
      }
    });
    __threadfence();
    cluster_.sync();
  }
  __device__ void forget_tokens() const {
    cluster_.sync();  // nobody needs them any more
    for_history([&](int32_t id, bool) { counts()[id] = 0; });
  }

  __device__ float logit(int id) const {
    float x;
    load_run<1>(p_.logits.data, p_.logits.dtype, row_ * p_.logits.stride + id, &x);
    return x;
  }
  __device__ double value(int id, bool penalised) const {
    double x = logit(id);
    if (!penalised) return x;
    const int32_t seen = __ldcg(counts() + id);
    if (seen == 0) return x;
    const int output = seen & ~kSeen;
    x = x > 0 ? x / sampling_.repetition_penalty : x * sampling_.repetition_penalty;
    x -= sampling_.frequency_penalty * output;
    return output > 0 ? x - sampling_.presence_penalty : x;
  }
  __device__ double weight(double x) const { return exp((x - largest_) / sampling_.temperature); }

  __device__ int32_t choose(bool penalised) {
    const Rank best = find_best(penalised);
    if (failed_) return kNoToken;
    const auto likeliest = static_cast<int32_t>(~best.id);
    if (!p_.sampling || sampling_.temperature == 0) return likeliest;
    largest_ = value_of(best);
    Rank least;  // of the kept
    if (sampling_.top_k > 0 && sampling_.top_k < p_.vocab)
      least = bound(
          penalised, least, static_cast<uint64_t>(sampling_.top_k),
          [](double) { return uint64_t{1}; }, true);
    if (sampling_.top_p < 1) {
      const auto amount = [&](double x) { return static_cast<uint64_t>(weight(x) / kUnit + 0.5); };
      uint64_t all = 0;
      for (int id = begin_ + me_; id < end_; id += kThreads) {
        const double x = value(id, penalised);
        if (!(rank_of(x, id) < least)) all += amount(x);
      }
      all = cluster_amount(all);
      least = bound(penalised, least,
                    static_cast<uint64_t>(ceil(sampling_.top_p * static_cast<double>(all))), amount,
                    false);
    }
    return draw(penalised, least);
  }

  // The first in the order. failed_: a logit is NaN, or the largest is not finite.
  __device__ Rank find_best(bool penalised) {
    Rank best;
    int flag = 0;
    float most = -INFINITY;
    for (int id = begin_ + me_; id < end_; id += kThreads) {
      const float x = logit(id);
      flag |= isnan(x) || x == INFINITY;
      most = fmaxf(most, x);
      const Rank r = rank_of(penalised ? value(id, true) : x, id);
      if (best < r) best = r;
    }
    // Bit 0: wrong; bit 1: there is a finite one.
    flag |= most > -INFINITY ? 2 : 0;
    for (int d = 16; d > 0; d /= 2) {
      const Rank other{__shfl_xor_sync(kAllLanes, best.value, d),
                       __shfl_xor_sync(kAllLanes, best.id, d)};
      if (best < other) best = other;
    }
    if (me_ % 32 == 0) shared_.best[me_ / 32] = best;
    const int wrong = __syncthreads_or(flag & 1), finite = __syncthreads_or(flag & 2);
    if (me_ == 0) {
      for (const Rank& other : shared_.best)
        if (best < other) best = other;
      shared_.block_best = best;
      shared_.block_flag = (wrong ? 1 : 0) | (finite ? 2 : 0);
    }
    cluster_.sync();
    flag = 0;
    best = {};
    for (int b = 0; b < kBlocks; ++b) {
      const Shared& other = *cluster_.map_shared_rank(&shared_, b);
      flag |= other.block_flag;
      if (best < other.block_best) best = other.block_best;
    }
    failed_ = flag != 2;
    cluster_.sync();
    return best;
  }

  // The sum over the cluster of each thread's x.
  __device__ uint64_t cluster_amount(uint64_t x) {
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAllLanes, x, d);
    if (me_ % 32 == 0) shared_.warp_amount[me_ / 32] = x;
    __syncthreads();
    if (me_ == 0) {
      x = 0;
      for (const uint64_t part : shared_.warp_amount) x += part;
      shared_.above = x;
    }
    cluster_.sync();
    x = 0;
    for (int b = 0; b < kBlocks; ++b) x += cluster_.map_shared_rank(&shared_, b)->above;
    cluster_.sync();
    return x;
  }

  // The last of the shortest leading part of the kept whose amounts reach `target`. ones: all
  // amounts are 1.
  template <class Amount>
  __device__ Rank bound(bool penalised, const Rank& least, uint64_t target, Amount&& amount,
                        bool ones) {
    Rank found;
    for (int n = 0; n < Rank::kDigits; ++n) {
      for (int i = me_; i < kBins; i += kThreads) shared_.amount[i] = 0, shared_.count[i] = 0;
      __syncthreads();
      for (int id = begin_ + me_; id < end_; id += kThreads) {
        const double x = value(id, penalised);
        const Rank r = rank_of(x, id);
        if (r < least || !r.same_before(n, found)) continue;
        const uint32_t digit = r.digit(n);
        atomicAdd(reinterpret_cast<unsigned long long*>(&shared_.amount[digit]), amount(x));
        atomicAdd(&shared_.count[digit], 1u);
      }
      cluster_.sync();
      search(target);
      found.set_digit(n, shared_.digit);
      target -= shared_.above;
      const bool whole = shared_.found_count == 1 || (ones && shared_.found_amount == target);
      cluster_.sync();
      if (whole) break;
    }
    return found;
  }

  // The digit where amounts from the highest digit down reach `target`; leaves it in shared memory
  // with what lies above it. A thread has two digits.
  __device__ void search(uint64_t target) {
    static_assert(kBins == 2 * kThreads);
    uint64_t amount[2] = {};
    uint32_t count[2] = {};
    const int digit = kBins - 1 - 2 * me_;  // and the one below
    for (int b = 0; b < kBlocks; ++b) {
      const Shared& other = *cluster_.map_shared_rank(&shared_, b);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        amount[i] += other.amount[digit - i], count[i] += other.count[digit - i];
    }
    uint64_t sum = amount[0] + amount[1];
    const int lane = me_ % 32, warp = me_ / 32;
    for (int d = 1; d < 32; d *= 2) {
      const uint64_t other = __shfl_up_sync(kAllLanes, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) shared_.warp_amount[warp] = sum;
    __syncthreads();
    uint64_t above = sum - amount[0] - amount[1];
    for (int w = 0; w < warp; ++w) above += shared_.warp_amount[w];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (above < target && above + amount[i] >= target) {
        shared_.digit = static_cast<uint32_t>(digit - i);
        shared_.above = above;
        shared_.found_amount = amount[i];
        shared_.found_count = count[i];
      }
      above += amount[i];
    }
    __syncthreads();
  }

  // A kept token's weight, else 0.
  __device__ double kept_weight(int id, bool penalised, const Rank& least) const {
    if (id >= end_) return 0;
    const double x = value(id, penalised);
    if (rank_of(x, id) < least) return 0;
    const double w = weight(x);
    return w < sampling_.min_p ? 0 : w;
  }

  __device__ int32_t draw(bool penalised, const Rank& least) {
    double sum = 0;
    for (int id = begin_ + me_; id < end_; id += kThreads) sum += kept_weight(id, penalised, least);
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAllLanes, sum, d);
    if (me_ % 32 == 0) shared_.warp_sum[me_ / 32] = sum;
    __syncthreads();
    if (me_ == 0) {
      sum = 0;
      for (const double part : shared_.warp_sum) sum += part;
      shared_.block_sum = sum;
    }
    cluster_.sync();
    double total = 0, reached = 0, before = 0;
    for (int b = 0; b < kBlocks; ++b) total += cluster_.map_shared_rank(&shared_, b)->block_sum;
    const double target = uniform(sampling_.seed, p_.position[row_]) * total;
    int owner = 0;  // the block whose part holds the target, or the last that holds anything
    for (int b = 0; b < kBlocks; ++b) {
      const double part = cluster_.map_shared_rank(&shared_, b)->block_sum;
      if (part > 0) owner = b, before = reached;
      reached += part;
      if (reached > target) break;
    }
    if (block_ == owner) find(penalised, least, before, target);
    cluster_.sync();
    return cluster_.map_shared_rank(&shared_, owner)->block_flag;
  }

  // Leaves the token in block_flag: the first whose weight takes the sum past the target, or the
  // last that has a weight.
  __device__ void find(bool penalised, const Rank& least, double before, double target) {
    __syncthreads();
    if (me_ == 0) shared_.block_flag = -1;
    const int lane = me_ % 32, warp = me_ / 32;
    for (int first = begin_; first < end_; first += kThreads) {
      const int id = first + me_;
      const double w = kept_weight(id, penalised, least);
      double sum = w;
      for (int d = 1; d < 32; d *= 2) {
        const double other = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) sum += other;
      }
      __syncthreads();
      if (lane == 31) shared_.warp_sum[warp] = sum;
      __syncthreads();
      double base = before;
      for (int i = 0; i < kWarps; ++i) {
        if (i < warp) base += shared_.warp_sum[i];
        before += shared_.warp_sum[i];
      }
      // Ids ascend with threads: the lowest that passes the target, else the highest so far.
      const bool passes = w > 0 && base + sum > target;
      const int lowest = __syncthreads_or(passes);
      if (lowest) {
        if (me_ == 0) shared_.block_flag = INT32_MAX;
        __syncthreads();
        if (passes) atomicMin(&shared_.block_flag, id);
        return;
      }
      if (w > 0) atomicMax(&shared_.block_flag, id);
    }
  }

  const SampleParams& p_;
  Shared& shared_;
  const cg::cluster_group cluster_;
  const int64_t row_;
  const int me_, block_;
  int begin_, end_;
  SamplingRow sampling_;
  double largest_ = 0;
  bool failed_ = false;
};

__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    sample_kernel(const __grid_constant__ SampleParams p) {
  release_successor();
  __shared__ Shared shared;
  wait_for_predecessor();
  RowSampler(p, shared).run();
}

}  // namespace

int64_t sample_workspace_bytes(int64_t rows, int64_t vocab, bool penalties) {
  return penalties ? rows * vocab * static_cast<int64_t>(sizeof(int32_t)) : 0;
}

void sample(const SampleParams& p, cudaStream_t stream) {
  check_count("rows", p.rows, 0);
  if (p.vocab < 1 || p.vocab > kMaxVocab)
    fail("vocab: expected 1 to ", kMaxVocab, ", got ", p.vocab);
  if (p.rows == 0) return;
  check_rows("logits", p.logits, p.rows, p.vocab);
  check_pointer("token", p.token, sizeof(int32_t));
  if (p.sampling) {
    check_pointer("sampling", p.sampling, alignof(SamplingRow));
    check_pointer("position", p.position, sizeof(int64_t));
  }
  if (p.history.tokens) {
    check_pointer("history.prompt_length", p.history.prompt_length, sizeof(int32_t));
    check_pointer("history.length", p.history.length, sizeof(int32_t));
    check_pointer("workspace", p.workspace, 16);
  }
  launch_dependent("sample", sample_kernel, dim3(blocks_for(p.rows * kBlocks, 1)), kThreads, 0,
                   stream, p);
}

}  // namespace replayssm::cuda
