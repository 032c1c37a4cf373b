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
#include "ops/cuda/greedy.h"
#include "ops/cuda/reduce.cuh"
#include "ops/cuda/sampling_rank.cuh"

namespace replayssm::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8, kThreads = kSamplerWarps * 32, kWarps = kSamplerWarps;
constexpr int32_t kSeen = 1 << 30;  // a token of the prompt; lower bits count the output's
constexpr double kUnit = 0x1p-44;   // of amounts

template <class T>
class RowSampler {
 public:
  __device__ RowSampler(const SampleParams& p, SamplerShared& shared)
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
    if (me_ == 0) shared_.sampling = p_.sampling[row_];
    __syncthreads();
    penalised_ = has_penalties();
    if (penalised_) count_tokens();
    const int32_t token = choose();
    if (block_ == 0 && me_ == 0) p_.token[row_] = token;
    if (penalised_) forget_tokens();
    cluster_.sync();  // nobody reads this block's memory any more
  }

 private:
  __device__ bool has_penalties() const {
    return p_.history.tokens &&
           (shared_.sampling.repetition_penalty != 1 || shared_.sampling.presence_penalty != 0 ||
            shared_.sampling.frequency_penalty != 0);
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

  // Calls fn(id, logit) for this thread's part, with several loads in flight.
  template <class Fn>
  __device__ void for_logits(Fn&& fn) const {
    constexpr int kAtOnce = 8;
    for (int first = begin_ + me_; first < end_; first += kAtOnce * kThreads) {
      float x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i * kThreads < end_) x[i] = logit(first + i * kThreads);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i * kThreads < end_) fn(first + i * kThreads, x[i]);
    }
  }
  __device__ float logit(int id) const {
    return to_float(static_cast<const T*>(p_.logits.data)[row_ * p_.logits.stride + id]);
  }
  // With penalties.
  __device__ double value(int id, float logit) const {
    double x = logit;
    if (!penalised_) return x;
    const int32_t seen = __ldcg(counts() + id);
    if (seen == 0) return x;
    const int output = seen & ~kSeen;
    x = x > 0 ? x / shared_.sampling.repetition_penalty : x * shared_.sampling.repetition_penalty;
    x -= shared_.sampling.frequency_penalty * output;
    return output > 0 ? x - shared_.sampling.presence_penalty : x;
  }
  __device__ double weight(double x) const {
    return exp((x - largest_) / shared_.sampling.temperature);
  }

  __device__ int32_t choose() {
    const Rank best = find_best();
    if (failed_) return kNoToken;
    if (shared_.sampling.temperature == 0) return static_cast<int32_t>(~best.id);
    largest_ = value_of(best);
    Rank least;  // of the kept
    if (shared_.sampling.top_k > 0 && shared_.sampling.top_k < p_.vocab) {
      const auto count = static_cast<uint64_t>(shared_.sampling.top_k);
      least = bound<true>(least, [](double) { return 1; }, [&](uint64_t) { return count; });
    }
    if (shared_.sampling.top_p < 1) {
      const auto amount = [&](double x) { return static_cast<uint64_t>(weight(x) / kUnit + 0.5); };
      const auto target = [&](uint64_t all) {
        return static_cast<uint64_t>(ceil(shared_.sampling.top_p * static_cast<double>(all)));
      };
      least = bound<false>(least, amount, target);
    }
    return draw(least);
  }

  // The first in the order. failed_: a logit is NaN, or the largest is not finite.
  __device__ Rank find_best() {
    Rank best;
    int flag = 0, first = 0;
    float most = -INFINITY;
    for_logits([&](int id, float x) {
      flag |= !(x < INFINITY);             // NaN too
      if (x > most) most = x, first = id;  // ids ascend
      if (!penalised_) return;
      const Rank r = rank_of(value(id, x), id);
      if (best < r) best = r;
    });
    if (!penalised_ && most > -INFINITY) best = rank_of(most, first);
    // Bit 0: wrong; bit 1: there is a finite one.
    flag |= most > -INFINITY ? 2 : 0;
    for (int d = 16; d > 0; d /= 2) {
      const Rank other{0, __shfl_xor_sync(kAllLanes, best.value, d),
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
      const SamplerShared& other = *cluster_.map_shared_rank(&shared_, b);
      flag |= other.block_flag;
      if (best < other.block_best) best = other.block_best;
    }
    failed_ = flag != 2;
    cluster_.sync();
    return best;
  }

  // The last of the shortest leading part of the kept whose amounts reach target(sum of all).
  // kOnes: all amounts are 1.
  template <bool kOnes, class Amount, class Target>
  __device__ Rank bound(const Rank& least, Amount&& amount, Target&& target) {
    Rank found;
    uint64_t left = 0;
    for (int n = 0; n < Rank::kDigits; ++n) {
      for (int i = me_; i < kBins; i += kThreads) shared_.amount[i] = 0, shared_.count[i] = 0;
      __syncthreads();
      for_logits([&](int id, float logit) {
        const double x = value(id, logit);
        const Rank r = rank_of(x, id, largest_);
        if (r < least || !r.same_before(n, found)) return;
        const uint32_t digit = r.digit(n);
        if constexpr (!kOnes)
          atomicAdd(reinterpret_cast<unsigned long long*>(&shared_.amount[digit]), amount(x));
        atomicAdd(&shared_.count[digit], 1u);
      });
      cluster_.sync();
      search<kOnes>([&](uint64_t all) { return n == 0 ? target(all) : left; });
      found.set_digit(n, shared_.digit);
      left = shared_.left;
      const bool whole = shared_.found_count == 1 || (kOnes && shared_.found_count == left);
      cluster_.sync();
      if (whole) break;
    }
    return found;
  }

  // The digit where amounts from the highest digit down reach target(sum of all); leaves it in
  // shared memory with what is to be reached within it. A thread has kEach digits.
  template <bool kOnes, class Target>
  __device__ void search(Target&& target) {
    constexpr int kEach = kBins / kThreads;
    uint64_t amount[kEach] = {}, mine = 0;
    uint32_t count[kEach] = {};
    const int digit = kBins - 1 - kEach * me_;  // and those below
    for (int b = 0; b < kBlocks; ++b) {
      const SamplerShared& other = *cluster_.map_shared_rank(&shared_, b);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        count[i] += other.count[digit - i];
        amount[i] += kOnes ? other.count[digit - i] : other.amount[digit - i];
      }
    }
#pragma unroll
    for (const uint64_t x : amount) mine += x;
    uint64_t sum = mine;
    const int lane = me_ % 32, warp = me_ / 32;
    for (int d = 1; d < 32; d *= 2) {
      const uint64_t other = __shfl_up_sync(kAllLanes, sum, d);
      if (lane >= d) sum += other;
    }
    if (lane == 31) shared_.warp_amount[warp] = sum;
    __syncthreads();
    uint64_t above = sum - mine, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      const uint64_t part = shared_.warp_amount[w];
      if (w < warp) above += part;
      all += part;
    }
    const uint64_t needed = target(all);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (above < needed && above + amount[i] >= needed) {
        shared_.digit = static_cast<uint32_t>(digit - i);
        shared_.left = needed - above;
        shared_.found_count = count[i];
      }
      above += amount[i];
    }
    __syncthreads();
  }

  // A kept token's weight, else 0.
  __device__ double kept_weight(int id, float logit, const Rank& least) const {
    const double x = value(id, logit);
    if (rank_of(x, id, largest_) < least) return 0;
    const double w = weight(x);
    return w < shared_.sampling.min_p ? 0 : w;
  }

  __device__ int32_t draw(const Rank& least) {
    double sum = 0;
    for_logits([&](int id, float x) { sum += kept_weight(id, x, least); });
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
    const double target = uniform(shared_.sampling.seed, p_.position[row_]) * total;
    int owner = 0;  // the block whose part holds the target, or the last that holds anything
    for (int b = 0; b < kBlocks; ++b) {
      const double part = cluster_.map_shared_rank(&shared_, b)->block_sum;
      if (part > 0) owner = b, before = reached;
      reached += part;
      if (reached > target) break;
    }
    if (block_ == owner) find(least, before, target);
    cluster_.sync();
    return cluster_.map_shared_rank(&shared_, owner)->block_flag;
  }

  // Leaves the token in block_flag: the first whose weight takes the sum past the target, or the
  // last that has a weight. Threads have a few tokens in a row.
  __device__ void find(const Rank& least, double before, double target) {
    constexpr int kRun = 4;
    __syncthreads();
    if (me_ == 0) shared_.block_flag = -1;
    const int lane = me_ % 32, warp = me_ / 32;
    for (int first = begin_; first < end_; first += kRun * kThreads) {
      const int mine = first + kRun * me_;
      double w[kRun], sum = 0;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        w[i] = mine + i < end_ ? kept_weight(mine + i, logit(mine + i), least) : 0;
        sum += w[i];
      }
      double through = sum;
      for (int d = 1; d < 32; d *= 2) {
        const double other = __shfl_up_sync(kAllLanes, through, d);
        if (lane >= d) through += other;
      }
      __syncthreads();
      if (lane == 31) shared_.warp_sum[warp] = through;
      __syncthreads();
      double reached = before + (through - sum);
      for (int i = 0; i < kWarps; ++i) {
        if (i < warp) reached += shared_.warp_sum[i];
        before += shared_.warp_sum[i];
      }
      int passes = INT32_MAX, last = -1;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        reached += w[i];
        if (w[i] > 0) last = mine + i;
        if (w[i] > 0 && reached > target) passes = min(passes, mine + i);
      }
      // Ids ascend with threads: the lowest that passes the target, else the highest so far.
      if (__syncthreads_or(passes < INT32_MAX)) {
        if (me_ == 0) shared_.block_flag = INT32_MAX;
        __syncthreads();
        atomicMin(&shared_.block_flag, passes);
        return;
      }
      if (last >= 0) atomicMax(&shared_.block_flag, last);
    }
  }

  const SampleParams& p_;
  SamplerShared& shared_;
  const cg::cluster_group cluster_;
  const int64_t row_;
  const int me_, block_;
  int begin_, end_;
  double largest_ = 0;
  bool failed_ = false, penalised_ = false;
};

template <class T>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    sample_kernel(const __grid_constant__ SampleParams p) {
  release_successor();
  __shared__ SamplerShared shared;
  wait_for_predecessor();
  RowSampler<T>(p, shared).run();
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
  if (!p.sampling) return choose_likeliest(p, stream);
  check_pointer("sampling", p.sampling, alignof(SamplingRow));
  check_pointer("position", p.position, sizeof(int64_t));
  if (p.history.tokens) {
    check_pointer("history.prompt_length", p.history.prompt_length, sizeof(int32_t));
    check_pointer("history.length", p.history.length, sizeof(int32_t));
    check_pointer("workspace", p.workspace, 16);
  }
  const auto start = [&]<class T>() {
    launch_dependent("sample", sample_kernel<T>, dim3(blocks_for(p.rows * kBlocks, 1)), kThreads, 0,
                     stream, p);
  };
  switch (p.logits.dtype) {
    case DType::kBFloat16: return start.template operator()<Bf16>();
    case DType::kFloat16: return start.template operator()<Fp16>();
    default: return start.template operator()<float>();
  }
}

}  // namespace replayssm::cuda
