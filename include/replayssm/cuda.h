/* The functions of replayssm.h and paged.h on the current CUDA device, for C. A library that was
 * built without CUDA does not have them.
 *
 * Pointers are device pointers; the structs themselves and what is not documented otherwise stay on
 * the host. Work is enqueued on `stream`, a cudaStream_t, and decided from device data: a captured
 * graph stays valid whatever flushes and whatever is accepted. */
#ifndef REPLAYSSM_CUDA_H_
#define REPLAYSSM_CUDA_H_

#include "replayssm/paged.h"
#include "replayssm/replayssm.h"

#ifdef __cplusplus
extern "C" {
#endif

REPLAYSSM_API replayssm_status replayssm_cuda_begin_steps(replayssm_context* context,
                                                          const replayssm_batch* batch,
                                                          replayssm_cursor* cursors, void* stream);
REPLAYSSM_API replayssm_status replayssm_cuda_commit_steps(replayssm_context* context,
                                                           const replayssm_batch* batch,
                                                           const int32_t* accepted,
                                                           replayssm_route route,
                                                           replayssm_cursor* cursors, void* stream);
REPLAYSSM_API replayssm_status replayssm_cuda_commit_folds(replayssm_context* context,
                                                           const replayssm_batch* batch,
                                                           replayssm_cursor* cursors, void* stream);
REPLAYSSM_API replayssm_status replayssm_cuda_recurrent_step(replayssm_context* context,
                                                             const replayssm_step_params* params,
                                                             void* stream);
REPLAYSSM_API replayssm_status replayssm_cuda_recurrent_fold(replayssm_context* context,
                                                             const replayssm_fold_params* params,
                                                             void* stream);

REPLAYSSM_API replayssm_status replayssm_cuda_paged_step_run(replayssm_context* context,
                                                             const replayssm_paged_step* step,
                                                             void* stream);
REPLAYSSM_API replayssm_status replayssm_cuda_paged_commit(replayssm_context* context,
                                                           const replayssm_paged_cursors* cursors,
                                                           const replayssm_integers* accepted,
                                                           void* stream);
REPLAYSSM_API replayssm_status replayssm_cuda_paged_reset(replayssm_context* context,
                                                          const replayssm_paged_cursors* cursors,
                                                          const replayssm_integers* first,
                                                          void* stream);

#ifdef __cplusplus
}
#endif

#endif /* REPLAYSSM_CUDA_H_ */
