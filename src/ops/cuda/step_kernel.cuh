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
// in registers, and they are stored once; or outputs are read off S as it was, and it folds aside:
// 16-bit states on the tensor cores, fp32 states in windows of several tokens.
#pragma once

#include "ops/cuda/activations.cuh"
#include "ops/cuda/step_ahead.cuh"
#include "ops/cuda/step_fetch.cuh"
#include "ops/cuda/step_mix.cuh"
#include "ops/cuda/step_products.cuh"
#include "ops/cuda/step_read.cuh"
#include "ops/cuda/step_replay.cuh"
#include "ops/cuda/step_weights.cuh"

namespace replayssm::cuda {

// Blocks of a multiprocessor: what the registers are shared among.
template <Family kFamily, class Checkpoint, class Read, bool kMany, bool kAhead>
inline constexpr int kBlocks = kFamily != Family::kKimiDelta && !kMany &&
                                       std::is_same_v<Checkpoint, float> && std::is_void_v<Read>
                                   ? 5
                               : kMany && !kAhead ? 3
                                                  : 4;

// kMany: windows may have more than one token.
template <Family kFamily, class Act, class Checkpoint, class Read, int kState, bool kMany>
class BlockStep {
 public:
  static constexpr bool kHasCopy = !std::is_void_v<Read>;
  // What steps that do not fold read, and how.
  using Source = std::conditional_t<kHasCopy, Read, Checkpoint>;
  static constexpr bool kTileFolds =
      folds_in_tiles(kFamily, device_dtype<Act>(), device_dtype<Checkpoint>(), kHasCopy);
  static constexpr bool kRowFolds =
      folds_rows_aside(kFamily, device_dtype<Checkpoint>(), kHasCopy, kMany);
  using Context = StepContext<kFamily, Act, kState, kMany>;
  using Shared = typename Context::Shared;
  using Fetch = RowFetch<kFamily, Act, kState>;
  using Reader = StateReader<Context, Checkpoint, Source, kTileFolds || kRowFolds>;
  using Target = typename Reader::Target;
  template <class S>
  using ReplayGroup = Group<S, kState, Access::kRows>;

  __device__ BlockStep(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                       const Shared& shared, const Passes& passes)
      : p_(p),
        launch_(launch),
        b_(b),
        shared_(shared),
        context_{p, launch, b, shared},
        passes_(passes) {}

  // Brings all but the states to shared memory, starts to fetch these. A barrier must follow.
  __device__ WarpStream fetch() const {
    WarpStream stream(launch_, states(), kState * (uses_copy() ? int(sizeof(Source)) : kStoredSize),
                      shared_.stream(), passes_.begin, passes_.end);
    const Fetch rows(p_, launch_, b_, shared_);
    if (threadIdx.x == 0) *static_cast<uint4*>(shared_.zeros()) = {};
    if (kIs8Bit<Source> && uses_copy()) fetch_row_scales();
    rows.fetch_history();
    with_group([&]<class G, bool kReplay, class S>() { stream.template start<G>(); });
    if (is_delta(kFamily) && launch_.early && b_.history > 0) prepare_history(rows);
    rows.fetch_window();
    copy_async_wait_all();
    return stream;
  }
  // The same of a block that has been prepared.
  __device__ WarpStream fetch_prepared() const {
    WarpStream stream(launch_, states(), kState * int(sizeof(Source)), shared_.stream(),
                      passes_.begin, passes_.end);
    stream.template start<typename Reader::G>();
    if (kIs8Bit<Source>) fetch_row_scales();
    wait_for_predecessor();
    const char* const from = handed_block(launch_);
#pragma unroll 1
    for (int at = threadIdx.x * 16; at < launch_.layout.handed_bytes; at += blockDim.x * 16)
      copy_async_16(shared_.handed() + at, from + at);
    copy_async_wait_all();
    return stream;
  }

  // Targets, what rows add to outputs, and the outputs as far as rows give them. Barriers are
  // passed.
  __device__ void prepare() const {
    const Fetch rows(p_, launch_, b_, shared_);
    form_targets(rows);
    const int taken =
        context_.token_warps(kFamily == Family::kKimiDelta ? Target::kWalks : kTogether);
    rows.append(taken < context_.warps() ? taken : 0);
    __syncthreads();
    context_.for_heads(passes_, [&](int head, int begin, int end) {
      Mix<Context>(context_).run(head, begin * kPassRows, end * kPassRows);
    });
    __syncwarp();
  }

  // outputs += S t, and the recurrence.
  __device__ void read(WarpStream& stream) const {
    with_group([&]<class G, bool kReplay, class S>() {
      if constexpr (kReplay) {
        replay<G, S>(stream);
      } else {
        Reader(context_, passes_).run(stream);
      }
    });
    __syncwarp();
  }

  // The same of a step ahead (step_ahead.cuh): a warp's states, the ring's rows.
  __device__ void fetch_ahead() const {
    with_states([&]<class S>() { ahead().template fetch<S>(states()); });
    if (kIs8Bit<Source> && uses_copy()) fetch_row_scales();
    Fetch(p_, launch_, b_, shared_).fetch_history();
    copy_async_wait_all();
  }
  // Takes these over those. A barrier is passed.
  __device__ void replay_ahead() const {
    form_walk_factors(Fetch(p_, launch_, b_, shared_), 0, b_.history);
    __syncthreads();
    with_states([&]<class S>() { ahead().template replay<S>(); });
  }
  // The window. Barriers are passed.
  __device__ void finish_ahead() const {
    const Fetch rows(p_, launch_, b_, shared_);
    rows.fetch_window();
    copy_async_wait_all();
    __syncthreads();
    if constexpr (kFamily == Family::kKimiDelta) {
      rows.form_decays(b_.history, b_.rows);
      __syncthreads();
    }
    if constexpr (kMany) {
      ahead().weigh_window();
      __syncthreads();
    }
    with_states([&]<class S>() { ahead().template read<S>(); });
    rows.append(0);
  }

  // Of the rows of this warp; of padding, zeros.
  template <bool kPadding>
  __device__ void store_outputs() const {
    const int begin = passes_.begin * kPassRows, stop = passes_.end * kPassRows;
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
  static constexpr bool kGram = uses_gram(kFamily, device_dtype<Act>(), 0);
  static constexpr int kTogether = Weights<Context>::kTogether;
  static constexpr int kTileColumns = Products<Context>::kTileColumns;

  __device__ bool uses_copy() const { return kHasCopy && b_.stored == 0 && !launch_.fold_all; }

  __device__ bool solves() const {
    return kGram && launch_.layout.rows <= kMostGramRows && !b_.reads_after;
  }
  // Most rows whose products do not need the window.
  __device__ int early_products() const { return b_.history / kTileColumns * kTileColumns; }
  // What the ring's rows allow, while the kernel before still runs.
  __device__ void prepare_history(const Fetch& rows) const {
    copy_async_wait_but<kGroupsInFlight - 1>();
    __syncthreads();
    if (!solves()) return form_walk_factors(rows, 0, b_.history);
    if constexpr (kGram) Products<Context>(context_).multiply_rows(0, early_products(), false);
  }

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
    if (b_.replayed == 0 && (!launch_.fold_all || b_.aside > 0))
      return fn.template operator()<typename Reader::G, false, Source>();
    with_states([&]<class S>() { fn.template operator()<ReplayGroup<S>, true, S>(); });
  }

  // Calls fn<S>() with the type of the states that this step reads.
  template <class Fn>
  __device__ void with_states(Fn&& fn) const {
    if constexpr (kHasCopy) {
      if (uses_copy()) return fn.template operator()<Source>();
    }
    fn.template operator()<Checkpoint>();
  }

  __device__ void fetch_row_scales() const {
    const int64_t row =
        (static_cast<int64_t>(b_.slot) * launch_.heads + b_.head) * launch_.head_dim + b_.row;
    for (int i = threadIdx.x * 4; i < launch_.layout.columns; i += blockDim.x * 4)
      copy_async_16(shared_.row_scales() + i, p_.state.read_copy.scale + row + i);
  }

  __device__ void form_targets(const Fetch& rows) const {
    if constexpr (kFamily == Family::kMamba2) {
      weigh(rows);
    } else if constexpr (kGram) {
      solves() ? solve(rows) : walk(rows);
    } else {
      walk(rows);
    }
  }
  __device__ void weigh(const Fetch& rows) const {
    rows.form_decays(0, kRowFolds ? b_.replayed + b_.aside : b_.replayed);
    Target(context_).keep_queries();
    if (b_.reads_after) return;
    Products<Context>(context_).multiply_queries();
    __syncthreads();
    const Weights<Context> weights(context_);
    context_.template for_tokens<kTogether>([&](int head, int i) { weights.weigh(head, i); });
    form_folds(weights);
  }
  __device__ void solve(const Fetch& rows) const {
    const Products<Context> products(context_);
    const Weights<Context> weights(context_);
    rows.form_decays(0, b_.replayed);
    products.key_factors(0, b_.replayed);
    products.multiply_rows(launch_.early ? early_products() : 0, b_.rows, true);
    __syncthreads();
    context_.template for_tokens<kTogether>([&](int head, int i) { weights.solve(head, i); });
    form_folds(weights);
    __syncthreads();
    Target(context_).sum_keys();
  }
  // What a walk or a replay needs of the rows [begin, end) besides themselves.
  __device__ void form_walk_factors(const Fetch& rows, int begin, int end) const {
    rows.form_decays(begin, end);
    if constexpr (is_delta(kFamily)) Products<Context>(context_).key_factors(begin, end);
  }
  __device__ StepAhead<Context, Checkpoint, Read> ahead() const { return {context_, passes_}; }
  __device__ void walk(const Fetch& rows) const {
    form_walk_factors(rows, launch_.early ? b_.history : 0, b_.rows);
    if (!b_.reads_after) __syncthreads();
    const Target targets(context_);
    context_.template for_tokens<Target::kWalks>([&](int head, int i) { targets.walk(head, i); });
  }
  __device__ void form_folds(const Weights<Context>& weights) const {
    if constexpr (kTileFolds) {
      if (b_.aside == 0) return;
      for (int head = context_.warp(); head < launch_.config.heads; head += context_.warps())
        weights.form_fold(head);
    }
  }

  // Windows of several tokens replay more: two passes share what they need of a row.
  template <class G, class S>
  __device__ void replay(WarpStream& stream) const {
    constexpr int kPasses = kMany ? 2 : 1, kStep = G::kPasses > kPasses ? G::kPasses : kPasses;
    const RowReplay<kFamily, Act, Checkpoint, Read, kState, kPasses> replay(p_, launch_, b_,
                                                                            shared_);
    context_.for_heads(passes_, [&](int head, int pass, int stop) {
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
    });
  }

  __device__ static float silu(float x) { return x / (1.0f + expf(-x)); }
  __device__ float load_z(int64_t at) const { return to_float(static_cast<const Act*>(p_.z)[at]); }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Shared& shared_;
  const Context context_;
  const Passes passes_;
};

// kAhead: some steps run ahead (step_ahead.cuh); of windows of several tokens, all.
template <Family kFamily, class Act, class Checkpoint, class Read, int kState, bool kMany,
          bool kAhead>
__global__ void __launch_bounds__(32 * kMaxWarps,
                                  (kBlocks<kFamily, Checkpoint, Read, kMany, kAhead>))
    recurrent_step_kernel(const __grid_constant__ RecurrentStepParams p,
                          const __grid_constant__ StepLaunch launch) {
  using Step = BlockStep<kFamily, Act, Checkpoint, Read, kState, kMany>;
  extern __shared__ __align__(256) char memory[];
  release_successor();
  const typename Step::Shared shared(launch.layout, memory, memory + launch.layout.handed);
  // The number of warps is a power of two.
  const int shift = 31 - __clz(launch.config.warps), warp = threadIdx.x / 32;
  const BlockPlace b = block_place(p, launch);
  if (b.part > 0 && b.stored == 0) return;
  const int parts = b.stored > 0 ? launch.config.fold_blocks : 1;
  const int passes = launch.config.heads * launch.head_passes / parts, first = b.part * passes;
  const Passes mine{first + ((warp * passes) >> shift), first + (((warp + 1) * passes) >> shift)};
  const Step early(p, launch, b, shared, mine);
  if (b.slot < 0) {
    wait_for_predecessor();
    return early.template store_outputs<true>();
  }
  const bool works =
      launch.fold_all ? b.copies || (b.rows > 0 && b.target == b.slot) : b.window > 0;
  if (!works) return wait_for_predecessor();

  if constexpr (kAhead) {
    if (kMany || (launch.ahead && b.aside == 0)) {
      early.fetch_ahead();
      if (threadIdx.x == 0) shared.place() = b;
      __syncthreads();
      Step(p, launch, shared.place(), shared, mine).replay_ahead();
      const BlockPlace again = shared.place();  // where registers are not for states
      return Step(p, launch, again, shared, mine).finish_ahead();
    }
  }
  if constexpr (!kAhead || !kMany) {
    const bool prepared =
        can_prepare(kFamily, device_dtype<Act>(), kMany) && is_prepared(launch, b);
    WarpStream stream = prepared ? early.fetch_prepared() : early.fetch();
    BlockPlace& place = shared.place();
    if (threadIdx.x == 0) place = b;
    __syncthreads();
    if (!prepared) early.prepare();
    // From here on the place lies in shared memory: registers are for states.
    const Step step(p, launch, place, shared, mine);
    step.read(stream);
    step.template store_outputs<false>();
  }
}

}  // namespace replayssm::cuda
