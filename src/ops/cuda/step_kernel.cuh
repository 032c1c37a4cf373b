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

#include "ops/cuda/step_fetch.cuh"
#include "ops/cuda/step_head.cuh"
#include "ops/cuda/step_replay.cuh"
#include "ops/cuda/step_tiles.cuh"

namespace replayssm::cuda {

// kMany: windows may have more than one token.
template <Family kFamily, class Checkpoint, class Read, int kState, bool kMany>
class BlockStep {
 public:
  static constexpr bool kHasCopy = !std::is_void_v<Read>;
  // What steps that do not fold read, and how.
  using Source = std::conditional_t<kHasCopy, Read, Checkpoint>;
  static constexpr bool kTiles = kMany || !std::is_same_v<Source, float>;
  using Shared = BlockShared<kFamily, kState>;
  using Heads = BlockHeads<kFamily, std::conditional_t<kTiles, Source, void>, kState, kMany>;
  using ReadGroup = Group<Source, kState, kTiles ? Access::kTiles : Access::kRows>;
  template <class S>
  using ReplayGroup = Group<S, kState, Access::kReplay>;

  __device__ BlockStep(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                       const Shared& shared, int begin, int end)
      : p_(p), launch_(launch), b_(b), shared_(shared), begin_(begin), end_(end) {}

  // Starts to fetch states, brings everything else to shared memory. A barrier must follow.
  __device__ WarpStream fetch() const {
    WarpStream stream(launch_, states(), kState * (uses_copy() ? int(sizeof(Source)) : kStoredSize),
                      shared_.stream(), begin_, end_);
    with_group([&]<class G, bool kReplay, class S>() { stream.template start<G>(); });
    if (kIs8Bit<Source> && uses_copy()) fetch_row_scales();
    switch (p_.state.activation_dtype) {
      case DType::kBFloat16: fetch_rows<Bf16>(); break;
      case DType::kFloat16: fetch_rows<Fp16>(); break;
      default: fetch_rows<float>(); break;
    }
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
    const int begin = column(begin_), stop = column(end_);
    for (int i = 0; i < b_.window; ++i) {
      const int64_t token = b_.token + i;
      const int64_t base =
          token * (launch_.heads * launch_.head_dim) + b_.head * launch_.head_dim + b_.row;
      for (int at = begin + threadIdx.x % 32; at < stop; at += 32) {
        float o = kPadding ? 0.0f : shared_.outputs(i)[at];
        if (!kPadding && p_.z)
          o *= silu(load_z(token * p_.z_stride + b_.head * launch_.head_dim + b_.row + at));
        switch (p_.o_dtype) {
          case DType::kBFloat16: static_cast<Bf16*>(p_.o)[base + at] = from_float<Bf16>(o); break;
          case DType::kFloat16: static_cast<Fp16*>(p_.o)[base + at] = from_float<Fp16>(o); break;
          default: static_cast<float*>(p_.o)[base + at] = o;
        }
      }
    }
  }

 private:
  static constexpr int kStoredSize = sizeof(Checkpoint);

  __device__ bool uses_copy() const { return kHasCopy && b_.stored == 0; }

  // The block's first row.
  __device__ const char* states() const {
    const int64_t row =
        (static_cast<int64_t>(b_.slot) * launch_.heads + b_.head) * launch_.head_dim + b_.row;
    if (uses_copy())
      return static_cast<const char*>(p_.state.read_copy.data) + row * (kState * sizeof(Source));
    return static_cast<const char*>(p_.state.checkpoint) + row * (kState * kStoredSize);
  }

  // The block's column of a pass's first row.
  __device__ int column(int pass) const {
    const int head = launch_.passes.divide(pass);
    return head * launch_.slice_rows + (pass - head * launch_.head_passes) * kPassRows;
  }

  // Calls fn<Group, kReplay>() for what this step streams.
  template <class Fn>
  __device__ void with_group(Fn&& fn) const {
    if (b_.replayed == 0) return fn.template operator()<ReadGroup, false, Source>();
    if constexpr (kHasCopy) {
      if (uses_copy()) return fn.template operator()<ReplayGroup<Source>, true, Source>();
    }
    fn.template operator()<ReplayGroup<Checkpoint>, true, Checkpoint>();
  }

  template <class Act>
  __device__ void fetch_rows() const {
    RowFetch<kFamily, Act, kState>(p_, launch_, b_, shared_).fetch();
  }

  __device__ void fetch_row_scales() const {
    const int64_t row =
        (static_cast<int64_t>(b_.slot) * launch_.heads + b_.head) * launch_.head_dim + b_.row;
    for (int i = threadIdx.x; i < launch_.layout.columns; i += blockDim.x)
      shared_.row_scales()[i] = p_.state.read_copy.scale[row + i];
  }

  // outputs = the share of ring and window rows, of the rows of this warp.
  __device__ void mix() const {
    const int head_begin = launch_.passes.divide(begin_);
#pragma unroll 1
    for (int head = head_begin, pass = begin_; pass < end_; ++head) {
      const int next = min(end_, (head + 1) * launch_.head_passes);
      const int stop =
          column(next - 1) +
          min(kPassRows, launch_.slice_rows - (next - 1 - head * launch_.head_passes) * kPassRows);
      const float skip = p_.skip ? p_.skip[b_.head + head] : 0.0f;
#pragma unroll 1
      for (int at = column(pass) + threadIdx.x % 32 * 2; at < stop; at += 64) mix(head, at, skip);
      pass = next;
    }
  }
  __device__ void mix(int head, int at, float skip) const {
    constexpr int kQueries = kMany ? 4 : 1;
    const int first = b_.reads_after ? b_.rows : b_.replayed;
#pragma unroll 1
    for (int i = 0; i < b_.window; i += kQueries) {
      float2 sum[kQueries] = {};
#pragma unroll 2
      for (int j = first; j < b_.rows; ++j) {
        const float2 v = *reinterpret_cast<const float2*>(shared_.value(j) + at);
        float c[kQueries];
        load_elements<float, kQueries>(shared_.coefficients(head, j) + i, c);
        if constexpr (kFamily == Family::kMamba2) {
          float product[kQueries];
          load_elements<float, kQueries>(shared_.products(j) + i, product);
#pragma unroll
          for (int u = 0; u < kQueries; ++u) c[u] *= product[u];
        }
#pragma unroll
        for (int u = 0; u < kQueries; ++u) {
          sum[u].x = fmaf(c[u], v.x, sum[u].x);
          sum[u].y = fmaf(c[u], v.y, sum[u].y);
        }
      }
#pragma unroll
      for (int u = 0; u < kQueries; ++u) {
        if (i + u >= b_.window) break;
        const float2 v = *reinterpret_cast<const float2*>(shared_.value(b_.history + i + u) + at);
        *reinterpret_cast<float2*>(shared_.outputs(i + u) + at) = {fmaf(skip, v.x, sum[u].x),
                                                                   fmaf(skip, v.y, sum[u].y)};
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

  // Calls fn(head, pass, column, rows) for this warp's passes, begin_head(head) before those of a
  // head.
  template <class Head, class Fn>
  __device__ void for_passes(Head&& begin_head, Fn&& fn) const {
    int head = launch_.passes.divide(begin_);
    int pass = begin_ - head * launch_.head_passes;
#pragma unroll 1
    for (int left = end_ - begin_; left > 0; ++head, pass = 0) {
      begin_head(head);
#pragma unroll 1
      for (; pass < launch_.head_passes && left > 0; ++pass, --left)
        fn(head, head * launch_.slice_rows + pass * kPassRows,
           min(kPassRows, launch_.slice_rows - pass * kPassRows));
    }
  }

  template <class G, class S>
  __device__ void replay(WarpStream& stream) const {
    const PassReplay<kFamily, Checkpoint, Read, kState> replay(p_, launch_, b_, shared_);
    for_passes([](int) {},
               [&](int head, int at, int rows) {
                 uint4 words[G::kWords];
                 stream.template next<G>(words);
                 replay.template run<S>(words, head, at, rows);
               });
  }

  // What the products with a head's states are scaled by.
  __device__ float scale(int head, int i) const {
    float scale = kTiles ? shared_.part_scale(head, i) : 1.0f;
    if constexpr (kFamily == Family::kMamba2) scale *= shared_.output_scale(head, i);
    return scale;
  }

  template <class G>
  __device__ void read_rows(WarpStream& stream) const {
    constexpr int kRows = G::kLaneRows / G::kPieces;
    static_assert(kRows == 2);
    const int lane = threadIdx.x % kRowLanes, group = threadIdx.x % 32 / kRowLanes;
    float t[kState / kRowLanes], factor = 1;
    for_passes(
        [&](int head) {
          load_padded<RowMap<float, kState>>(shared_.target(head, 0), lane, t);
          factor = scale(head, 0);
        },
        [&](int, int at, int rows) {
#pragma unroll
          for (int piece = 0; piece < G::kPieces; ++piece) {
            uint4 words[G::kWords];
            stream.template next<G>(words);
            if (piece * kPassRows / G::kPieces >= rows) continue;
            float o[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              float s[kState / kRowLanes];
#pragma unroll
              for (int i = 0; i < kState / kRowLanes; ++i)
                s[i] = reinterpret_cast<const float*>(words + r * (G::kWords / kRows))[i];
              o[r] = dot(s, t);
            }
            const float sum = factor * row_sum_pair(o, lane);
            const int row = piece * (kPassRows / G::kPieces) + lane / 4 * 4 + group;
            if (lane % 4 == 0) shared_.outputs(0)[at + row] += sum;
          }
        });
  }

  template <class G>
  __device__ void read_tiles(WarpStream& stream) const {
    const int lane = threadIdx.x % 32, row = lane / 4;
    TileVector<Source, kState, G::kTileWords> vector;
    float factor = 1;
    for_passes(
        [&](int head) {
          vector.load(shared_.parts(head, 0, Parts<Source, kState>::kStride));
          factor = scale(head, 0);
        },
        [&](int, int at, int rows) {
          uint4 words[G::kWords];
          stream.template next<G>(words);
          const float2 o = vector.multiply(words);
          if (lane % 4 != 0) return;
          add_output(0, at + row, factor * o.x);
          if (rows == kPassRows) add_output(0, at + row + kPassRows / 2, factor * o.y);
        });
  }
  __device__ void add_output(int i, int at, float o) const {
    if (kIs8Bit<Source>) o *= shared_.row_scales()[at];
    shared_.outputs(i)[at] += o;
  }

  template <class G>
  __device__ void read_many(WarpStream& stream) const {
    constexpr int kStride = Parts<Source, kState>::kStride;
    const int lane = threadIdx.x % 32, row = lane / 4;
    for_passes(
        [](int) {},
        [&](int head, int at, int rows) {
          TileSums sums[kMaxWindow / kTileQueries];
#pragma unroll
          for (int piece = 0; piece < G::kPieces; ++piece) {
            uint4 words[G::kWords];
            stream.template next<G>(words);
#pragma unroll
            for (int n = 0; n < kMaxWindow / kTileQueries; ++n)
              if (n * kTileQueries < b_.window)
                multiply_tile<Source, kState, G::kTileWords>(
                    words, shared_.parts(head, n * kTileQueries, kStride),
                    piece * (2 * kState / G::kPieces), b_.window - n * kTileQueries, sums[n]);
          }
#pragma unroll
          for (int n = 0; n < kMaxWindow / kTileQueries; ++n)
#pragma unroll
            for (int u = 0; u < 4; ++u) {
              const int i = n * kTileQueries + lane % 4 * 2 + u % 2;
              if (i >= b_.window || u / 2 * (kPassRows / 2) >= rows) continue;
              add_output(i, at + row + u / 2 * (kPassRows / 2), scale(head, i) * sums[n].get(u));
            }
        });
  }

  __device__ static float silu(float x) { return x / (1.0f + expf(-x)); }
  __device__ float load_z(int64_t at) const {
    switch (p_.state.activation_dtype) {
      case DType::kBFloat16: return to_float(static_cast<const Bf16*>(p_.z)[at]);
      case DType::kFloat16: return to_float(static_cast<const Fp16*>(p_.z)[at]);
      default: return static_cast<const float*>(p_.z)[at];
    }
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const int begin_, end_;
};

template <Family kFamily, class Checkpoint, class Read, int kState, bool kMany>
__global__ void __launch_bounds__(32 * kMaxWarps, 2)
    recurrent_step_kernel(const __grid_constant__ RecurrentStepParams p,
                          const __grid_constant__ StepLaunch launch) {
  using Step = BlockStep<kFamily, Checkpoint, Read, kState, kMany>;
  extern __shared__ __align__(128) char memory[];
  __shared__ BlockPlace place;
  release_successor();
  const BlockPlace b = block_place(p, launch);
  const typename Step::Shared shared(launch.layout, memory);
  // The number of warps is a power of two.
  const int shift = 31 - __clz(launch.config.warps), warp = threadIdx.x / 32;
  const int passes = launch.config.heads * launch.head_passes;
  const int begin = (warp * passes) >> shift, end = ((warp + 1) * passes) >> shift;
  const Step early(p, launch, b, shared, begin, end);
  if (b.slot < 0) {
    wait_for_predecessor();
    return early.template store_outputs<true>();
  }
  if (b.rows == 0 || (b.window == 0 && !launch.fold_all)) return wait_for_predecessor();

  WarpStream stream = early.fetch();
  if (threadIdx.x == 0) place = b;
  __syncthreads();
  // From here on it lies in shared memory: registers are for states.
  const Step step(p, launch, place, shared, begin, end);
  step.run(stream);
  step.template store_outputs<false>();
}

}  // namespace replayssm::cuda
