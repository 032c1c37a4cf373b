// One decode step of the recurrence, windows of any length up to kMaxWindow, chains and trees.
//
// Grid: (heads and slices as LaunchConfig says, sequences). Each warp owns consecutive rows of the
// states and fetches the first of them as soon as the block knows its slot. Meanwhile the block
// brings ring and window rows to shared memory, and forms for each of its heads and tokens
//
//   t    the query walked back to the checkpoint (output_only), or the query itself
//   c_j  what row j of ring and window adds to the output, c_j v_j
//
// Then o = S t + sum_j c_j v_j. Where the step folds, the recurrence first runs over the rows of S
// in registers, and they are stored once.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/step_back.cuh"
#include "ops/cuda/step_fetch.cuh"
#include "ops/cuda/step_head.cuh"
#include "ops/cuda/step_replay.cuh"
#include "ops/cuda/step_tiles.cuh"

namespace replayssm::cuda {

// Blocks of a multiprocessor: what the registers are shared among.
template <Family kFamily, class Checkpoint, class Read, bool kMany>
inline constexpr int kBlocks = kFamily != Family::kKimiDelta && !kMany &&
                                       std::is_same_v<Checkpoint, float> && std::is_void_v<Read>
                                   ? 5
                                   : 4;

// kMany: windows may have more than one token.
template <Family kFamily, class Act, class Checkpoint, class Read, int kState, bool kMany>
class BlockStep {
 public:
  static constexpr bool kHasCopy = !std::is_void_v<Read>;
  // What steps that do not fold read, and how.
  using Source = std::conditional_t<kHasCopy, Read, Checkpoint>;
  static constexpr bool kTiles = !std::is_same_v<Source, float>;
  using Shared = BlockShared<kFamily, Act, kState>;
  using Fetch = RowFetch<kFamily, Act, kState>;
  using Back = LayerBack<kFamily, Act, kState>;
  using Heads = BlockHeads<kFamily, Act, std::conditional_t<kTiles, Source, void>, kState, kMany>;
  using ReadGroup = Group<Source, kState, kTiles ? Access::kTiles : Access::kRows>;
  template <class S>
  using ReplayGroup = Group<S, kState, Access::kRows>;

  __device__ BlockStep(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                       const Shared& shared, int begin, int end)
      : p_(p), launch_(launch), b_(b), shared_(shared), begin_(begin), end_(end) {}

  // Brings all but the states to shared memory, starts to fetch these. A barrier must follow.
  __device__ WarpStream fetch() const {
    WarpStream stream(launch_, states(), kState * (uses_copy() ? int(sizeof(Source)) : kStoredSize),
                      shared_.stream(), begin_, end_);
    const Fetch rows(p_, launch_, b_, shared_);
    if (kIs8Bit<Source> && uses_copy()) fetch_row_scales();
    rows.fetch_history();
    with_group([&]<class G, bool kReplay, class S>() { stream.template start<G>(); });
    rows.fetch_window();
    Heads(p_, launch_, b_, shared_).store_gates(rows);
    copy_async_wait_but<kGroupsInFlight>();
    return stream;
  }

  __device__ void run(WarpStream& stream) const {
    Heads(p_, launch_, b_, shared_).prepare();
    __syncthreads();
    mix();
    __syncwarp();
    read(stream);
    __syncwarp();
  }

  // Of the rows of this warp; of padding, zeros.
  template <bool kPadding>
  __device__ void store_outputs() const {
    const int begin = begin_ * kPassRows, stop = end_ * kPassRows;
    for (int i = 0; i < b_.window; ++i) {
      const int64_t token = b_.token + i;
      const int64_t base =
          token * (launch_.heads * launch_.head_dim) + b_.head * launch_.head_dim + b_.row;
      for (int at = begin + threadIdx.x % 32; at < stop; at += 32) {
        float o = kPadding ? 0.0f : shared_.outputs(i)[at];
        if (!kPadding && p_.z)
          o *= silu(load_z(token * p_.z_stride + b_.head * launch_.head_dim + b_.row + at));
        store_run<1>(p_.o, p_.o_dtype, base + at, &o);
      }
    }
  }

 private:
  static constexpr int kStoredSize = sizeof(Checkpoint);

  __device__ bool uses_copy() const { return kHasCopy && b_.stored == 0 && !launch_.fold_all; }

  // The block's first row.
  __device__ const char* states() const {
    const int64_t row =
        (static_cast<int64_t>(b_.slot) * launch_.heads + b_.head) * launch_.head_dim + b_.row;
    if (uses_copy())
      return static_cast<const char*>(p_.state.read_copy.data) + row * (kState * sizeof(Source));
    return static_cast<const char*>(p_.state.checkpoint) + row * (kState * kStoredSize);
  }

  // Calls fn<Group, kReplay>() for what this step streams.
  template <class Fn>
  __device__ void with_group(Fn&& fn) const {
    // fp32 states meet the vectors of several tokens as rows that have been replayed do.
    constexpr bool kReads = kTiles || !kMany;
    if (kReads && b_.replayed == 0 && !launch_.fold_all)
      return fn.template operator()<ReadGroup, false, Source>();
    if constexpr (kHasCopy) {
      if (uses_copy()) return fn.template operator()<ReplayGroup<Source>, true, Source>();
    }
    fn.template operator()<ReplayGroup<Checkpoint>, true, Checkpoint>();
  }

  __device__ void fetch_row_scales() const {
    const int64_t row =
        (static_cast<int64_t>(b_.slot) * launch_.heads + b_.head) * launch_.head_dim + b_.row;
    for (int i = threadIdx.x * 4; i < launch_.layout.columns; i += blockDim.x * 4)
      copy_async_16(shared_.row_scales() + i, p_.state.read_copy.scale + row + i);
  }

  // outputs = the share of ring and window rows, of the rows of this warp.
  __device__ void mix() const {
    int head = launch_.passes.divide(begin_);
#pragma unroll 1
    for (int pass = begin_; pass < end_; ++head) {
      const int next = min(end_, (head + 1) * launch_.head_passes);
      const float skip = p_.skip ? p_.skip[b_.head + head] : 0.0f;
#pragma unroll 1
      for (int at = pass * kPassRows + threadIdx.x % 32 * 2; at < next * kPassRows; at += 64)
        mix(head, at, skip);
      pass = next;
    }
  }
  __device__ void mix(int head, int at, float skip) const {
    constexpr int kTokens = kMany ? 4 : 1;
#pragma unroll 1
    for (int i = 0; i < b_.window; i += kTokens) {
      float2 sum[kTokens] = {};
#pragma unroll 4
      for (int j = b_.first_mixed(); j < b_.rows; ++j) {
        float v[2], c[kTokens];
        load_elements<Act, 2>(shared_.value(j) + at, v);
        load_elements<float, kTokens>(shared_.coefficients(head, j) + i, c);
        if constexpr (kFamily == Family::kMamba2) {
          float product[kTokens];
          load_elements<float, kTokens>(shared_.products(j) + i, product);
#pragma unroll
          for (int u = 0; u < kTokens; ++u) c[u] *= product[u];
        }
#pragma unroll
        for (int u = 0; u < kTokens; ++u) {
          sum[u].x = fmaf(c[u], v[0], sum[u].x);
          sum[u].y = fmaf(c[u], v[1], sum[u].y);
        }
      }
#pragma unroll
      for (int u = 0; u < kTokens; ++u) {
        if (i + u >= b_.window) break;
        float v[2];
        load_elements<Act, 2>(shared_.value(b_.history + i + u) + at, v);
        *reinterpret_cast<float2*>(shared_.outputs(i + u) + at) = {fmaf(skip, v[0], sum[u].x),
                                                                   fmaf(skip, v[1], sum[u].y)};
      }
    }
  }

  // outputs += S t, and the recurrence.
  __device__ void read(WarpStream& stream) const {
    with_group([&]<class G, bool kReplay, class S>() {
      if constexpr (kReplay) {
        replay<G, S>(stream);
      } else if constexpr (!kTiles) {
        read_rows<G>(stream);
      } else if constexpr (kMany) {
        read_many<G>(stream);
      } else {
        read_tiles<G>(stream);
      }
    });
  }

  // Calls begin_head(head), then fn(head, column, words) for its passes, for the heads of this
  // warp.
  template <class G, class Head, class Fn>
  __device__ void for_passes(WarpStream& stream, Head&& begin_head, Fn&& fn) const {
    int head = launch_.passes.divide(begin_);
#pragma unroll 1
    for (int pass = begin_; pass < end_; ++head) {
      const int stop = min(end_, (head + 1) * launch_.head_passes);
      begin_head(head);
#pragma unroll 1
      for (; pass < stop; pass += G::kPasses) {
        uint4 words[kGroupWords];
        stream.template next<G>(words);
#pragma unroll
        for (int u = 0; u < G::kPasses; ++u)
          if (u == 0 || pass + u < stop)
            fn(head, (pass + u) * kPassRows, words + u * G::kPassWords);
      }
      pass = stop;
    }
  }

  // Windows of several tokens replay more: two passes share what they need of a row.
  template <class G, class S>
  __device__ void replay(WarpStream& stream) const {
    constexpr int kPasses = kMany ? 2 : 1, kStep = G::kPasses > kPasses ? G::kPasses : kPasses;
    const RowReplay<kFamily, Act, Checkpoint, Read, kState, kPasses> replay(p_, launch_, b_,
                                                                            shared_);
    int head = launch_.passes.divide(begin_);
#pragma unroll 1
    for (int pass = begin_; pass < end_; ++head) {
      const int stop = min(end_, (head + 1) * launch_.head_passes);
#pragma unroll 1
      for (; pass < stop; pass += kStep) {
        uint4 words[kStep / G::kPasses][kGroupWords];
#pragma unroll
        for (int n = 0; n < kStep / G::kPasses; ++n)
          if (n == 0 || pass + n * G::kPasses < stop) stream.template next<G>(words[n]);
#pragma unroll
        for (int u = 0; u < kStep; u += kPasses)
          if (u == 0 || pass + u < stop)
            replay.template run<S>(words[0] + u * G::kPassWords, head, (pass + u) * kPassRows,
                                   min(kPasses, stop - pass - u));
      }
      pass = stop;
    }
  }

  // What the products with a head's states are scaled by.
  __device__ float scale(int head, int i) const {
    float scale = kTiles ? shared_.part_scale(head, i) : 1.0f;
    if constexpr (kFamily == Family::kMamba2) scale *= shared_.output_scale(head, i);
    return scale;
  }

  template <class G>
  __device__ void read_rows(WarpStream& stream) const {
    constexpr int kPerLane = kState / kRowLanes, kRows = 2;
    const int lane = threadIdx.x % kRowLanes;
    const int row = lane / 4 * 4 + threadIdx.x % 32 / kRowLanes;
    float t[kPerLane], factor = 1;
    for_passes<G>(
        stream,
        [&](int head) {
          load_padded<RowMap<float, kState>>(shared_.target(head, 0), lane, t);
          factor = scale(head, 0);
        },
        [&](int, int at, const uint4* words) {
          float o[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            float s[kPerLane];
#pragma unroll
            for (int i = 0; i < kPerLane; ++i)
              s[i] = reinterpret_cast<const float*>(words + r * (G::kPassWords / kRows))[i];
            o[r] = dot(s, t);
          }
          const float sum = factor * row_sum_pair(o, lane);
          if (lane % 4 == 0) shared_.outputs(0)[at + row] += sum;
        });
  }

  template <class G>
  __device__ void read_tiles(WarpStream& stream) const {
    const int lane = threadIdx.x % 32;
    TileVector<Source, kState> vector;
    float factor = 1;
    for_passes<G>(
        stream,
        [&](int head) {
          vector.load(shared_.parts(head, 0, Parts<Source, kState>::kStride));
          factor = scale(head, 0);
        },
        [&](int, int at, const uint4* words) {
          const float o = factor * vector.multiply(words);
          if (lane % 4 == 0) add_output(0, at + lane / 4, o);
        });
  }
  __device__ void add_output(int i, int at, float o) const {
    if (kIs8Bit<Source>) o *= shared_.row_scales()[at];
    shared_.outputs(i)[at] += o;
  }

  template <class G>
  __device__ void read_many(WarpStream& stream) const {
    constexpr int kStride = Parts<Source, kState>::kStride;
    const int lane = threadIdx.x % 32;
    for_passes<G>(
        stream, [](int) {},
        [&](int head, int at, const uint4* words) {
          TileSums sums[kMaxWindow / kTileVectors];
          multiply_rows<Source, kState>(words, shared_.parts(head, 0, kStride), b_.window, sums);
#pragma unroll
          for (int n = 0; n < kMaxWindow / kTileVectors; ++n) {
            const int i = n * kTileVectors + lane % 4;
            if (i < b_.window) add_output(i, at + lane / 4, scale(head, i) * sums[n].get());
          }
        });
  }

  __device__ static float silu(float x) { return x / (1.0f + expf(-x)); }
  __device__ float load_z(int64_t at) const { return to_float(static_cast<const Act*>(p_.z)[at]); }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const int begin_, end_;
};

template <Family kFamily, class Act, class Checkpoint, class Read, int kState, bool kMany>
__global__ void __launch_bounds__(32 * kMaxWarps, (kBlocks<kFamily, Checkpoint, Read, kMany>))
    recurrent_step_kernel(const __grid_constant__ RecurrentStepParams p,
                          const __grid_constant__ StepLaunch launch) {
  using Step = BlockStep<kFamily, Act, Checkpoint, Read, kState, kMany>;
  extern __shared__ __align__(128) char memory[];
  __shared__ BlockPlace place;
  release_successor();
  const typename Step::Shared shared(launch.layout, memory);
  // The number of warps is a power of two.
  const int shift = 31 - __clz(launch.config.warps), warp = threadIdx.x / 32;
  const int passes = launch.config.heads * launch.head_passes;
  const int begin = (warp * passes) >> shift, end = ((warp + 1) * passes) >> shift;
  const BlockPlace b = block_place(p, launch);
  const Step early(p, launch, b, shared, begin, end);
  if (b.slot < 0) {
    wait_for_predecessor();
    return early.template store_outputs<true>();
  }
  const bool works =
      launch.fold_all ? b.copies || (b.rows > 0 && b.target == b.slot) : b.window > 0;
  if (!works) return wait_for_predecessor();

  WarpStream stream = early.fetch();
  if (threadIdx.x == 0) place = b;
  __syncthreads();
  // From here on it lies in shared memory: registers are for states.
  const Step step(p, launch, place, shared, begin, end);
  step.run(stream);
  if (launch.norm.z) {
    typename Step::Back(p, launch, place, shared).run();
  } else {
    step.template store_outputs<false>();
  }
  typename Step::Fetch(p, launch, place, shared).append();
}

}  // namespace replayssm::cuda
