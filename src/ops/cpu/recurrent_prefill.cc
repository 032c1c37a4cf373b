// Long windows of Mamba-2 and Gated Delta, in chunks of matrix products: linear in the window's
// length.
//
// Within a chunk let D_ij be the log decay from just after token j up to token i and L_i that from
// the chunk's start. With U the values as written (b v for Mamba-2; for the gated delta rule the
// solution of a unit lower triangular system) and S the state before the chunk:
//
//   u_i = b_i (v_i - d (e^{L_i} S k_i + sum_{j<i} e^{D_ij} (k_i . k_j) u_j))
//   o_i = e^{L_i} S q_i + sum_{j<=i} e^{D_ij} (q_i . k_j) u_j
//   S  <- e^{L_n} S + sum_j e^{D_nj} u_j k_j^T
//
// D is accumulated newest minus oldest along each row, so no exponent is a difference of large
// numbers.

#include <algorithm>
#include <cmath>

#include "core/dispatch.h"
#include "ops/cpu/recurrent_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/cpu/recurrent_prefill.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "ops/cpu/recurrent-inl.h"
#include "ops/cpu/recurrent_output-inl.h"
#include "ops/cpu/state_writer-inl.h"

HWY_BEFORE_NAMESPACE();
namespace replayssm::cpu {
namespace HWY_NAMESPACE {
namespace {

// A [rows, inner] operand of a product; either stride may be 1.
struct Left {
  const float* data;
  int64_t row_stride, column_stride;
};

template <int kRows>
HWY_INLINE void multiply_rows(const Left& a, const float* b, int64_t b_stride, int64_t inner,
                              int64_t columns, bool accumulate, float* c, int64_t c_stride) {
  const D d;
  constexpr int64_t kVecs = 2, kStep = kVecs * static_cast<int64_t>(kLanes);
  for (int64_t n = 0; n < columns; n += kStep) {
    const int64_t vecs = std::min<int64_t>(kVecs, (columns - n) / static_cast<int64_t>(kLanes));
    V sum[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int64_t v = 0; v < kVecs; ++v)
        sum[r][v] =
            accumulate && v < vecs ? hn::Load(d, c + r * c_stride + n + v * kLanes) : hn::Zero(d);
    }
    const auto step = [&](auto count) {
      for (int64_t i = 0; i < inner; ++i) {
        for (int64_t v = 0; v < count; ++v) {
          const auto bv = hn::Load(d, b + i * b_stride + n + v * kLanes);
          for (int r = 0; r < kRows; ++r) {
            const float av = a.data[r * a.row_stride + i * a.column_stride];
            sum[r][v] = hn::MulAdd(hn::Set(d, av), bv, sum[r][v]);
          }
        }
      }
    };
    if (vecs == kVecs) {
      step(std::integral_constant<int64_t, kVecs>());
    } else {
      step(std::integral_constant<int64_t, 1>());
    }
    for (int r = 0; r < kRows; ++r) {
      for (int64_t v = 0; v < vecs; ++v) hn::Store(sum[r][v], d, c + r * c_stride + n + v * kLanes);
    }
  }
}

// c (+)= a b. Columns are a multiple of the vector length; rows of b and c are aligned.
void multiply(Left a, const float* b, int64_t b_stride, int64_t rows, int64_t inner,
              int64_t columns, bool accumulate, float* c, int64_t c_stride) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    multiply_rows<4>(a, b, b_stride, inner, columns, accumulate, c, c_stride);
    a.data += 4 * a.row_stride;
    c += 4 * c_stride;
  }
  for (; r < rows; ++r) {
    multiply_rows<1>(a, b, b_stride, inner, columns, accumulate, c, c_stride);
    a.data += a.row_stride;
    c += c_stride;
  }
}

// c (+)= a b for a lower triangular a: [rows, rows].
void multiply_triangular(const float* a, int64_t a_stride, const float* b, int64_t rows,
                         int64_t columns, bool accumulate, float* c) {
  constexpr int64_t kBlock = 16;
  for (int64_t r = 0; r < rows; r += kBlock) {
    const int64_t count = std::min(kBlock, rows - r);
    multiply({a + r * a_stride, a_stride, 1}, b, columns, count, r + count, columns, accumulate,
             c + r * columns, columns);
  }
}

HWY_INLINE void scale_row(float factor, int64_t count, float* row) {
  const D d;
  for (int64_t i = 0; i < count; i += kLanes)
    hn::Store(hn::Mul(hn::Set(d, factor), hn::Load(d, row + i)), d, row + i);
}

HWY_INLINE void add_scaled_row(float factor, const float* x, int64_t count, float* row) {
  const D d;
  for (int64_t i = 0; i < count; i += kLanes)
    hn::Store(hn::MulAdd(hn::Set(d, factor), hn::Load(d, x + i), hn::Load(d, row + i)), d, row + i);
}

template <class ActT>
class PrefillBlock {
 public:
  PrefillBlock(const RecurrentStepParams& params, const Block& block, float* memory)
      : p_(params), block_(block), m_(memory, params.shape) {
    first_ = params.batch.query_start[block.sequence];
    window_ = params.batch.query_start[block.sequence + 1] - first_;
    slot_ = params.batch.slot[block.sequence];
  }

  void run() {
    const int64_t heads = block_.head_end - block_.head_begin;
    if (slot_ < 0) return clear_outputs(p_, block_, first_, window_);
    if (window_ == 0) return;
    for (int64_t h = 0; h < heads; ++h) load_state(h);
    for (int64_t t = 0; t < window_; t += kChunk) {
      token_ = first_ + t;
      count_ = std::min(kChunk, window_ - t);
      prepare_keys();
      for (int64_t h = 0; h < heads; ++h) run_chunk(h);
    }
    for (int64_t h = 0; h < heads; ++h) store_state(h);
  }

 private:
  bool is_delta() const { return p_.shape.family == Family::kGatedDelta; }
  float* state(int64_t h) const { return m_.state + h * m_.width * m_.height; }

  void load_state(int64_t h) {
    const int64_t rows = p_.shape.head_dim, columns = p_.shape.state_dim;
    std::fill_n(state(h), m_.width * m_.height, 0.0f);
    dispatch_float(p_.state.checkpoint_dtype, [&]<class StateT>() {
      const StateT* checkpoint = static_cast<const StateT*>(p_.state.checkpoint) +
                                 (slot_ * p_.shape.heads + block_.head_begin + h) * rows * columns;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c)
          state(h)[c * m_.height + r] = to_float(checkpoint[r * columns + c]);
      }
    });
  }

  void store_state(int64_t h) {
    const HeadWriter writer(p_, slot_, slot_, block_.head_begin + h,
                            p_.batch.cursors[slot_].ring_start + window_);
    float* row = m_.k;
    std::fill_n(row, m_.width, 0.0f);
    for (int64_t r = 0; r < p_.shape.head_dim; ++r) {
      for (int64_t c = 0; c < p_.shape.state_dim; ++c) row[c] = state(h)[c * m_.height + r];
      writer.write(r, 1, row, m_.width);
    }
  }

  // Keys and queries of the chunk, and their products: shared by the block's value heads.
  void prepare_keys() {
    const int64_t k = p_.shape.state_dim;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t token = token_ + i, offset = block_.key_head * k;
      gather_key(is_delta(), static_cast<const ActT*>(p_.k) + token * p_.k_stride + offset, k,
                 m_.width, m_.k + i * m_.width);
      gather_query(is_delta(), static_cast<const ActT*>(p_.q) + token * p_.q_stride + offset, k,
                   m_.width, m_.q + i * m_.width);
    }
    const int64_t columns = padded(count_);
    for (int64_t x = 0; x < m_.width; ++x) {
      for (int64_t i = 0; i < columns; ++i)
        m_.kt[x * kChunk + i] = i < count_ ? m_.k[i * m_.width + x] : 0.0f;
    }
    multiply({m_.q, m_.width, 1}, m_.kt, kChunk, count_, m_.width, columns, false, m_.qk, kChunk);
    if (is_delta())
      multiply({m_.k, m_.width, 1}, m_.kt, kChunk, count_, m_.width, columns, false, m_.kk, kChunk);
  }

  // decay[i, j] = e^{D_ij} for j <= i, 0 beyond; total[i] = e^{L_i}.
  void prepare_decays(int64_t head) {
    const D d;
    alignas(64) float logs[kChunk] = {};
    float sum = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const float g = p_.g[(token_ + i) * p_.shape.heads + head];
      float* row = m_.decay + i * kChunk;
      for (int64_t j = 0; j < i; ++j) logs[j] += g;
      for (int64_t j = 0; j <= i; j += kLanes)
        hn::Store(ExpF32(d, hn::Load(d, logs + j)), d, row + j);
      std::fill(row + i + 1, row + kChunk, 0.0f);
      sum += g;
      m_.total[i] = sum;
    }
    exponentials(count_, m_.total);
  }

  // u: what each token writes.
  void solve_writes(int64_t h, int64_t head) {
    const int64_t heads = p_.shape.heads, v = p_.shape.head_dim;
    if (is_delta())
      multiply({m_.k, m_.width, 1}, state(h), m_.height, count_, m_.width, m_.height, false, m_.o,
               m_.height);
    for (int64_t i = 0; i < count_; ++i) {
      float* u = m_.u + i * m_.height;
      to_padded_floats(static_cast<const ActT*>(p_.v) + (token_ + i) * p_.v_stride + head * v, v,
                       m_.height, u);
      if (is_delta()) {
        add_scaled_row(-m_.total[i], m_.o + i * m_.height, m_.height, u);
        for (int64_t j = 0; j < i; ++j)
          add_scaled_row(-m_.decay[i * kChunk + j] * m_.kk[i * kChunk + j], m_.u + j * m_.height,
                         m_.height, u);
      }
      scale_row(p_.b[(token_ + i) * heads + head], m_.height, u);
    }
  }

  void run_chunk(int64_t h) {
    const int64_t head = block_.head_begin + h;
    prepare_decays(head);
    solve_writes(h, head);

    multiply({m_.q, m_.width, 1}, state(h), m_.height, count_, m_.width, m_.height, false, m_.o,
             m_.height);
    for (int64_t i = 0; i < count_; ++i) {
      scale_row(m_.total[i], m_.height, m_.o + i * m_.height);
      for (int64_t j = 0; j < count_; ++j)
        m_.mix[i * kChunk + j] = j <= i ? m_.decay[i * kChunk + j] * m_.qk[i * kChunk + j] : 0.0f;
    }
    multiply_triangular(m_.mix, kChunk, m_.u, count_, m_.height, true, m_.o);
    for (int64_t i = 0; i < count_; ++i)
      write_output<ActT>(p_, token_ + i, head, m_.o + i * m_.height);

    const float* last = m_.decay + (count_ - 1) * kChunk;
    for (int64_t j = 0; j < count_; ++j) scale_row(last[j], m_.height, m_.u + j * m_.height);
    scale_row(m_.total[count_ - 1], m_.width * m_.height, state(h));
    multiply({m_.k, 1, m_.width}, m_.u, m_.height, m_.width, count_, m_.height, true, state(h),
             m_.height);
  }

  const RecurrentStepParams& p_;
  const Block& block_;
  PrefillScratch m_;
  int64_t slot_ = -1, first_ = 0, window_ = 0;
  int64_t token_ = 0, count_ = 0;  // the chunk at hand
};

void prefill_block(const RecurrentPrefillParams& params, const Block& block, float* memory) {
  dispatch_float(params.state.activation_dtype,
                 [&]<class ActT>() { PrefillBlock<ActT>(params, block, memory).run(); });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace replayssm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace replayssm::cpu {

HWY_EXPORT(prefill_block);

PrefillKernel chunked_prefill_kernel() { return HWY_DYNAMIC_DISPATCH(prefill_block); }

}  // namespace replayssm::cpu
#endif  // HWY_ONCE
