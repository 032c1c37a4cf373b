#include "model/cpu/cpu_backend.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "ops/cpu/precision.h"
#include "ops/cpu/recurrent.h"

namespace replayssm {

void CpuBackend::end_stage(Stage stage) {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start_;
  times_[stage] += took.count();
}

void CpuBackend::begin_pass(const PassArrays& arrays, const StateView& state) {
  arrays_ = arrays;
  state_ = &state;
  token_position_.resize(static_cast<size_t>(arrays.tokens));
  for (int64_t s = 0; s < arrays.sequences; ++s) {
    for (int64_t t = arrays.query_start[s]; t < arrays.query_start[s + 1]; ++t)
      token_position_[t] =
          arrays.position[s] + (arrays.depth ? arrays.depth[t] : t - arrays.query_start[s]);
  }
}

void CpuBackend::add_norm(const AddNormParams& p) {
  float* hidden = p.hidden;
  const int64_t hidden_rows = p.row_index ? p.hidden_rows : p.rows;
  if (p.second) cpu::add_scaled(p.second, p.second_scale, hidden_rows * p.dim, hidden, pool_);
  if (p.delta) cpu::add_scaled(p.delta, p.scale, hidden_rows * p.dim, hidden, pool_);
  if (p.row_index) {
    hidden = chosen_.get(p.rows * p.dim);
    for (int64_t i = 0; i < p.rows; ++i)
      std::copy_n(p.hidden + p.row_index[i] * p.dim, p.dim, hidden + i * p.dim);
  }
  cpu::rms_norm(hidden, p.weight, p.rows, p.dim, p.eps, p.y, dtype_, pool_);
  if (p.y_wide)
    cpu::rms_norm(hidden, p.weight, p.rows, p.dim, p.eps, p.y_wide, DType::kFloat32, pool_);
}

void CpuBackend::gated_product(const GatedProductParams& p) {
  start_stage();
  p.up->apply(p.x, p.up->in_features(), p.rows, p.product, p.up->out_features());
  end_stage(Stage::kMatmul);
  start_stage();
  mlp_gate(p.gate, p.product, p.scale, p.rows, p.dim, p.y);
  end_stage(Stage::kOther);
}

void CpuBackend::mlp_gate(MlpGate gate, float* up, float scale, int64_t rows, int64_t dim,
                          void* y) {
  if (gate == MlpGate::kReluSquared) return cpu::relu_squared(up, rows, dim, y, dtype_, pool_);
  if (scale != 1) {
    float* scales = gated_.get(dim);
    std::fill_n(scales, dim, scale);
    cpu::scale_columns(up, 2 * dim, scales, rows, dim, pool_);
  }
  cpu::swiglu(up, rows, dim, y, dtype_, pool_);
}

void CpuBackend::copy_heads(const float* x, int64_t x_stride, int64_t x_head_stride, int64_t rows,
                            int64_t heads, int64_t dim, float* y, int64_t y_head_stride) {
  pool_.for_ranges(rows, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h)
        std::copy_n(x + r * x_stride + h * x_head_stride, dim, y + (r * heads + h) * y_head_stride);
    }
  });
}

void CpuBackend::mamba2_gates(const Mamba2GateParams& params) { cpu::mamba2_gates(params, pool_); }

void CpuBackend::delta_gates(const DeltaGateParams& p) {
  if (p.alpha) return cpu::delta_gates(p, pool_);
  pool_.for_ranges(p.tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.heads; ++h)
        p.b[t * p.heads + h] = 1.0f / (1.0f + std::exp(-p.beta[t * p.stride + h]));
    }
  });
}

void CpuBackend::conv(const ConvParams& params) { cpu::causal_conv(params, pool_); }

void* CpuBackend::workspace(const RecurrentStepParams& p) {
  return workspace_.get(cpu::recurrent_workspace_bytes(p.shape, p.batch.ring, pool_.size()) /
                        static_cast<int64_t>(sizeof(float)));
}

void CpuBackend::round_emulated(const RecurrentStepParams& params, bool prefill) {
  if (const cpu::StateEmulation* emulation = state_->emulation) {
    round_stored(*emulation, params, prefill ? cpu::Stored::kByPrefill : cpu::Stored::kByStep,
                 params.rounding.stream, pool_);
  }
}

void CpuBackend::recurrent_step(const RecurrentStepParams& params) {
  cpu::recurrent_step(params, workspace(params), pool_);
  round_emulated(params, false);
}

void CpuBackend::recurrent_prefill(const RecurrentPrefillParams& params) {
  cpu::recurrent_prefill(params, workspace(params), pool_);
  round_emulated(params, true);
}

void CpuBackend::snapshot_step(const SnapshotStepParams& params) {
  cpu::snapshot_step(params, workspace(params), pool_);
}

void CpuBackend::attend(const AttentionParams& p) {
  const int64_t tokens = arrays_.tokens, width = p.heads * p.head_dim;
  if (p.k_norm) {
    REPLAYSSM_CHECK(p.norm_dim == p.head_dim || p.kv_heads == 1, "norm_dim=", p.norm_dim);
    cpu::head_rms_norm(p.k, p.kv_stride, p.k_norm, tokens, p.kv_heads, p.norm_dim, p.eps, pool_);
  }
  if (p.q_norm)
    cpu::head_rms_norm(p.q, p.q_stride, p.q_norm, tokens, p.heads, p.norm_dim, p.eps, pool_);
  if (p.rotary_dim > 0) {
    cpu::rotary(p.q, p.q_stride, token_position_.data(), p.inverse_frequency, tokens, p.heads,
                p.head_dim, p.rotary_dim, pool_);
    cpu::rotary(p.k, p.kv_stride, token_position_.data(), p.inverse_frequency, tokens, p.kv_heads,
                p.head_dim, p.rotary_dim, pool_);
  }
  const KvCache cache{.k = p.cache_k,
                      .v = p.cache_v,
                      .dtype = dtype_,
                      .block_size = p.block_size,
                      .kv_heads = p.kv_heads,
                      .head_dim = p.head_dim};
  const KvBatch batch{.sequences = arrays_.sequences,
                      .query_start = arrays_.query_start,
                      .position = arrays_.position,
                      .block_table = arrays_.block_table,
                      .block_table_stride = arrays_.block_table_stride,
                      .ancestors = arrays_.ancestors};
  cpu::store_kv(cache, batch, p.k, p.v, p.kv_stride, pool_);
  float* out = mixed_.get(tokens * width);
  cpu::paged_attention(cache, batch, p.q, p.q_stride, p.heads, p.scale, out, pool_);
  if (p.gate) {
    cpu::sigmoid_gate(out, p.gate, p.q_stride, tokens, width, p.out, dtype_, pool_);
  } else {
    cpu::convert_rows(out, width, tokens, width, p.out, dtype_, pool_);
  }
}

void CpuBackend::add_gated(const float* x, const float* gate, int64_t rows, int64_t dim, float* y) {
  if (gate) {
    float* gated = gated_.get(rows * dim);
    for (int64_t r = 0; r < rows; ++r) {
      const float scale = 1.0f / (1.0f + std::exp(-gate[r]));
      for (int64_t i = 0; i < dim; ++i) gated[r * dim + i] = x[r * dim + i] * scale;
    }
    x = gated;
  }
  cpu::add_scaled(x, 1.0f, rows * dim, y, pool_);
}

}  // namespace replayssm
