// Gates of the recurrence with a scalar decay: one thread per head and token.

#include "ops/cuda/gates.h"

#include "core/check.h"
#include "ops/check_params.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/fast_divide.h"
#include "ops/cuda/scalar_gates.cuh"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128;

// Where a thread stands.
struct Place {
  int64_t token, head;
  bool active;
};
__device__ inline Place place(int64_t tokens, const FastDivide& heads) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x, token = heads.divide(i);
  return {token, i - token * heads.divisor, token < tokens};
}

__global__ void __launch_bounds__(kThreads)
    mamba2_gates_kernel(const __grid_constant__ Mamba2GateParams p, FastDivide heads) {
  release_successor();
  const auto [token, head, active] = place(p.tokens, heads);
  const float bias = active ? __ldg(p.dt_bias + head) : 0.0f;
  const float a = active ? __ldg(p.a + head) : 0.0f;
  wait_for_predecessor();
  if (!active) return;
  float raw;
  load_run<1>(p.dt, p.dtype, token * p.dt_stride + head, &raw);
  const float b = mamba2_strength(raw, bias, p.dt_min, p.dt_max);
  p.b[token * p.heads + head] = b;
  p.g[token * p.heads + head] = b * a;
}

__global__ void __launch_bounds__(kThreads)
    delta_gates_kernel(const __grid_constant__ DeltaGateParams p, FastDivide heads) {
  release_successor();
  const auto [token, head, active] = place(p.tokens, heads);
  const bool decays = active && p.alpha != nullptr;
  const float bias = decays ? __ldg(p.dt_bias + head) : 0.0f;
  const float a = decays ? __ldg(p.a + head) : 0.0f;
  wait_for_predecessor();
  if (!active) return;
  const int64_t from = token * p.stride + head, to = token * p.heads + head;
  float beta, alpha = 0;
  load_run<1>(p.beta, p.dtype, from, &beta);
  if (decays) load_run<1>(p.alpha, p.dtype, from, &alpha);
  p.b[to] = sigmoid(beta);
  if (decays) p.g[to] = delta_log_decay(alpha, bias, a);
}

dim3 grid_of(int64_t tokens, int64_t heads) {
  const int64_t blocks = (tokens * heads + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX / kThreads)
    fail("tokens: expected fewer, got ", tokens, " of ", heads, " heads");
  return dim3(static_cast<unsigned>(blocks));
}

void check_sizes(int64_t tokens, int64_t heads, const char* stride_name, int64_t stride) {
  if (tokens < 0) fail("tokens: expected at least 0, got ", tokens);
  if (heads < 1) fail("heads: expected at least 1, got ", heads);
  if (stride < heads) fail(stride_name, ": expected at least ", heads, ", got ", stride);
}

void check_raw(const char* name, const void* raw, DType dtype) {
  if (dtype_bytes(dtype) < 2)
    fail("dtype: expected float32, float16 or bfloat16, got ", dtype_name(dtype));
  check_pointer(name, raw, dtype_bytes(dtype));
}

}  // namespace

void mamba2_gates(const Mamba2GateParams& p, cudaStream_t stream) {
  check_sizes(p.tokens, p.heads, "dt_stride", p.dt_stride);
  if (!(p.dt_min <= p.dt_max))
    fail("dt_max: expected at least dt_min = ", p.dt_min, ", got ", p.dt_max);
  if (p.tokens == 0) return;
  check_raw("dt", p.dt, p.dtype);
  for (const auto& [name, pointer] :
       {std::pair{"dt_bias", p.dt_bias}, {"a", p.a}, {"b", p.b}, {"g", p.g}})
    check_pointer(name, pointer, sizeof(float));
  launch_dependent("mamba2_gates", mamba2_gates_kernel, grid_of(p.tokens, p.heads), kThreads, 0,
                   stream, p, FastDivide(static_cast<uint32_t>(p.heads)));
}

void delta_gates(const DeltaGateParams& p, cudaStream_t stream) {
  check_sizes(p.tokens, p.heads, "stride", p.stride);
  if (p.tokens == 0) return;
  check_raw("beta", p.beta, p.dtype);
  check_pointer("b", p.b, sizeof(float));
  if (p.alpha != nullptr) {
    check_raw("alpha", p.alpha, p.dtype);
    for (const auto& [name, pointer] : {std::pair{"dt_bias", p.dt_bias}, {"a", p.a}, {"g", p.g}})
      check_pointer(name, pointer, sizeof(float));
  }
  launch_dependent("delta_gates", delta_gates_kernel, grid_of(p.tokens, p.heads), kThreads, 0,
                   stream, p, FastDivide(static_cast<uint32_t>(p.heads)));
}

}  // namespace replayssm::cuda
