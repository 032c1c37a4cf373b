#include "ops/cuda/linear.h"

#include <cublasLt.h>

#include <map>
#include <tuple>
#include <utility>

#include "core/check.h"

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

// The library's descriptors are created and destroyed by functions of their own.
template <class Handle, cublasStatus_t (*kDestroy)(Handle)>
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

// A product as the library sees it: y^T = weight x^T with all matrices column-major.
struct Plan {
  Operation operation;
  Layout weight, x, y;
  cublasLtMatmulAlgo_t algorithm{};
};

}  // namespace

struct LinearRunner::Impl {
  static constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

  explicit Impl(Memory& memory) : workspace(kWorkspaceBytes, memory) {
    check_blas(cublasLtCreate(library.out()), "cuBLASLt");
  }

  const Plan& plan(const LinearParams& p);
  void set_bias(const Plan& plan, const float* bias) const {
    check_blas(cublasLtMatmulDescSetAttribute(
                   plan.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias),
               "bias");
  }

  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, DType, bool>;
  Library library;
  Buffer workspace;
  std::map<Key, Plan> plans;
};

const Plan& LinearRunner::Impl::plan(const LinearParams& p) {
  const Key key{p.rows,          p.out_features,  p.in_features, p.heads,
                p.x_head_stride, p.y_head_stride, p.dtype,       p.bias != nullptr};
  if (const auto known = plans.find(key); known != plans.end()) return known->second;
  constexpr size_t kMostPlans = 4096;  // prompts come in all lengths
  if (plans.size() >= kMostPlans) plans.clear();
  Plan plan;
  check_blas(cublasLtMatmulDescCreate(plan.operation.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F),
             "operation");
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check_blas(cublasLtMatmulDescSetAttribute(plan.operation.get(), CUBLASLT_MATMUL_DESC_TRANSA,
                                            &transposed, sizeof transposed),
             "operation");
  if (p.bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t bias_type = CUDA_R_32F;
    check_blas(cublasLtMatmulDescSetAttribute(plan.operation.get(), CUBLASLT_MATMUL_DESC_EPILOGUE,
                                              &epilogue, sizeof epilogue),
               "bias");
    check_blas(
        cublasLtMatmulDescSetAttribute(plan.operation.get(), CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                                       &bias_type, sizeof bias_type),
        "bias");
    set_bias(plan, p.bias);
  }
  const cudaDataType_t type = type_of(p.dtype);
  Layout weight = layout(type, p.in_features, p.out_features, p.in_features, p.heads,
                         p.out_features * p.in_features);
  Layout x =
      layout(type, p.in_features, p.rows, p.heads * p.x_head_stride, p.heads, p.x_head_stride);
  Layout y = layout(CUDA_R_32F, p.out_features, p.rows, p.heads * p.y_head_stride, p.heads,
                    p.y_head_stride);
  Preference preference;
  check_blas(cublasLtMatmulPreferenceCreate(preference.out()), "preference");
  const auto bytes = static_cast<uint64_t>(workspace.bytes());
  check_blas(cublasLtMatmulPreferenceSetAttribute(
                 preference.get(), CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes),
             "preference");
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  check_blas(
      cublasLtMatmulAlgoGetHeuristic(library.get(), plan.operation.get(), weight.get(), x.get(),
                                     y.get(), y.get(), preference.get(), 1, &result, &found),
      "algorithm");
  REPLAYSSM_CHECK(found == 1, "no algorithm for ", p.rows, " x ", p.out_features, " x ",
                  p.in_features);
  return plans
      .emplace(key, Plan{std::move(plan.operation), std::move(weight), std::move(x), std::move(y),
                         result.algo})
      .first->second;
}

LinearRunner::LinearRunner(Memory& memory) : impl_(std::make_unique<Impl>(memory)) {}
LinearRunner::~LinearRunner() = default;

void LinearRunner::run(const LinearParams& p, cudaStream_t stream) {
  REPLAYSSM_CHECK(p.heads == 1 || !p.bias, "a bias with ", p.heads, " heads");
  if (p.rows == 0 || p.out_features == 0) return;
  const Plan& plan = impl_->plan(p);
  if (p.bias) impl_->set_bias(plan, p.bias);
  const float one = 1, zero = 0;
  check_blas(cublasLtMatmul(impl_->library.get(), plan.operation.get(), &one, p.weight,
                            plan.weight.get(), p.x, plan.x.get(), &zero, p.y, plan.y.get(), p.y,
                            plan.y.get(), &plan.algorithm, impl_->workspace.as<>(),
                            static_cast<size_t>(impl_->workspace.bytes()), stream),
             "run");
}

}  // namespace replayssm::cuda
