#include "ops/cuda/paged.h"

#include <algorithm>

#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/paged_instances.h"
#include "ops/cuda/vector_width.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void commit_kernel(PagedCursors cursors, PagedIntegers accepted) {
  wait_for_predecessor();
  const int64_t s = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (s >= cursors.sequences) return;
  const int64_t slot = integer_at(cursors.slot, s);
  if (slot < 0 || slot == cursors.null_slot) return;
  replayssm::paged_commit(cursors, slot, integer_at(accepted, s));
}

__global__ void reset_kernel(PagedCursors cursors, PagedIntegers first) {
  wait_for_predecessor();
  const int64_t s = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (s >= cursors.sequences) return;
  const int64_t slot = integer_at(cursors.slot, s);
  if (slot < 0 || slot == cursors.null_slot || integer_at(first, s) == 0) return;
  replayssm::paged_reset(cursors, slot);
}

unsigned blocks(const PagedCursors& cursors) {
  return static_cast<unsigned>((cursors.sequences + kThreads - 1) / kThreads);
}

// Whether rows can be read 16 bytes at a time.
bool in_words(const PagedValues& x, int64_t row) {
  const int64_t bytes = dtype_bytes(DType{x.dtype});
  return rows_aligned(x.data, row * bytes) && std::ranges::all_of(x.stride, [&](int64_t stride) {
           return rows_aligned(x.data, stride * bytes);
         });
}

// Whether the fast kernels can take it: one type for all activations, rows of whole words, those of
// a state one behind the other.
bool is_regular(const PagedStep& p) {
  const auto act = p.v.dtype;
  for (const PagedValues* x : {&p.k, &p.q, &p.cache_v, &p.cache_k})
    if (x->dtype != act) return false;
  if (p.state.stride[2] != p.state_dim) return false;
  if (p.z.data && !in_words(p.z, p.head_dim)) return false;
  return in_words(p.out, p.head_dim) && in_words(p.state, p.state_dim) &&
         in_words(p.v, p.head_dim) && in_words(p.k, p.state_dim) && in_words(p.q, p.state_dim) &&
         in_words(p.cache_v, p.head_dim) && in_words(p.cache_k, p.state_dim);
}

template <replayssm_family kFamily>
bool launch_family(const PagedStep& step, const Device& device, cudaStream_t stream) {
  switch (step.v.dtype) {
    case REPLAYSSM_BFLOAT16: return launch_paged<kFamily, REPLAYSSM_BFLOAT16>(step, device, stream);
    case REPLAYSSM_FLOAT16: return launch_paged<kFamily, REPLAYSSM_FLOAT16>(step, device, stream);
    default: return launch_paged<kFamily, REPLAYSSM_FLOAT32>(step, device, stream);
  }
}

}  // namespace

void paged_step(const PagedStep& step, const Device& device, cudaStream_t stream) {
  if (step.sequences == 0) return;
  if (is_regular(step)) {
    const bool launched = step.family == REPLAYSSM_MAMBA2
                              ? launch_family<REPLAYSSM_MAMBA2>(step, device, stream)
                              : launch_family<REPLAYSSM_GATED_DELTA>(step, device, stream);
    if (launched) return;
  }
  launch_paged_any(step, stream);
}

void paged_commit(const PagedCursors& cursors, const PagedIntegers& accepted, cudaStream_t stream) {
  if (cursors.sequences == 0) return;
  launch_dependent("paged_commit", commit_kernel, dim3(blocks(cursors)), kThreads, 0, stream,
                   cursors, accepted);
}

void paged_reset(const PagedCursors& cursors, const PagedIntegers& first, cudaStream_t stream) {
  if (cursors.sequences == 0) return;
  launch_dependent("paged_reset", reset_kernel, dim3(blocks(cursors)), kThreads, 0, stream, cursors,
                   first);
}

}  // namespace replayssm::cuda
