// One decode step of the recurrence with windows of at most one token.
//
// Grid: one block per sequence and LaunchConfig's heads and slice. Each warp owns consecutive rows
// of the states and streams them, kPassRows at a time, through its own ring in shared memory; eight
// lanes share a row. The stream starts as soon as the block knows its slot. Meanwhile it copies ring
// and window rows to shared memory (the only barrier), and each warp forms for its head
//
//   t    the query walked back to the checkpoint (output_only), or the query itself
//   c_j  what row j of ring and window adds to the output, c_j v_j
//
// Then o = S t + sum_j c_j v_j. Where the step folds, the recurrence first runs over the rows of S
// in registers, and they are stored once.
#pragma once

#include "ops/cuda/step_head.cuh"
#include "ops/cuda/step_mma.cuh"

namespace replayssm::cuda {

template <Family kFamily, class Act, class Checkpoint, class Read, int kState>
class WarpStep {
 public:
  static constexpr bool kHasCopy = !std::is_void_v<Read>;
  static constexpr int kPerLane = kState / kRowLanes;
  static constexpr int kGroups = 32 / kRowLanes, kLaneRows = kPassRows / kGroups;
  using Rows = BlockRows<kFamily, Act, kState>;
  using CopyT = std::conditional_t<kHasCopy, Read, Checkpoint>;
  template <bool kCopy>
  using Source = std::conditional_t<kCopy, CopyT, Checkpoint>;

  __device__ WarpStep(const RecurrentStepParams& p, const StepLaunch& launch, const BlockPlace& b,
                      const Rows& rows)
      : p_(p),
        b_(b),
        rows_(rows),
        head_(p, launch, b, rows),
        lane_(threadIdx.x % kRowLanes),
        group_(threadIdx.x % 32 / kRowLanes),
        head_passes_(launch.config.slices > 1 ? launch.layout.columns / kPassRows
                                              : static_cast<int>(p.shape.head_dim) / kPassRows) {}

  // Passes [begin, end) of the block's rows, which `stream` brings from the read copy or from the
  // checkpoint, head by head.
  template <bool kCopy>
  __device__ void run(WarpStream& stream, int begin, int end) {
    Stage<kCopy> stage{stream};
    while (begin < end) {
      const int head = begin / head_passes_, stop = min(end, (head + 1) * head_passes_);
      head_.prepare(head, begin * kPassRows, stop * kPassRows);
      if (b_.replayed > 0) {
        replay_rows<kCopy>(stage, head, begin, stop);
      } else {
        read_rows<kCopy>(stage, begin, stop);
      }
      begin = stop;
    }
  }

 private:
  // The stream, pass by pass.
  template <bool kCopy>
  struct Stage {
    using S = Source<kCopy>;
    static constexpr int kPasses = stage_bytes(kState) / (kPassRows * kState * int(sizeof(S)));
    WarpStream& stream;
    int pass = 0;  // within the stage
    const char* data = nullptr;

    __device__ const S* rows() {
      if (pass == 0) data = stream.wait();
      return reinterpret_cast<const S*>(data) + pass * kPassRows * kState;
    }
    __device__ int left() const { return kPasses - pass; }
    __device__ void advance(int passes) {
      pass += passes;
      if (pass == kPasses) {
        pass = 0;
        stream.release();
      }
    }
  };

  __device__ int column(int pass, int r) const {
    return pass * kPassRows + r * kGroups + group_;
  }

  // outputs += S t
  template <bool kCopy>
  __device__ void read_rows(Stage<kCopy>& stage, int begin, int end) {
    using S = Source<kCopy>;
    if constexpr (std::is_same_v<S, float>) {
      float t[kPerLane];
      load_padded<RowMap<float, kState>>(head_.target(), lane_, t);
      for (int pass = begin; pass < end; ++pass) {
        const S* rows = stage.rows();
        float s[kLaneRows][kPerLane], o[kLaneRows];
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r)
          RowMap<S, kState>::load(rows + (r * kGroups + group_) * kState, lane_, s[r]);
        stage.advance(1);
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) o[r] = dot(s[r], t);
        add_output(pass, o);
      }
    } else {
      MmaTarget<S, kState> target;
      target.load(head_.target(), head_.parts());
      const int row = threadIdx.x % 32 / 4;
      for (int pass = begin; pass < end;) {
        const S* rows = stage.rows() + row * kState;
        const int passes = min(min(2, end - pass), stage.left());
        float2 o = target.multiply(rows, passes == 2 ? rows + kPassRows * kState : rows);
        if (threadIdx.x % 4 == 0) {
          const int low = pass * kPassRows + row, high = low + kPassRows;
          if constexpr (kIs8Bit<S>) {
            o.x *= rows_.scales()[low];
            if (passes == 2) o.y *= rows_.scales()[high];
          }
          rows_.outputs()[low] += o.x;
          if (passes == 2) rows_.outputs()[high] += o.y;
        }
        stage.advance(passes);
        pass += passes;
      }
    }
  }

  __device__ void add_output(int pass, const float (&o)[kLaneRows]) {
    const float sum = row_sum_pair(o, lane_);
    if (lane_ % 4 == 0) rows_.outputs()[column(pass, lane_ / 4)] += sum;
  }

  // Runs the recurrence over rows, stores them, outputs += S t.
  template <bool kCopy>
  __device__ void replay_rows(Stage<kCopy>& stage, int head, int begin, int end) {
    using S = Source<kCopy>;
    using Map = RowMap<S, kState>;
    for (int pass = begin; pass < end; ++pass) {
      const S* rows = stage.rows();
      float s[kLaneRows][kPerLane];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        Map::load(rows + (r * kGroups + group_) * kState, lane_, s[r]);
        if constexpr (kCopy && kIs8Bit<S>) {
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) s[r][e] *= rows_.scales()[column(pass, r)];
        }
      }
      stage.advance(1);
      for (int j = 0; j < b_.replayed; ++j) {
        update<Map>(head, j, pass, s);
        if constexpr (!kCopy) {
          if (j + 1 == b_.stored) store(pass, s);
        }
      }
      if (b_.window == 0) continue;
      float t[kPerLane], o[kLaneRows];
      load_padded<Map>(head_.target(), lane_, t);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) o[r] = dot(s[r], t);
      add_output(pass, o);
    }
  }

  // The recurrence: one row of ring or window, in one order of operations for every route.
  template <class Map>
  __device__ void update(int head, int j, int pass, float (&s)[kLaneRows][kPerLane]) {
    if constexpr (kFamily == Family::kKimiDelta) {
      float a[kPerLane];
      rows_.template decays<Map>(head, j, lane_, a);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a[e], s[r][e]);
    } else {
      const float a = head_.decay(j);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r)
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmul_rn(a, s[r][e]);
    }
    float k[kPerLane], known[kLaneRows] = {};
    rows_.template key<Map>(j, lane_, k);
    float strength = head_.strength(j);
    if constexpr (is_delta(kFamily)) {
      const float factor = head_.factor(j);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) known[r] = dot(s[r], k);
      row_sums(known, lane_);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) known[r] = __fmul_rn(factor, known[r]);
      strength = __fmul_rn(strength, factor);
    }
    const Act* values = rows_.values(j);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const float v = to_float(values[column(pass, r)]);
      const float write = __fmul_rn(strength, __fsub_rn(v, known[r]));
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) s[r][e] = __fmaf_rn(write, k[e], s[r][e]);
    }
  }

  // Stores rows in the checkpoint and in its read copy.
  __device__ void store(int pass, const float (&s)[kLaneRows][kPerLane]) {
    using Map = RowMap<Checkpoint, kState>;
    const auto& shape = p_.shape;
    const int64_t base =
        (static_cast<int64_t>(b_.target) * shape.heads + b_.head) * shape.head_dim + b_.row;
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int64_t row = base + column(pass, r);
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

  const RecurrentStepParams& p_;
  const BlockPlace& b_;
  const Rows& rows_;
  WarpHead<kFamily, Act, kState> head_;
  const int lane_, group_, head_passes_;
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
__global__ void __launch_bounds__(32 * kMaxWarps, MINB)
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
  rows.fetch();
  copy_async_wait();
  __syncthreads();
  if (!launch.fold_all && p.route != Route::kConventional) rows.append();

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
