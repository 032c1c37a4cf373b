#include "ops/cuda/linear.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <compare>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "ops/cuda/check_cuda.h"
#include "ops/cuda/narrow.h"
#include "ops/cuda/skinny.h"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

void check_blas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) [[unlikely]]
    fail("matrix product, ", what, ": ", cublasLtGetStatusString(status));
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return CUDA_R_32F;
    case DType::kFloat16: return CUDA_R_16F;
    case DType::kBFloat16: return CUDA_R_16BF;
    default: fail("matrix product: unsupported dtype ", dtype_name(dtype));
  }
}

// Descriptors and events are created and destroyed by functions of their own.
template <class Handle, auto kDestroy>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (handle_) kDestroy(handle_);
  }
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&&) = delete;

  Handle get() const { return handle_; }
  Handle* out() { return &handle_; }

 private:
  Handle handle_ = nullptr;
};
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;
using Library = Owned<cublasLtHandle_t, cublasLtDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;

// A column-major matrix for each head.
Layout layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t leading, int64_t heads,
              int64_t head_stride) {
  Layout result;
  check_blas(cublasLtMatrixLayoutCreate(result.out(), type, static_cast<uint64_t>(rows),
                                        static_cast<uint64_t>(columns), leading),
             "layout");
  if (heads == 1) return result;
  const auto count = static_cast<int32_t>(heads);
  check_blas(cublasLtMatrixLayoutSetAttribute(result.get(), CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                              &count, sizeof count),
             "heads");
  check_blas(
      cublasLtMatrixLayoutSetAttribute(result.get(), CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                       &head_stride, sizeof head_stride),
      "heads");
  return result;
}

enum class Kernel : uint8_t { kLibrary, kSkinny, kNarrow };

// A way to compute a product.
struct Way {
  Kernel kernel = Kernel::kLibrary;
  cublasLtMatmulAlgo_t algorithm{};  // the library's
  NarrowTile tile{};                 // of kNarrow
};

// A product as the library sees it: y^T = weight x^T with all matrices column-major.
struct Plan {
  Operation operation;
  Layout weight, x, y;
  Way way{};
  bool tuned = false;
};

void set_bias(const Operation& operation, const float* bias) {
  check_blas(cublasLtMatmulDescSetAttribute(operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                            static_cast<const void*>(&bias), sizeof bias),
             "bias");
}

Operation describe_operation(const LinearParams& p) {
  Operation operation;
  check_blas(cublasLtMatmulDescCreate(operation.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F),
             "operation");
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check_blas(cublasLtMatmulDescSetAttribute(operation.get(), CUBLASLT_MATMUL_DESC_TRANSA,
                                            &transposed, sizeof transposed),
             "operation");
  if (!p.bias) return operation;
  const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  check_blas(cublasLtMatmulDescSetAttribute(operation.get(), CUBLASLT_MATMUL_DESC_EPILOGUE,
                                            &epilogue, sizeof epilogue),
             "bias");
  const cudaDataType_t bias_type = CUDA_R_32F;
  check_blas(cublasLtMatmulDescSetAttribute(operation.get(), CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                                            &bias_type, sizeof bias_type),
             "bias");
  set_bias(operation, p.bias);
  return operation;
}

Plan describe(const LinearParams& p) {
  const cudaDataType_t type = type_of(p.dtype);
  return {
      .operation = describe_operation(p),
      .weight = layout(type, p.in_features, p.out_features, p.in_features, p.heads,
                       p.out_features * p.in_features),
      .x = layout(type, p.in_features, p.rows, p.heads * p.x_head_stride, p.heads, p.x_head_stride),
      .y = layout(CUDA_R_32F, p.out_features, p.rows, p.heads * p.y_head_stride, p.heads,
                  p.y_head_stride)};
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "matrix product");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

struct LinearRunner::Impl {
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;
  static constexpr int64_t kFlushBytes = int64_t{96} << 20;  // more than any cache
  static constexpr int kProposals = 40;

  explicit Impl(Memory& memory) : workspace(kWorkspaceBytes, memory), flushed(kFlushBytes, memory) {
    check_blas(cublasLtCreate(library.out()), "cuBLASLt");
    for (Event* event : {&start, &stop}) check_cuda(cudaEventCreate(event->out()), "an event");
  }

  const Plan& plan(const LinearParams& p, cudaStream_t stream);
  std::vector<cublasLtMatmulAlgo_t> proposals(const Plan& plan);
  void choose_fastest(const LinearParams& p, Plan& plan, cudaStream_t stream);
  cublasStatus_t multiply(const LinearParams& p, const Plan& plan, cudaStream_t stream);
  cublasStatus_t run(const LinearParams& p, const Plan& plan, cudaStream_t stream);
  // Median milliseconds of runs that find nothing in the caches; infinite for an error.
  float time(const LinearParams& p, const Plan& plan, int runs, cudaStream_t stream);
  // Those that a way, which becomes the plan's, costs among other kernels.
  float cost(const LinearParams& p, Plan& plan, const Way& way, int runs, cudaStream_t stream);

  // What a way depends on.
  struct Key {
    int64_t rows, out_features, in_features, heads, x_head_stride, y_head_stride, most_parts;
    DType dtype;
    LinearActivation activation;
    bool bias, aligned;

    auto operator<=>(const Key&) const = default;
  };
  Library library;
  Buffer workspace, flushed;
  Event start, stop;
  std::map<Key, Plan> plans;
  bool tuning = false;
};

std::vector<cublasLtMatmulAlgo_t> LinearRunner::Impl::proposals(const Plan& plan) {
  Preference preference;
  check_blas(cublasLtMatmulPreferenceCreate(preference.out()), "preference");
  const auto bytes = static_cast<uint64_t>(workspace.bytes());
  check_blas(cublasLtMatmulPreferenceSetAttribute(
                 preference.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
             "preference");
  std::array<cublasLtMatmulHeuristicResult_t, kProposals> results{};
  int found = 0;
  check_blas(cublasLtMatmulAlgoGetHeuristic(library.get(), plan.operation.get(), plan.weight.get(),
                                            plan.x.get(), plan.y.get(), plan.y.get(),
                                            preference.get(), kProposals, results.data(), &found),
             "algorithm");
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  algorithms.reserve(static_cast<size_t>(found));
  for (int i = 0; i < found; ++i) algorithms.push_back(results[i].algo);
  return algorithms;
}

cublasStatus_t LinearRunner::Impl::multiply(const LinearParams& p, const Plan& plan,
                                            cudaStream_t stream) {
  if (p.bias) set_bias(plan.operation, p.bias);
  const float one = 1, zero = 0;
  return cublasLtMatmul(library.get(), plan.operation.get(), &one, p.weight, plan.weight.get(), p.x,
                        plan.x.get(), &zero, p.y, plan.y.get(), p.y, plan.y.get(),
                        &plan.way.algorithm, workspace.as<>(),
                        static_cast<size_t>(workspace.bytes()), stream);
}

cublasStatus_t LinearRunner::Impl::run(const LinearParams& p, const Plan& plan,
                                       cudaStream_t stream) {
  switch (plan.way.kernel) {
    case Kernel::kSkinny: skinny_product(p, stream); break;
    case Kernel::kNarrow: narrow_product(p, plan.way.tile, stream); break;
    case Kernel::kLibrary: return multiply(p, plan, stream);
  }
  return CUBLAS_STATUS_SUCCESS;
}

float LinearRunner::Impl::time(const LinearParams& p, const Plan& plan, int runs,
                               cudaStream_t stream) {
  std::vector<float> times;
  for (int i = 0; i <= runs; ++i) {  // the first one loads the kernel
    check_cuda(cudaMemsetAsync(flushed.as<void>(), i, static_cast<size_t>(kFlushBytes), stream),
               "timing a product");
    check_cuda(cudaEventRecord(start.get(), stream), "timing a product");
    if (run(p, plan, stream) != CUBLAS_STATUS_SUCCESS)
      return std::numeric_limits<float>::infinity();
    check_cuda(cudaEventRecord(stop.get(), stream), "timing a product");
    check_cuda(cudaEventSynchronize(stop.get()), "timing a product");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, start.get(), stop.get()), "timing a product");
    if (i > 0) times.push_back(milliseconds);
  }
  std::ranges::nth_element(times, times.begin() + runs / 2);
  return times[runs / 2];
}

float LinearRunner::Impl::cost(const LinearParams& p, Plan& plan, const Way& way, int runs,
                               cudaStream_t stream) {
  plan.way = way;
  const float milliseconds = time(p, plan, runs, stream);
  // What kernels of ours read before the one in front has ended is not in their time here.
  if (way.kernel != Kernel::kLibrary) return 0.95f * milliseconds;
  if (p.activation == LinearActivation::kNone) return milliseconds;
  // Nor is the activation in the library's: a launch, and its bytes at what the device can read.
  constexpr float kLaunch = 2e-3f, kBytesPerMillisecond = 3.5e9f;
  const int64_t bytes = p.rows * p.out_features * (int64_t{sizeof(float)} + 1);
  return milliseconds + kLaunch + static_cast<float>(bytes) / kBytesPerMillisecond;
}

void LinearRunner::Impl::choose_fastest(const LinearParams& p, Plan& plan, cudaStream_t stream) {
  constexpr int kRuns = 3, kFinalRuns = 15;
  constexpr size_t kFinalists = 6;
  std::vector<std::pair<float, Way>> ways;
  const auto add = [&](const Way& way) {
    ways.emplace_back(cost(p, plan, way, kRuns, stream), way);
  };
  for (const cublasLtMatmulAlgo_t& algorithm : proposals(plan)) add({Kernel::kLibrary, algorithm});
  if (is_skinny(p)) add({.kernel = Kernel::kSkinny});
  for (const NarrowTile& tile : narrow_tiles(p)) add({.kernel = Kernel::kNarrow, .tile = tile});
  const auto costs = [](const auto& way) { return way.first; };
  std::ranges::sort(ways, {}, costs);
  ways.resize(std::min(ways.size(), kFinalists));
  for (auto& [cost_of, way] : ways) cost_of = cost(p, plan, way, kFinalRuns, stream);
  plan.way = std::ranges::min_element(ways, {}, costs)->second;
  plan.tuned = true;
}

const Plan& LinearRunner::Impl::plan(const LinearParams& p, cudaStream_t stream) {
  const Key key{.rows = p.rows,
                .out_features = p.out_features,
                .in_features = p.in_features,
                .heads = p.heads,
                .x_head_stride = p.x_head_stride,
                .y_head_stride = p.y_head_stride,
                .most_parts = p.most_parts,
                .dtype = p.dtype,
                .activation = p.activation,
                .bias = p.bias != nullptr,
                .aligned = rows_aligned(p.x) && rows_aligned(p.weight) && rows_aligned(p.y) &&
                           rows_aligned(p.activated)};
  auto known = plans.find(key);
  if (known == plans.end()) {
    constexpr size_t kMostPlans = 4096;  // prompts come in all lengths
    if (plans.size() >= kMostPlans) plans.clear();
    Plan plan = describe(p);
    const auto algorithms = proposals(plan);
    REPLAYSSM_CHECK(!algorithms.empty(), "no algorithm for ", p.rows, " x ", p.out_features, " x ",
                    p.in_features);
    plan.way.algorithm = algorithms.front();
    known = plans.emplace(key, std::move(plan)).first;
  }
  Plan& plan = known->second;
  if (tuning && !plan.tuned && !is_capturing(stream)) choose_fastest(p, plan, stream);
  return plan;
}

LinearRunner::LinearRunner(Memory& memory) : impl_(std::make_unique<Impl>(memory)) {}
LinearRunner::~LinearRunner() = default;

void LinearRunner::tune(bool on) { impl_->tuning = on; }

LinearResult LinearRunner::run(const LinearParams& p, cudaStream_t stream) {
  const bool plain = p.activation == LinearActivation::kNone;
  REPLAYSSM_CHECK((!p.norm.squares && !p.residual.hidden) || fuses_norms(p), "rows=", p.rows);
  REPLAYSSM_CHECK(p.heads == 1 || (!p.bias && plain && p.most_parts == 1),
                  "bias, activation or parts with ", p.heads, " heads");
  REPLAYSSM_CHECK(plain || p.most_parts == 1, "activation of ", p.most_parts, " parts");
  if (p.rows == 0 || p.out_features == 0) return {};
  if (p.rows == 1 && is_skinny(p)) {
    skinny_product(p, stream);
    return {};
  }
  const Plan& plan = impl_->plan(p, stream);
  check_blas(impl_->run(p, plan, stream), "run");
  return {.activated = plain || plan.way.kernel != Kernel::kLibrary,
          .parts = plan.way.kernel == Kernel::kNarrow ? plan.way.tile.parts : 1};
}

}  // namespace replayssm::cuda
