// A hundred thousand decode steps on the device: a state behind a ring is at least as good as one
// that is updated and stored at every step.
#include <gtest/gtest.h>

#include <memory>

#include "ops/cuda/harness.h"
#include "ops/long_run.h"

namespace replayssm::testing {
namespace {

constexpr int64_t kPeriod = 200, kSample = 20'000;

// A sequence that decodes a period of tokens over and over, on a stream of its own.
class LongRun {
 public:
  LongRun(const Case& c, Route route, const Inputs& in)
      : case_(c), pool_(c, {.buffer_len = 16}, 1), accepted_(std::vector<int32_t>{1}) {
    pool_.clear(0);
    device_ = std::make_unique<DevicePool>(pool_);
    cuda::check_cuda(cudaStreamCreate(&stream_), "stream");
    cudaGraph_t captured = nullptr;
    for (int64_t t = 0; t < kPeriod; ++t)
      calls_.push_back(std::make_unique<DeviceCall>(c, pool_, *device_,
                                                    std::vector<Window>{{&in, t, t + 1, 0, {}}}));
    cuda::check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
    for (auto& call : calls_) {
      call->p.route = route;
      cuda::begin_steps(call->p.batch, device_->cursors(), stream_);
      cuda::recurrent_step(call->p, nullptr, cuda::current_device(), stream_);
      cuda::commit_steps(call->p.batch, accepted_.data(), route, device_->cursors(), stream_);
    }
    cuda::check_cuda(cudaStreamEndCapture(stream_, &captured), "capture");
    cuda::check_cuda(cudaGraphInstantiate(&graph_, captured, 0), "instantiate");
    cuda::check_cuda(cudaGraphDestroy(captured), "capture");
  }
  ~LongRun() {
    cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  LongRun(const LongRun&) = delete;
  LongRun& operator=(const LongRun&) = delete;

  void start_sample() {
    for (int64_t t = 0; t < kSample; t += kPeriod)
      cuda::check_cuda(cudaGraphLaunch(graph_, stream_), "launch");
  }
  // With all tokens so far folded in.
  std::vector<double> state() {
    cuda::check_cuda(cudaStreamSynchronize(stream_), "steps");
    device_->download();
    fold(case_, pool_, 0);
    device_->upload();
    return pool_.slot_values(0);
  }
  const std::vector<uint8_t>& checkpoint() const { return pool_.checkpoint.bytes; }

 private:
  const Case case_;
  Pool pool_;
  std::unique_ptr<DevicePool> device_;
  DeviceArray<int32_t> accepted_;
  std::vector<std::unique_ptr<DeviceCall>> calls_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

class CudaDrift : public ::testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Families, CudaDrift,
                         ::testing::Values(Family::kMamba2, Family::kGatedDelta,
                                           Family::kKimiDelta));

TEST_P(CudaDrift, ReplayIsAtLeastAsGoodAsConventional) {
  REQUIRE_DEVICE();
  const DType types[] = {DType::kFloat32, DType::kBFloat16};
  constexpr Route kBoth[] = {Route::kConventional, Route::kOutputOnly};
  const Case c{{GetParam(), 1, 1, 8, 128}, DType::kBFloat16};
  const auto in = long_memory(c, kPeriod);
  std::unique_ptr<LongRun> runs[2][2];
  for (int type = 0; type < 2; ++type) {
    Case typed = c;
    typed.checkpoint = types[type];
    for (int route = 0; route < 2; ++route)
      runs[type][route] = std::make_unique<LongRun>(typed, kBoth[route], in);
  }
  const auto exact = exact_states(c, in, kPeriod, kSample);
  double largest[2][2] = {};  // relative error of the state at any sample
  for (const auto& want : exact) {
    for (auto& row : runs)
      for (auto& run : row) run->start_sample();
    for (int type = 0; type < 2; ++type)
      for (int route = 0; route < 2; ++route)
        largest[type][route] =
            std::max(largest[type][route], relative_error(runs[type][route]->state(), want));
  }
  for (int type = 0; type < 2; ++type)
    EXPECT_LE(largest[type][1], largest[type][0])
        << family_name(GetParam()) << " " << dtype_name(types[type]);
  EXPECT_EQ(runs[0][0]->checkpoint(), runs[0][1]->checkpoint()) << family_name(GetParam());
  // Every token's decay is rounded once; a state remembers up to 4,000 tokens.
  EXPECT_LT(largest[0][1], 4'000 * 0x1p-24) << family_name(GetParam());
}

}  // namespace
}  // namespace replayssm::testing
