// Cursors of a batch: one thread per sequence, with the host's own arithmetic.

#include "ops/cuda/cursors.h"

#include "ops/check_params.h"
#include "ops/cuda/check_cuda.h"
#include "replay/step_plan.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPlanThreads = 1024;

// Calls fn(cursor, s) for the sequences that are no padding.
template <class Fn>
__global__ void __launch_bounds__(kThreads)
    cursors_kernel(SequenceBatch batch, Cursor* cursors, Fn fn) {
  const int64_t s = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (s < batch.sequences && batch.slot[s] >= 0) fn(cursors[batch.slot[s]], s);
  __threadfence();  // the next kernel may read them as soon as this block is gone
}

// Begins the steps of a batch and plans them, up to kPlanThreads sequences together.
__global__ void __launch_bounds__(kPlanThreads)
    begin_planned_kernel(SequenceBatch batch, Cursor* cursors) {
  __shared__ uint32_t masks[kPlanThreads / 32];
  const int64_t first = int64_t{blockIdx.x} * kPlanThreads, s = first + threadIdx.x;
  const bool exists = s < batch.sequences;
  SequencePlan plan;
  if (exists) {
    const int32_t token = batch.query_start[s], window = batch.query_start[s + 1] - token;
    const int32_t slot = batch.slot[s], sequence = static_cast<int32_t>(s);
    plan = {.sequence = sequence, .slot = slot, .token = token, .window = window};
    if (slot >= 0) {
      Cursor cursor = cursors[slot];
      begin_step(cursor, window, batch.ring);
      cursors[slot] = cursor;
      plan = plan_sequence(sequence, slot, token, window, cursor, batch.ring);
    }
  }
  const bool fold = exists && plan.folded > 0;
  const uint32_t mask = __ballot_sync(0xffffffffu, fold);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) masks[warp] = mask;
  __syncthreads();
  int32_t folds = 0, before = 0;
  for (uint32_t w = 0; w < kPlanThreads / 32; ++w) {
    if (w == warp) before = folds + __popc(mask & ((1u << lane) - 1));
    folds += __popc(masks[w]);
  }
  if (exists) {
    const auto count = static_cast<int32_t>(min(batch.sequences - first, int64_t{kPlanThreads}));
    const auto rank = fold ? before : static_cast<int32_t>(threadIdx.x) - before;
    batch.plan[first + planned_place(fold, rank, folds, count)] = plan;
  }
  __threadfence();
}

// Overlaps nothing: what runs before it is done, and what comes behind may rely on that.
template <class Fn>
void for_cursors(const char* what, const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream,
                 Fn fn) {
  if (batch.sequences == 0) return;
  check_pointer("batch.slot", batch.slot, alignof(int32_t));
  check_pointer("cursors", cursors, alignof(Cursor));
  const auto blocks = static_cast<unsigned>((batch.sequences + kThreads - 1) / kThreads);
  cursors_kernel<<<blocks, kThreads, 0, stream>>>(batch, cursors, fn);
  check_cuda(cudaGetLastError(), what);
}

void check_windows_pointer(const SequenceBatch& batch) {
  if (batch.sequences > 0) check_pointer("batch.query_start", batch.query_start, alignof(int32_t));
}

void begin_planned(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream) {
  if (batch.sequences == 0) return;
  check_pointer("batch.slot", batch.slot, alignof(int32_t));
  check_pointer("batch.plan", batch.plan, 16);
  check_pointer("cursors", cursors, alignof(Cursor));
  const auto blocks = static_cast<unsigned>((batch.sequences + kPlanThreads - 1) / kPlanThreads);
  begin_planned_kernel<<<blocks, kPlanThreads, 0, stream>>>(batch, cursors);
  check_cuda(cudaGetLastError(), "begin_steps");
}

struct Reset {
  RingConfig ring;
  __device__ void operator()(Cursor& c, int64_t) const { c = reset_cursor(ring); }
};
struct Begin {
  RingConfig ring;
  const int32_t* query_start;
  __device__ void operator()(Cursor& c, int64_t s) const {
    begin_step(c, query_start[s + 1] - query_start[s], ring);
  }
};
struct CommitStep {
  const int32_t* accepted;
  Route route;
  __device__ void operator()(Cursor& c, int64_t s) const { commit_step(c, accepted[s], route); }
};
struct CommitPrefill {
  RingConfig ring;
  const int32_t* query_start;
  __device__ void operator()(Cursor& c, int64_t s) const {
    commit_prefill(c, query_start[s + 1] - query_start[s], ring);
  }
};
struct CommitFold {
  const int32_t* target_slot;  // null: in place
  Cursor* cursors;
  __device__ void operator()(Cursor& c, int64_t s) const {
    if (target_slot == nullptr) return commit_fold(c);
    if (target_slot[s] < 0) return;
    Cursor folded = c;
    commit_fold(folded);
    cursors[target_slot[s]] = folded;
  }
};
struct Copy {
  const int32_t* target_slot;
  Cursor* cursors;
  __device__ void operator()(const Cursor& c, int64_t s) const {
    if (target_slot[s] >= 0) cursors[target_slot[s]] = c;
  }
};

}  // namespace

void reset_slots(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream) {
  for_cursors("reset_slots", batch, cursors, stream, Reset{batch.ring});
}

void begin_steps(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream) {
  check_windows_pointer(batch);
  if (batch.plan) return begin_planned(batch, cursors, stream);
  for_cursors("begin_steps", batch, cursors, stream, Begin{batch.ring, batch.query_start});
}

void commit_steps(const SequenceBatch& batch, const int32_t* accepted, Route route, Cursor* cursors,
                  cudaStream_t stream) {
  if (batch.sequences > 0) check_pointer("accepted", accepted, alignof(int32_t));
  for_cursors("commit_steps", batch, cursors, stream, CommitStep{accepted, route});
}

void commit_prefills(const SequenceBatch& batch, Cursor* cursors, cudaStream_t stream) {
  check_windows_pointer(batch);
  for_cursors("commit_prefills", batch, cursors, stream,
              CommitPrefill{batch.ring, batch.query_start});
}

void commit_folds(const SequenceBatch& batch, const int32_t* target_slot, Cursor* cursors,
                  cudaStream_t stream) {
  for_cursors("commit_folds", batch, cursors, stream, CommitFold{target_slot, cursors});
}

void copy_cursors(const SequenceBatch& batch, const int32_t* target_slot, Cursor* cursors,
                  cudaStream_t stream) {
  if (batch.sequences > 0) check_pointer("target_slot", target_slot, alignof(int32_t));
  for_cursors("copy_cursors", batch, cursors, stream, Copy{target_slot, cursors});
}

}  // namespace replayssm::cuda
