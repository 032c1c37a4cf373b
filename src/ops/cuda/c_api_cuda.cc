// The C interface on the current CUDA device.

#include "ops/c_api_context.h"
#include "ops/c_api_layout.h"
#include "ops/check_paged.h"
#include "ops/check_params.h"
#include "ops/cuda/cursors.h"
#include "ops/cuda/paged.h"
#include "ops/cuda/recurrent.h"
#include "replayssm/cuda.h"

using namespace replayssm;  // NOLINT: the C functions are a façade of it

namespace {

cudaStream_t to_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
Cursor* to_cursors(replayssm_cursor* cursors) { return reinterpret_cast<Cursor*>(cursors); }

}  // namespace

replayssm_status replayssm_cuda_begin_steps(replayssm_context* context,
                                            const replayssm_batch* batch, replayssm_cursor* cursors,
                                            void* stream) {
  return guarded(
      context,
      [&](auto& b, auto&) {
        cuda::begin_steps(twin<SequenceBatch>(b), to_cursors(cursors), to_stream(stream));
      },
      batch, cursors);
}

replayssm_status replayssm_cuda_commit_steps(replayssm_context* context,
                                             const replayssm_batch* batch, const int32_t* accepted,
                                             replayssm_route route, replayssm_cursor* cursors,
                                             void* stream) {
  return guarded(
      context,
      [&](auto& b, auto&, auto&) {
        cuda::commit_steps(twin<SequenceBatch>(b), accepted, Route{route}, to_cursors(cursors),
                           to_stream(stream));
      },
      batch, accepted, cursors);
}

replayssm_status replayssm_cuda_commit_folds(replayssm_context* context,
                                             const replayssm_batch* batch,
                                             replayssm_cursor* cursors, void* stream) {
  return guarded(
      context,
      [&](auto& b, auto&) {
        cuda::commit_folds(twin<SequenceBatch>(b), to_cursors(cursors), to_stream(stream));
      },
      batch, cursors);
}

replayssm_status replayssm_cuda_recurrent_step(replayssm_context* context,
                                               const replayssm_step_params* params, void* stream) {
  return guarded(
      context,
      [&](auto& c) {
        const auto p = twin<RecurrentStepParams>(c);
        check_params(p);
        cuda::recurrent_step(p, nullptr, cuda::current_device(), to_stream(stream));
      },
      params);
}

replayssm_status replayssm_cuda_recurrent_fold(replayssm_context* context,
                                               const replayssm_fold_params* params, void* stream) {
  return guarded(
      context,
      [&](auto& c) {
        const auto p = twin<RecurrentFoldParams>(c);
        check_params(p);
        cuda::recurrent_fold(p, cuda::current_device(), to_stream(stream));
      },
      params);
}

replayssm_status replayssm_cuda_paged_step_run(replayssm_context* context,
                                               const replayssm_paged_step* step, void* stream) {
  return guarded(
      context,
      [&](auto& p) {
        check_paged(p);
        cuda::paged_step(p, cuda::current_device(), to_stream(stream));
      },
      step);
}

replayssm_status replayssm_cuda_paged_commit(replayssm_context* context,
                                             const replayssm_paged_cursors* cursors,
                                             const replayssm_integers* accepted, void* stream) {
  return guarded(
      context,
      [&](auto& p, auto& rows) {
        check_paged(p, rows);
        cuda::paged_commit(p, rows, to_stream(stream));
      },
      cursors, accepted);
}

replayssm_status replayssm_cuda_paged_reset(replayssm_context* context,
                                            const replayssm_paged_cursors* cursors,
                                            const replayssm_integers* first, void* stream) {
  return guarded(
      context,
      [&](auto& p, auto& rows) {
        check_paged(p, rows);
        cuda::paged_reset(p, rows, to_stream(stream));
      },
      cursors, first);
}
