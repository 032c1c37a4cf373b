// The backend that runs on a CUDA device.
#pragma once

#include "model/cuda/stage_clock.h"
#include "model/layers.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/device.h"
#include "ops/cuda/launch.h"
#include "ops/cuda/linear.h"

namespace replayssm {

class CudaBackend final : public Backend {
 public:
  CudaBackend(const ModelConfig& config, DType dtype);

  const cuda::Stream& stream() const { return stream_; }
  cuda::DeviceMemory& device_memory() { return memory_; }
  StageClock& clock() { return clock_; }
  const StageClock& clock() const { return clock_; }

  // Takes what attention needs for passes up to the limits.
  void reserve_attention(const PassLimits& limits);

  Memory& memory() override { return memory_; }
  DType dtype() const override { return dtype_; }

  std::unique_ptr<Product> make_product(const ProductWeights& weights) override;
  std::unique_ptr<Experts> make_experts(const std::vector<MlpWeights>& weights, int64_t width,
                                        MlpGate gate) override;

  void embed(const void* table, const int32_t* ids, int64_t rows, int64_t dim, float scale,
             float* out) override;
  void add_norm(const AddNormParams& params) override;
  bool product_add_norm(const Product& product, const void* x, const AddNormParams& norm) override;
  void gated_norm(const GatedNormParams& params) override;

  // What is yet to be divided out of the row `x`.
  cuda::RowNorm norm_of(const void* x) const { return x == normed_ ? norm_ : cuda::RowNorm(); }
  void gated_product(const GatedProductParams& params) override;
  void scale_columns(float* x, const float* scale, int64_t rows, int64_t dim) override;
  void round_rows(const float* x, int64_t x_stride, int64_t rows, int64_t dim, void* y) override;
  void copy_heads(const float* x, int64_t x_stride, int64_t x_head_stride, int64_t rows,
                  int64_t heads, int64_t dim, float* y, int64_t y_head_stride) override;
  void mamba2_gates(const Mamba2GateParams& params) override;
  void delta_gates(const DeltaGateParams& params) override;

  void begin_pass(const PassArrays& arrays, const StateView& state) override;
  void conv(const ConvParams& params) override;
  void recurrent_step(const RecurrentStepParams& params) override;
  void recurrent_prefill(const RecurrentPrefillParams& params) override;
  void snapshot_step(const SnapshotStepParams& params) override;
  void compact(const CompactParams& params) override;
  void compact_kv(const KvCache& cache, const KvBatch& batch, const int32_t* path,
                  const int32_t* accepted) override;
  bool fuses(const LayerStepParams& params) const override;
  void layer_step(const LayerStepParams& params) override;
  void attend(const AttentionParams& params) override;
  void route_experts(const RouterParams& params) override;
  void mix_experts(const ExpertMixParams& params) override;
  void add_gated(const float* x, const float* gate, int64_t rows, int64_t dim, float* y) override;

  void* stream_handle() const override { return stream_.get(); }

  void start_stage() override { clock_.start(stream_.get()); }
  void end_stage(Stage stage) override { clock_.end(stage, stream_.get()); }

 private:
  // With delta as the sum of so many matrices one behind another.
  void add_norm(const AddNormParams& params, const float* delta, int64_t parts);
  // What a product of one row takes along: it adds to the residual stream, and the product behind
  // it does the rest of the norm. Returns false, with nothing done, where it cannot.
  bool product_and_sum(const Product& product, const void* x, const AddNormParams& norm);
  // up: [rows, 2 * dim] gate first, the gate scaled; or [rows, dim].
  void mlp_gate(MlpGate gate, float* up, float scale, int64_t rows, int64_t dim, void* y);
  // The decoding or the prefilling sequences of a pass as attention sees them.
  struct AttentionPart {
    explicit AttentionPart(Memory& memory) : plan(memory), workspace(memory) {}

    cuda::AttentionShape shape;
    KvBatch batch;
    Scratch<std::byte> plan, workspace;
  };

  void plan_part(AttentionPart& part, int64_t first, int64_t sequences, int64_t tokens,
                 int64_t window);

  cuda::Stream stream_;
  cuda::DeviceMemory memory_{stream_};
  cuda::Device device_;
  DType dtype_;
  cuda::LinearRunner linear_{memory_};
  StageClock clock_;

  // What attention is planned for: of all attention layers.
  int64_t heads_ = 0, kv_heads_ = 0, head_dim_ = 0;

  // The pass at hand.
  PassArrays arrays_;
  AttentionPart decoding_{memory_}, prefilling_{memory_};
  Scratch<std::byte> queries_{memory_}, step_{memory_}, expert_plan_{memory_},
      expert_activated_{memory_};
  const void* normed_ = nullptr;  // the row of which norm_ is yet to come
  cuda::RowNorm norm_;
  Scratch<float> squares_{memory_}, sums_{memory_};
  Scratch<float> expert_up_{memory_}, expert_out_{memory_}, gated_{memory_};
};

}  // namespace replayssm
