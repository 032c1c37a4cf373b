// Cursors of a batch: one thread per sequence, with the host's own arithmetic.

#include "ops/cuda/cursors.h"

#include "ops/check_params.h"
#include "ops/cuda/check_cuda.h"
#include "replay/cursor.h"

namespace replayssm::cuda {
namespace {

constexpr int kThreads = 128;

// Calls fn(cursor, s) for the sequences that are no padding.
template <class Fn>
__global__ void __launch_bounds__(kThreads)
    cursors_kernel(SequenceBatch batch, Cursor* cursors, Fn fn) {
  const int64_t s = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (s < batch.sequences && batch.slot[s] >= 0) fn(cursors[batch.slot[s]], s);
  __threadfence();  // the next kernel may read them as soon as this block is gone
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
