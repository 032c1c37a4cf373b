// The C interface of paged decode steps on the CPU.

#include "ops/c_api_context.h"
#include "ops/check_paged.h"
#include "ops/cpu/paged.h"

using namespace replayssm;  // NOLINT: the C functions are a façade of it

replayssm_status replayssm_paged_step_run(replayssm_context* context,
                                          const replayssm_paged_step* step) {
  return guarded(
      context,
      [&](auto& p) {
        check_paged(p);
        cpu::paged_step(p, context->pool);
      },
      step);
}

replayssm_status replayssm_paged_commit(replayssm_context* context,
                                        const replayssm_paged_cursors* cursors,
                                        const replayssm_integers* accepted) {
  return guarded(
      context,
      [](auto& p, auto& rows) {
        check_paged(p, rows);
        cpu::paged_commit(p, rows);
      },
      cursors, accepted);
}

replayssm_status replayssm_paged_reset(replayssm_context* context,
                                       const replayssm_paged_cursors* cursors,
                                       const replayssm_integers* first) {
  return guarded(
      context,
      [](auto& p, auto& rows) {
        check_paged(p, rows);
        cpu::paged_reset(p, rows);
      },
      cursors, first);
}
