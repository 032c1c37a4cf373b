// The backend that runs on the host's cores.
#pragma once

#include <chrono>

#include "core/thread_pool.h"
#include "model/layers.h"
#include "ops/cpu/dense.h"
#include "ops/cpu/slots.h"

namespace replayssm {

class CpuBackend final : public Backend {
 public:
  CpuBackend(DType dtype, ThreadPool& pool) : dtype_(dtype), pool_(pool) {}

  StageTimes& times() { return times_; }

  Memory& memory() override { return host_memory(); }
  DType dtype() const override { return dtype_; }

  std::unique_ptr<Product> make_product(const ProductWeights& weights) override;
  std::unique_ptr<Experts> make_experts(const std::vector<MlpWeights>& weights, int64_t width,
                                        MlpGate gate) override;

  void embed(const void* table, const int32_t* ids, int64_t rows, int64_t dim, float scale,
             float* out) override {
    cpu::embed(table, dtype_, ids, rows, dim, scale, out, pool_);
  }
  void add_norm(const AddNormParams& params) override;
  void gated_norm(const GatedNormParams& params) override { cpu::gated_rms_norm(params, pool_); }
  void gated_product(const GatedProductParams& params) override;
  void scale_columns(float* x, const float* scale, int64_t rows, int64_t dim) override {
    cpu::scale_columns(x, dim, scale, rows, dim, pool_);
  }
  void round_rows(const float* x, int64_t x_stride, int64_t rows, int64_t dim, void* y) override {
    cpu::convert_rows(x, x_stride, rows, dim, y, dtype_, pool_);
  }
  void copy_heads(const float* x, int64_t x_stride, int64_t x_head_stride, int64_t rows,
                  int64_t heads, int64_t dim, float* y, int64_t y_head_stride) override;
  void mamba2_gates(const Mamba2GateParams& params) override;
  void delta_gates(const DeltaGateParams& params) override;

  void begin_pass(const PassArrays& arrays, const StateView& state) override;
  void conv(const ConvParams& params) override;
  void recurrent_step(const RecurrentStepParams& params) override;
  void recurrent_prefill(const RecurrentPrefillParams& params) override;
  void snapshot_step(const SnapshotStepParams& params) override;
  void compact(const CompactParams& params) override { cpu::compact(params, pool_); }
  void compact_kv(const KvCache& cache, const KvBatch& batch, const int32_t* path,
                  const int32_t* accepted) override {
    cpu::compact_kv(cache, batch, path, accepted, pool_);
  }
  void attend(const AttentionParams& params) override;
  void route_experts(const RouterParams& params) override { cpu::route_experts(params, pool_); }
  void mix_experts(const ExpertMixParams& params) override;
  void add_gated(const float* x, const float* gate, int64_t rows, int64_t dim, float* y) override;

  void start_stage() override { start_ = std::chrono::steady_clock::now(); }
  void end_stage(Stage stage) override;

 private:
  // up: [rows, 2 * dim] gate first, the gate scaled; or [rows, dim].
  void mlp_gate(MlpGate gate, float* up, float scale, int64_t rows, int64_t dim, void* y);
  void* workspace(const RecurrentStepParams& params);
  void round_emulated(const RecurrentStepParams& params, bool prefill);

  DType dtype_;
  ThreadPool& pool_;
  StageTimes times_;
  std::chrono::steady_clock::time_point start_;

  // The pass at hand.
  PassArrays arrays_;
  const StateView* state_ = nullptr;
  std::vector<int64_t> token_position_;  // [tokens]

  Scratch<float> mixed_{host_memory()}, chosen_{host_memory()}, workspace_{host_memory()},
      expert_up_{host_memory()}, expert_out_{host_memory()}, gated_{host_memory()};
  Scratch<std::byte> gathered_{host_memory()}, expert_activated_{host_memory()};
};

}  // namespace replayssm
