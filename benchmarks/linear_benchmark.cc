// Matrix products of a 4096 x 4096 weight: GB/s of weights and GFLOP/s over rows and threads.
//
// The weights rotate through several copies, larger together than a cache, as in a model.
#include <benchmark/benchmark.h>

#include <vector>

#include "core/buffer.h"
#include "ops/cpu/linear.h"

namespace replayssm::cpu {
namespace {

constexpr int64_t kFeatures = 4096;
constexpr int64_t kCopies = 8;

void linear(benchmark::State& state, DType dtype) {
  const auto threads = static_cast<int>(state.range(0));
  const int64_t rows = state.range(1);
  ThreadPool pool(threads);
  std::vector<Linear> weights;
  {
    // Zeros: the time of a product does not depend on the values.
    const Buffer source(kFeatures * kFeatures * dtype_bytes(dtype));
    for (int64_t i = 0; i < kCopies; ++i)
      weights.push_back(
          Linear({{source.as<>(), dtype, kFeatures}}, kFeatures, dtype, pool, nullptr));
  }
  const Buffer x(rows * kFeatures * dtype_bytes(dtype));
  const Array<float> y(rows * kFeatures);
  size_t copy = 0;
  for (auto _ : state) {
    weights[copy++ % kCopies].apply(x.as<>(), kFeatures, rows, y.data(), kFeatures, pool);
    benchmark::ClobberMemory();
  }
  const auto calls = static_cast<double>(state.iterations());
  const double elements = static_cast<double>(kFeatures) * kFeatures;
  state.counters["weight_bytes"] =
      benchmark::Counter(elements * static_cast<double>(dtype_bytes(dtype)) * calls,
                         benchmark::Counter::kIsRate, benchmark::Counter::OneK::kIs1000);
  state.counters["flop"] =
      benchmark::Counter(2 * elements * static_cast<double>(rows) * calls,
                         benchmark::Counter::kIsRate, benchmark::Counter::OneK::kIs1000);
}

BENCHMARK_CAPTURE(linear, bfloat16, DType::kBFloat16)
    ->ArgsProduct({{1, 2}, {1, 4, 16, 64, 65, 512}})
    ->ArgNames({"threads", "rows"})
    ->UseRealTime();
BENCHMARK_CAPTURE(linear, float32, DType::kFloat32)
    ->ArgsProduct({{1, 2}, {1, 4, 64}})
    ->ArgNames({"threads", "rows"})
    ->UseRealTime();

}  // namespace
}  // namespace replayssm::cpu

BENCHMARK_MAIN();
