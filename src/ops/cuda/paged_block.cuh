// What the paged decode kernels share: where a block and a lane stand, the gates of a head, sums
// over lanes, elements of a type that is known only at run time.
#pragma once

#include "ops/cuda/async_copy.cuh"
#include "ops/cuda/elements.cuh"
#include "ops/cuda/paged_layout.h"
#include "ops/cuda/reduce.cuh"

namespace replayssm::cuda {

__device__ inline float value_at(const PagedValues& x, int64_t at) {
  if (x.dtype == REPLAYSSM_FLOAT32) return static_cast<const float*>(x.data)[at];
  if (x.dtype == REPLAYSSM_BFLOAT16) return to_float(static_cast<const Bf16*>(x.data)[at]);
  return to_float(static_cast<const Fp16*>(x.data)[at]);
}
__device__ inline void set_value(const PagedValues& x, int64_t at, float value) {
  if (x.dtype == REPLAYSSM_FLOAT32) static_cast<float*>(x.data)[at] = value;
  if (x.dtype == REPLAYSSM_BFLOAT16) static_cast<Bf16*>(x.data)[at] = from_float<Bf16>(value);
  if (x.dtype == REPLAYSSM_FLOAT16) static_cast<Fp16*>(x.data)[at] = from_float<Fp16>(value);
}
// `value` as x stores it.
__device__ inline float rounded_as(const PagedValues& x, float value) {
  if (x.dtype == REPLAYSSM_BFLOAT16) return to_float(from_float<Bf16>(value));
  if (x.dtype == REPLAYSSM_FLOAT16) return to_float(from_float<Fp16>(value));
  return value;
}

template <class T>
__device__ inline T* at(const PagedValues& x, int64_t i, int64_t j, int64_t k = 0) {
  return static_cast<T*>(x.data) + i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}
__device__ inline int64_t index(const PagedValues& x, int64_t i, int64_t j, int64_t k = 0) {
  return i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}

// kElems elements as they lie in memory.
template <class T, int kElems>
struct Raw {
  using W = Word<kElems * sizeof(T)>;
  W word{};
  __device__ void load(const T* from) { word = *reinterpret_cast<const W*>(from); }
  __device__ void read(float (&x)[kElems]) const {
    constexpr int kPerRegister = 4 / sizeof(T), kRegisters = sizeof(W) / 4;
#pragma unroll
    for (int i = 0; i < kRegisters; ++i)
      widen<T>(reinterpret_cast<const uint32_t*>(&word)[i], x + i * kPerRegister);
  }
  __device__ void write(const float (&x)[kElems]) { store_elements<T, kElems>(&word, x); }
};

// A lane's share of a row of T, in the places where Map's rows have theirs.
template <class Map, class T, int kPerLane>
__device__ inline void load_as(const T* row, int lane, float (&x)[kPerLane]) {
  constexpr int kMost = 16 / sizeof(T), kRun = Map::kElems < kMost ? Map::kElems : kMost;
#pragma unroll
  for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
    for (int e = 0; e < Map::kElems; e += kRun)
      load_elements<T, kRun>(row + Map::element(c, lane) + e, x + c * Map::kElems + e);
}

// This lane's share of a row of T as it lies in memory.
template <class T, int kState>
struct RawRow {
  using Map = RowMap<T, kState>;
  uint4 words[Map::kChunks];

  __device__ void load(const T* row, int lane) {
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
      words[c] = *reinterpret_cast<const uint4*>(row + Map::element(c, lane));
  }
  __device__ void read(float (&x)[Map::kPerLane]) const {
    constexpr int kPerRegister = 4 / sizeof(T);
#pragma unroll
    for (int c = 0; c < Map::kChunks; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        widen<T>(reinterpret_cast<const uint32_t*>(&words[c])[i],
                 x + c * Map::kElems + i * kPerRegister);
  }
};

// Sums of kRows values over a row's eight lanes; lane l gets that of row owned_row<kRows>(l).
template <int kRows>
__device__ inline int owned_row(int lane) {
  if constexpr (kRows == 8) return lane;
  if constexpr (kRows == 4) return lane >> 1;
  if constexpr (kRows == 2) return lane >> 2;
  return 0;
}
template <int kRows>
__device__ inline float sum_rows(const float (&x)[kRows], int lane) {
  float part[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) part[r] = x[r];
#pragma unroll
  for (int bit = 4, count = kRows; bit > 0; bit /= 2) {
    const bool upper = lane & bit;
    if (count > 1) {
      count /= 2;
#pragma unroll
      for (int r = 0; r < count; ++r) {
        const float kept = upper ? part[r + count] : part[r];
        const float sent = upper ? part[r] : part[r + count];
        part[r] = kept + __shfl_xor_sync(kAllLanes, sent, bit);
      }
    } else {
      part[0] += __shfl_xor_sync(kAllLanes, part[0], bit);
    }
  }
  return part[0];
}

// What the batch says of the sequence that is blockIdx.y: all that goes by row of the batch is
// loaded together, then all that goes by slot; nothing waits before it is read. Slots, tokens and
// counts have 31 bits.
class PagedRowLoad {
 public:
  __device__ explicit PagedRowLoad(const PagedStep& p)
      : p_(p), slot_(row()), token_(row()), end_(row() + 1) {
    if (p.slot.data) slot_ = load(p.slot, row());
    if (p.query_start.data) {
      token_ = load(p.query_start, row());
      end_ = load(p.query_start, row() + 1);
    }
    if (single()) load_cursors(row());
  }
  // -1: padding.
  __device__ int slot() const {
    return p_.slot.data ? static_cast<int>(paged_slot(p_, slot_)) : slot_;
  }
  __device__ int token() const { return token_; }
  __device__ int window() const { return end_ - token_; }
  __device__ void load_by_slot(int slot) {
    if (!single() && slot >= 0) load_cursors(slot);
  }
  __device__ PagedRow read(int slot) const {
    return paged_row(p_, {slot, token_, end_, write_pos_, origin_, is_flush_});
  }

 private:
  __device__ static int row() { return static_cast<int>(blockIdx.y); }
  __device__ bool single() const { return p_.rule == REPLAYSSM_PAGED_SINGLE; }
  // Of eight bytes the lower four.
  __device__ static int load(const PagedIntegers& x, int i) {
    const auto* const from = static_cast<const char*>(x.data) + i * x.stride * x.bytes;
    return x.bytes == 1 ? *reinterpret_cast<const int8_t*>(from)
                        : *reinterpret_cast<const int32_t*>(from);
  }
  __device__ void load_cursors(int key) {
    write_pos_ = load(p_.write_pos, key);
    if (p_.origin.data) origin_ = load(p_.origin, key);
    if (p_.is_flush.data) is_flush_ = load(p_.is_flush, key);
  }

  const PagedStep& p_;
  int slot_, token_, end_, write_pos_ = 0, origin_ = 0, is_flush_ = 0;
};

// Where a warp stands: a piece of a head's rows, of one sequence; or several heads.
struct PagedPlace {
  int head, first_row, rows, key_head;
  bool owns_gates, owns_keys;  // caches the window's gates, its keys

  __device__ PagedPlace(const PagedStep& p, const PagedLaunch& launch, int item) {
    const int piece = static_cast<int>(launch.by_slices.divide(item));
    const int slice = item - piece * launch.slices;
    head = piece * launch.heads;
    key_head = static_cast<int>(launch.by_group.divide(head));
    first_row = slice * launch.rows;
    rows = min(launch.rows, static_cast<int>(p.head_dim) - first_row);
    owns_gates = slice == 0;
    owns_keys = slice == 0 && head == key_head * launch.group;
  }
};
struct PagedItem : PagedPlace {
  PagedRow row;

  __device__ PagedItem(const PagedPlace& place, const PagedLaunch& launch, const PagedRow& r)
      : PagedPlace(place), row(r) {
    row.window = min(row.window, launch.layout.window);
  }
};

// A token's time step, or what stands for it, with its log decay and its weight in the state.
struct PagedGate {
  float cached, log_decay, weight;
};

// The bits of a value: loading them waits for nothing, unlike a conversion.
struct RawValue {
  uint32_t bits = 0;

  __device__ void load(const PagedValues& x, int64_t at) {
    bits = x.dtype == REPLAYSSM_FLOAT32 ? static_cast<const uint32_t*>(x.data)[at]
                                        : static_cast<const uint16_t*>(x.data)[at];
  }
  // As an element of x.
  __device__ float read(const PagedValues& x) const {
    if (x.dtype == REPLAYSSM_FLOAT32) return __uint_as_float(bits);
    if (x.dtype == REPLAYSSM_BFLOAT16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
};

// Four consecutive values, from a multiple of four on.
struct RawFour {
  uint4 words{};

  __device__ void load(const PagedValues& x, int64_t at) {
    if (x.dtype == REPLAYSSM_FLOAT32) {
      words = *reinterpret_cast<const uint4*>(static_cast<const float*>(x.data) + at);
    } else {
      const uint2 pairs =
          *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(x.data) + at);
      words.x = pairs.x, words.y = pairs.y;
    }
  }
  __device__ void read(const PagedValues& x, float (&v)[4]) const {
    if (x.dtype == REPLAYSSM_FLOAT32) {
      read_as<float>(v);
    } else if (x.dtype == REPLAYSSM_BFLOAT16) {
      read_as<Bf16>(v);
    } else {
      read_as<Fp16>(v);
    }
  }

 private:
  template <class T>
  __device__ void read_as(float (&v)[4]) const {
    load_elements<T, 4>(&words, v);
  }
};
__device__ inline void set_four(const PagedValues& x, int64_t at, const float (&v)[4]) {
  if (x.dtype == REPLAYSSM_FLOAT32) store_elements<float, 4>(static_cast<float*>(x.data) + at, v);
  if (x.dtype == REPLAYSSM_BFLOAT16) store_elements<Bf16, 4>(static_cast<Bf16*>(x.data) + at, v);
  if (x.dtype == REPLAYSSM_FLOAT16) store_elements<Fp16, 4>(static_cast<Fp16*>(x.data) + at, v);
}

// What a lane of the warp that forms a head's gates loads: constants of the head, a token of the
// window, a cached row, newest first.
struct PagedGateInputs {
  RawValue a, bias, dt, beta;
  float cached = 0;

  __device__ static const float* cache(const PagedStep& p, const PagedItem& b, int head, int j) {
    const int place = b.row.place(j, p.ring, p.rule == REPLAYSSM_PAGED_WINDOW);
    return at<float>(p.cache_g, b.row.slot, head, place);
  }
  __device__ void load(const PagedStep& p, const PagedItem& b, int head, int token) {
    const int j = b.row.history - 1 - static_cast<int>(threadIdx.x % 32);
    a.load(p.a, head * p.a.stride[0]);
    if (p.dt_bias.data) bias.load(p.dt_bias, head * p.dt_bias.stride[0]);
    if (token < b.row.window) {
      dt.load(p.dt, index(p.dt, b.row.token + token, head));
      if (p.beta.data) beta.load(p.beta, index(p.beta, b.row.token + token, head));
    }
    if (j >= 0) cached = *cache(p, b, head, j);
  }
  __device__ float strength(const PagedStep& p) const {
    return 1.0f / (1.0f + expf(-beta.read(p.beta)));
  }
};

struct PagedHeadGates {
  float a, bias;
  bool delta, softplus;

  __device__ PagedHeadGates(const PagedStep& p, const PagedGateInputs& inputs)
      : a(inputs.a.read(p.a)),
        bias(p.dt_bias.data ? inputs.bias.read(p.dt_bias) : 0.0f),
        delta(p.family != REPLAYSSM_MAMBA2),
        softplus(p.softplus || delta) {
    if (delta) a = -expf(a);
  }
  __device__ float step(float raw) const {
    const float x = raw + bias;
    return softplus && x <= kSoftplusThreshold ? cuda::softplus(x) : x;
  }
  // Of a new token.
  __device__ PagedGate fresh(float raw, bool keeps_raw) const {
    const float dt = step(raw);
    if (delta) return {a * dt, a * dt, 1.0f};
    return {keeps_raw ? raw : dt, a * dt, dt};
  }
  // Of a cached one.
  __device__ PagedGate cached(float value, bool is_raw) const {
    if (delta) return {value, value, 1.0f};
    const float dt = is_raw ? step(value) : value;
    return {value, a * dt, dt};
  }
};

// Weights of the cached rows as the state's latest row sees them, shifted by `shift`, and the decay
// of the state itself. A warp's work; sums run from the newest row backwards, so that no exponent
// is a difference of large numbers.
__device__ inline void form_weights(const PagedStep& p, const PagedItem& b,
                                    const PagedHeadGates& gates, float newest, int head,
                                    float shift, float* weights, float* decay) {
  const int lane = threadIdx.x % 32;
  float newer = 0;
#pragma unroll 1
  for (int first = 0; first < b.row.history; first += 32) {
    const int j = b.row.history - 1 - first - lane;
    PagedGate gate{0, 0, 0};
    if (j >= 0) {
      const float value = first == 0 ? newest : *PagedGateInputs::cache(p, b, head, j);
      gate = gates.cached(value, p.rule == REPLAYSSM_PAGED_WINDOW);
    }
    float sum = gate.log_decay;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += other;
    }
    const float before = __shfl_up_sync(kAllLanes, sum, 1);
    if (j >= 0)
      weights[j] = gate.weight * expf(fminf(newer + (lane == 0 ? 0.0f : before), 0.0f) + shift);
    newer += __shfl_sync(kAllLanes, sum, 31);
  }
  if (lane == 0) *decay = expf(fminf(newer, 0.0f) + shift);
}

// What follows the readout: o + v D, times silu(z).
struct PagedFinish {
  RawValue skip, z;

  __device__ void load(const PagedStep& p, int64_t token, int head, int row) {
    if (p.skip.data) skip.load(p.skip, head * p.skip.stride[0] + row * p.skip.stride[1]);
    if (p.z.data) z.load(p.z, index(p.z, token, head) + row);
  }
  __device__ float apply(const PagedStep& p, float o, float v) const {
    if (p.skip.data) o += v * skip.read(p.skip);
    if (!p.z.data) return o;
    const float gate = z.read(p.z);
    return o * gate / (1.0f + __expf(-gate));
  }
};

// The same of four rows, from a multiple of four on.
struct PagedFinishFour {
  RawValue skip[4];
  RawFour z;

  __device__ void load(const PagedStep& p, int64_t token, int head, int row) {
    if (p.skip.data) {
      const int64_t from = head * p.skip.stride[0] + row * p.skip.stride[1];
#pragma unroll
      for (int r = 0; r < 4; ++r) skip[r].load(p.skip, from + r * p.skip.stride[1]);
    }
    if (p.z.data) z.load(p.z, index(p.z, token, head) + row);
  }
  __device__ void apply(const PagedStep& p, const float (&v)[4], float (&o)[4]) const {
    float gate[4];
    z.read(p.z, gate);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (p.skip.data) o[r] = fmaf(v[r], skip[r].read(p.skip), o[r]);
      if (p.z.data) o[r] *= gate[r] / (1.0f + __expf(-gate[r]));
    }
  }
};

// Padded rows of the batch: zeros for Gated Delta, nothing for Mamba-2.
__device__ inline void pad_outputs(const PagedStep& p, const PagedItem& b, int heads = 1) {
  if (p.family == REPLAYSSM_MAMBA2) return;
  for (int head = b.head; head < b.head + heads; ++head)
    for (int i = 0; i < b.row.window; ++i)
      for (int n = threadIdx.x % 32; n < b.rows; n += 32)
        set_value(p.out, index(p.out, b.row.token + i, head) + b.first_row + n, 0.0f);
}

}  // namespace replayssm::cuda
