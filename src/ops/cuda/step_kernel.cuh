// One decode step of the recurrence with windows of at most one token.
//
// Grid: one block per sequence and LaunchConfig's heads and slice. Each warp owns consecutive rows
// of the states and streams them, kPassRows at a time, through its own ring in shared memory; eight
// lanes share a row. The stream starts before anything else is known. Meanwhile the block stages
// ring and window (the only barrier), and each warp forms the coefficients of its head:
//
//   registers   t: the query walked back to the checkpoint (output_only), or the query itself
//   shared      c_j: what row j of ring and window adds to the output, c_j v_j
//
// A row is read once; where the step folds, the recurrence runs over it in registers and it is
// stored once.
#pragma once

#include "ops/cuda/step_block.cuh"

namespace replayssm::cuda {

template <Family kFamily, class Act, class Checkpoint, class Read, int kState>
class WarpStep {
 public:
  static constexpr bool kHasCopy = !std::is_void_v<Read>;
  static constexpr int kPerLane = kState / kRowLanes;
  static constexpr int kLaneRows = kPassRows / (32 / kRowLanes);
  using Rows = BlockRows<kFamily, Act, kState>;
  using CopyT = std::conditional_t<kHasCopy, Read, Checkpoint>;
  template <bool kCopy>
  using Source = std::conditional_t<kCopy, CopyT, Checkpoint>;

  __device__ WarpStep(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                      const Rows& rows)
      : p_(p),
        launch_(launch),
        b_(b),
        rows_(rows),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % kRowLanes),
        group_(threadIdx.x % 32 / kRowLanes),
        coefficients_(rows.coefficients(warp_)) {}

  // Passes [begin, end) of the block's rows, which `stream` brings from the read copy or from the
  // checkpoint.
  template <bool kCopy>
  __device__ void run(WarpStream& stream, int begin, int end) {
    using S = Source<kCopy>;
    constexpr int kStagePasses = stage_bytes(kState) / (kPassRows * kState * int(sizeof(S)));
    const int head_passes = static_cast<int>(p_.shape.head_dim) / kPassRows;
    int in_stage = 0, head = -1;
    const char* stage = nullptr;
    float t[kPerLane];
    for (int pass = begin; pass < end; ++pass) {
      if (in_stage == 0) stage = stream.wait();
      const int pass_head = launch_.config.slices > 1 ? 0 : pass / head_passes;
      if (pass_head != head) {
        head = pass_head;
        prepare<RowMap<S, kState>>(head, t);
      }
      float s[kLaneRows][kPerLane];
      const S* rows = reinterpret_cast<const S*>(stage) + (in_stage * kPassRows + group_) * kState;
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r)
        RowMap<S, kState>::load(rows + r * kPassRows / kLaneRows * kState, lane_, s[r]);
      if (++in_stage == kStagePasses) {
        in_stage = 0;
        stream.release();
      }
      process<kCopy>(head, pass * kPassRows, t, s);
    }
  }

 private:
  __device__ int column(int first, int r) const {
    return first + r * (kPassRows / kLaneRows) + group_;
  }

  template <bool kCopy>
  __device__ void process(int head, int first, const float (&t)[kPerLane],
                          float (&s)[kLaneRows][kPerLane]) {
    // 8-bit rows are scaled as a whole only where the recurrence runs over them.
    constexpr bool kScaled = kCopy && kIs8Bit<CopyT>;
    if (kScaled && b_.replayed > 0) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] *= rows_.scales()[column(first, r)];
    }
    replay<kCopy>(head, first, s);
    if (b_.window == 0) return;
    float o[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      o[r] = dot(s[r], t);
      if (kScaled && b_.replayed == 0) o[r] *= rows_.scales()[column(first, r)];
    }
    mix(first, o);
    const float sum = row_sum_pair(o, lane_);
    if (lane_ % 4 == 0) rows_.outputs()[column(first, lane_ / 4)] = sum;
  }

  // Adds this lane's share of sum_j c_j v_j.
  __device__ void mix(int first, float (&o)[kLaneRows]) const {
    for (int j = mix_begin_ + lane_; j < b_.rows; j += kRowLanes) {
      const float c = coefficients_[j];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) o[r] = fmaf(c, rows_.value(j, column(first, r)), o[r]);
    }
  }

  // Runs the recurrence over rows in registers.
  template <bool kCopy>
  __device__ void replay(int head, int first, float (&s)[kLaneRows][kPerLane]) {
    using Map = RowMap<Source<kCopy>, kState>;
    for (int j = 0; j < b_.replayed; ++j) {
      if constexpr (kFamily == Family::kKimiDelta) {
        float a[kPerLane];
        rows_.template decays<Map>(head, j, lane_, a);
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a[e], s[r][e]);
      } else {
        const float a = rows_.decay(head, j);
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a, s[r][e]);
      }
      float k[kPerLane], write[kLaneRows] = {};
      rows_.template key<Map>(j, lane_, k);
      if constexpr (is_delta(kFamily)) {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) write[r] = dot(s[r], k);
        row_sums(write, lane_);
      }
      const float b = rows_.strength(head, j);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        write[r] = __fmul_rn(b, __fsub_rn(rows_.value(j, column(first, r)), write[r]));
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmaf_rn(write[r], k[e], s[r][e]);
      }
      if constexpr (!kCopy) {
        if (j + 1 == b_.stored) store(first, s);
      }
    }
  }

  // Stores rows in the checkpoint and in its read copy.
  __device__ void store(int first, const float (&s)[kLaneRows][kPerLane]) {
    using Map = RowMap<Checkpoint, kState>;
    const auto& shape = p_.shape;
    const int64_t base =
        (static_cast<int64_t>(b_.target) * shape.heads + b_.head) * shape.head_dim + b_.row;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int64_t row = base + column(first, r);
      store_row<Map>(static_cast<Checkpoint*>(p_.state.checkpoint) + row * kState, s[r]);
      if constexpr (kHasCopy) store_copy<Map>(row, s[r]);
    }
  }

  template <class Map, class T>
  __device__ void store_row(T* row, const float (&x)[kPerLane]) const {
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
      store_elements<T, Map::kElems>(row + Map::element(c, lane_), x + c * Map::kElems);
  }

  template <class Map>
  __device__ void store_copy(int64_t row, const float (&x)[kPerLane]) const {
    CopyT* copy = static_cast<CopyT*>(p_.state.read_copy.data) + row * kState;
    if constexpr (!kIs8Bit<CopyT>) {
      store_row<Map>(copy, x);
    } else {
      float most = 0;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) most = fmaxf(most, fabsf(x[e]));
      const float scale = row_max(most) / dtype_max_8bit(device_dtype<CopyT>());
      float scaled[kPerLane];
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) scaled[e] = scale > 0 ? x[e] / scale : 0.0f;
      store_row<Map>(copy, scaled);
      if (lane_ == 0) p_.state.read_copy.scale[row] = scale;
    }
  }

  // t and the coefficients of a head.
  template <class Map>
  __device__ void prepare(int head, float (&t)[kPerLane]) {
    mix_begin_ = b_.rows;
    if (b_.window == 0) return;
    rows_.template query<Map>(0, lane_, t);
    __syncwarp();
    if (p_.route == Route::kOutputOnly) {
      mix_begin_ = b_.stored;
      if constexpr (kFamily == Family::kMamba2) {
        scan_back<Map>(head, t);
      } else {
        walk_back<Map>(head, t);
      }
    }
    if (p_.skip) {
      const float skip = p_.skip[b_.head + head];
      if (threadIdx.x % 32 == 0) {
        float& last = coefficients_[b_.rows - 1];
        last = mix_begin_ < b_.rows ? last + skip : skip;
      }
      mix_begin_ = min(mix_begin_, b_.rows - 1);
    }
    __syncwarp();
  }

  // Mamba-2: no row changes the query, so that its products with all keys are independent.
  template <class Map>
  __device__ void scan_back(int head, float (&t)[kPerLane]) {
    for (int base = b_.stored; base < b_.rows; base += 4) {
      const int j = min(base + group_, b_.rows - 1);
      float k[kPerLane];
      rows_.template key<Map>(j, lane_, k);
      const float product = row_sum(dot<4>(k, t));
      if (lane_ == 0 && base + group_ < b_.rows) coefficients_[j] = product;
    }
    __syncwarp();
    const int lane = threadIdx.x % 32;
    float carried = 0;  // log decay behind the rows so far, newest first
    for (int newest = b_.rows - 1; newest >= b_.stored; newest -= 32) {
      const int j = newest - lane;
      const bool active = j >= b_.stored;
      const float g = active ? rows_.log_decay(head, j) : 0.0f;
      float sum = g;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float below = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) sum += below;
      }
      const float before = __shfl_up_sync(kAllLanes, sum, 1);
      if (active)
        coefficients_[j] *= rows_.strength(head, j) * expf(carried + (lane > 0 ? before : 0.0f));
      carried += __shfl_sync(kAllLanes, sum, 31);
    }
    const float decay = expf(carried);
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) t[e] *= decay;
  }

  // The delta rule: every row changes the query.
  template <class Map>
  __device__ void walk_back(int head, float (&t)[kPerLane]) {
    for (int j = b_.rows - 1; j >= b_.stored; --j) {
      float k[kPerLane];
      rows_.template key<Map>(j, lane_, k);
      const float c = rows_.strength(head, j) * row_sum(dot<4>(k, t));
      if (threadIdx.x % 32 == 0) coefficients_[j] = c;
      if constexpr (kFamily == Family::kKimiDelta) {
        float a[kPerLane];
        rows_.template decays<Map>(head, j, lane_, a);
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) t[e] = a[e] * fmaf(-c, k[e], t[e]);
      } else {
        const float a = rows_.decay(head, j);
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) t[e] = a * fmaf(-c, k[e], t[e]);
      }
    }
  }

  const RecurrentStepParams& p_;
  const StepLaunch& launch_;
  const BlockPlace& b_;
  const Rows& rows_;
  const int warp_, lane_, group_;
  float* const coefficients_;
  int mix_begin_ = 0;
};

// Outputs [begin, end) of the block's columns, from shared memory; null: zeros.
template <class Act>
__device__ void store_outputs(const RecurrentStepParams& p, const StepLaunch& launch,
                              const BlockPlace& b, int token, const float* outputs, int begin,
                              int end) {
  const int64_t base =
      (static_cast<int64_t>(token) * p.shape.heads + b.head) * p.shape.head_dim + b.row;
  for (int column = begin + threadIdx.x % 32; column < end; column += 32) {
    float o = outputs ? outputs[column] : 0.0f;
    if (p.z && outputs) {
      const float z = to_float(static_cast<const Act*>(
          p.z)[token * p.z_stride + b.head * p.shape.head_dim + b.row + column]);
      o *= z / (1.0f + expf(-z));
    }
    switch (p.o_dtype) {
      case DType::kBFloat16: static_cast<Bf16*>(p.o)[base + column] = from_float<Bf16>(o); break;
      case DType::kFloat16: static_cast<Fp16*>(p.o)[base + column] = from_float<Fp16>(o); break;
      default: static_cast<float*>(p.o)[base + column] = o;
    }
  }
}

template <Family kFamily, class Act, class Checkpoint, class Read, int kState>
__global__ void __launch_bounds__(32 * kMaxWarps, 4)
    recurrent_step_kernel(const __grid_constant__ RecurrentStepParams p,
                          const __grid_constant__ StepLaunch launch) {
  using Step = WarpStep<kFamily, Act, Checkpoint, Read, kState>;
  using CopyT = typename Step::CopyT;
  extern __shared__ __align__(128) char shared[];
  const auto& layout = launch.layout;
  const int warp = threadIdx.x / 32, warps = launch.config.warps, depth = launch.config.depth;
  const int passes = layout.columns / kPassRows;
  const int begin = warp * passes / warps, end = (warp + 1) * passes / warps;

  const BlockPlace b = block_place(p, launch);
  if (b.slot < 0) {
    for (int i = 0; i < b.window; ++i)
      store_outputs<Act>(p, launch, b, b.token + i, nullptr, begin * kPassRows, end * kPassRows);
    return;
  }
  if (b.rows == 0 || (b.window == 0 && !launch.fold_all)) return;

  const bool use_copy = Step::kHasCopy && b.stored == 0;
  const int row_bytes = kState * static_cast<int>(use_copy ? sizeof(CopyT) : sizeof(Checkpoint));
  const int64_t first_row =
      (static_cast<int64_t>(b.slot) * p.shape.heads + b.head) * p.shape.head_dim + b.row;
  const char* states =
      static_cast<const char*>(use_copy ? p.state.read_copy.data : p.state.checkpoint) +
      (first_row + begin * kPassRows) * row_bytes;
  WarpStream stream(states, (end - begin) * kPassRows * row_bytes, stage_bytes(kState), depth,
                    shared + layout.stream + warp * depth * stage_bytes(kState),
                    reinterpret_cast<uint64_t*>(shared + layout.barriers) + warp * depth);

  BlockRows<kFamily, Act, kState> rows(p, launch, b, shared);
  if (use_copy && kIs8Bit<CopyT>) {
    for (int i = threadIdx.x; i < layout.columns; i += blockDim.x)
      rows.scales()[i] = p.state.read_copy.scale[first_row + i];
  }
  rows.stage();
  __syncthreads();

  Step step(p, launch, b, rows);
  if (use_copy) {
    if constexpr (Step::kHasCopy) step.template run<true>(stream, begin, end);
  } else {
    step.template run<false>(stream, begin, end);
  }
  __syncwarp();
  if (b.window > 0)
    store_outputs<Act>(p, launch, b, b.token, rows.outputs(), begin * kPassRows, end * kPassRows);
}

}  // namespace replayssm::cuda
