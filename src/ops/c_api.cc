// The C interface: its structs are those of the C++ interface under other names, its functions
// convert, call and turn exceptions into a status.

#include <new>

#include "ops/c_api_context.h"
#include "ops/c_api_layout.h"
#include "ops/check_params.h"
#include "ops/cpu/recurrent.h"
#include "ops/cpu/slots.h"
#include "replay/bytes.h"
#include "replay/cursors.h"
#include "replayssm/replayssm.h"

namespace replayssm {
namespace {

RecurrentShape to_shape(const replayssm_shape& shape) { return twin<RecurrentShape>(shape); }
RingConfig to_ring(const replayssm_ring_config& ring) { return twin<RingConfig>(ring); }
Cursor* to_cursors(replayssm_cursor* cursors) { return reinterpret_cast<Cursor*>(cursors); }

template <class Params>
Params to_slots(const replayssm_slots& slots) {
  Params p;
  p.shape = to_shape(slots.shape);
  p.batch = twin<SequenceBatch>(slots.batch);
  p.state = twin<RecurrentState>(slots.state);
  p.conv_inputs = slots.conv_inputs;
  p.channels = slots.channels;
  return p;
}

// Scratch memory of a call; grows to the largest that was needed.
void* workspace(replayssm_context& context, const RecurrentShape& shape, const RingConfig& ring) {
  check_params(shape, ring);
  const int64_t bytes = cpu::recurrent_workspace_bytes(shape, ring, context.pool.size());
  if (bytes > context.workspace.bytes()) {
    try {
      context.workspace = Buffer(bytes);
    } catch (const Error&) {
      throw std::bad_alloc();
    }
  }
  return context.workspace.as<void>();
}

}  // namespace
}  // namespace replayssm

using namespace replayssm;  // NOLINT: the C functions are a façade of it

replayssm_status replayssm_cpu_create(int32_t threads, replayssm_context** context) {
  if (context == nullptr) return REPLAYSSM_INVALID_ARGUMENT;
  *context = nullptr;
  if (threads < 0) return REPLAYSSM_INVALID_ARGUMENT;
  try {
    *context = new replayssm_context(threads);
    return REPLAYSSM_OK;
  } catch (...) {  // memory or threads
    return REPLAYSSM_OUT_OF_MEMORY;
  }
}

void replayssm_destroy(replayssm_context* context) { delete context; }

const char* replayssm_last_error(const replayssm_context* context) {
  return context == nullptr ? "context: expected one, got a null pointer" : context->error;
}

replayssm_status replayssm_reserve(replayssm_context* context, const replayssm_shape* shape,
                                   const replayssm_ring_config* ring) {
  return guarded(
      context, [&](auto& s, auto& r) { workspace(*context, to_shape(s), to_ring(r)); }, shape,
      ring);
}

const char* replayssm_version(void) { return REPLAYSSM_VERSION; }

int64_t replayssm_ring_rows(const replayssm_ring_config* ring) {
  return ring_rows(ring->buffer_len, ring->max_window);
}

int64_t replayssm_conv_rows(const replayssm_ring_config* ring) {
  return conv_rows(ring->conv_kernel, ring->max_window);
}

int64_t replayssm_dtype_bytes(replayssm_dtype dtype) { return dtype_bytes(DType{dtype}); }

int64_t replayssm_checkpoint_bytes(const replayssm_shape* shape, replayssm_dtype dtype) {
  return checkpoint_bytes(to_shape(*shape), DType{dtype});
}

int64_t replayssm_read_copy_bytes(const replayssm_shape* shape, replayssm_dtype dtype) {
  return read_copy_bytes(to_shape(*shape), DType{dtype});
}

int64_t replayssm_ring_row_bytes(const replayssm_shape* shape, replayssm_dtype activation_dtype) {
  return ring_row_bytes(to_shape(*shape), DType{activation_dtype});
}

int64_t replayssm_workspace_bytes(const replayssm_context* context, const replayssm_shape* shape,
                                  const replayssm_ring_config* ring) {
  return cpu::recurrent_workspace_bytes(to_shape(*shape), to_ring(*ring), context->pool.size());
}

void replayssm_reset_slots(int64_t sequences, const int32_t* slot,
                           const replayssm_ring_config* ring, replayssm_cursor* cursors) {
  reset_slots(sequences, slot, to_ring(*ring), to_cursors(cursors));
}

void replayssm_begin_steps(int64_t sequences, const int32_t* slot, const int32_t* query_start,
                           const replayssm_ring_config* ring, replayssm_cursor* cursors) {
  begin_steps(sequences, slot, query_start, to_ring(*ring), to_cursors(cursors));
}

void replayssm_commit_steps(int64_t sequences, const int32_t* slot, const int32_t* accepted,
                            replayssm_route route, replayssm_cursor* cursors) {
  commit_steps(sequences, slot, accepted, Route{route}, to_cursors(cursors));
}

void replayssm_commit_prefills(int64_t sequences, const int32_t* slot, const int32_t* query_start,
                               const replayssm_ring_config* ring, replayssm_cursor* cursors) {
  commit_prefills(sequences, slot, query_start, to_ring(*ring), to_cursors(cursors));
}

void replayssm_commit_folds(int64_t sequences, const int32_t* slot, const int32_t* target_slot,
                            replayssm_cursor* cursors) {
  commit_folds(sequences, slot, target_slot, to_cursors(cursors));
}

void replayssm_copy_cursors(int64_t sequences, const int32_t* slot, const int32_t* target_slot,
                            replayssm_cursor* cursors) {
  copy_cursors(sequences, slot, target_slot, to_cursors(cursors));
}

replayssm_status replayssm_causal_conv(replayssm_context* context,
                                       const replayssm_conv_params* params) {
  return guarded(
      context, [&](auto& c) { cpu::causal_conv(twin<ConvParams>(c), context->pool); }, params);
}

replayssm_status replayssm_mamba2_gates(replayssm_context* context,
                                        const replayssm_mamba2_gates_params* params) {
  return guarded(
      context, [&](auto& c) { cpu::mamba2_gates(twin<Mamba2GateParams>(c), context->pool); },
      params);
}

replayssm_status replayssm_delta_gates(replayssm_context* context,
                                       const replayssm_delta_gates_params* params) {
  return guarded(
      context, [&](auto& c) { cpu::delta_gates(twin<DeltaGateParams>(c), context->pool); }, params);
}

replayssm_status replayssm_recurrent_step(replayssm_context* context,
                                          const replayssm_step_params* params) {
  return guarded(
      context,
      [&](auto& c) {
        const auto p = twin<RecurrentStepParams>(c);
        cpu::recurrent_step(p, workspace(*context, p.shape, p.batch.ring), context->pool);
      },
      params);
}

replayssm_status replayssm_recurrent_prefill(replayssm_context* context,
                                             const replayssm_step_params* params) {
  return guarded(
      context,
      [&](auto& c) {
        const RecurrentPrefillParams p{twin<RecurrentStepParams>(c)};
        cpu::recurrent_prefill(p, workspace(*context, p.shape, p.batch.ring), context->pool);
      },
      params);
}

replayssm_status replayssm_recurrent_fold(replayssm_context* context,
                                          const replayssm_fold_params* params) {
  return guarded(
      context,
      [&](auto& c) {
        const auto p = twin<RecurrentFoldParams>(c);
        cpu::recurrent_fold(p, workspace(*context, p.shape, p.batch.ring), context->pool);
      },
      params);
}

replayssm_status replayssm_snapshot_step(replayssm_context* context,
                                         const replayssm_step_params* params, void* snapshots,
                                         const int32_t* source) {
  return guarded(
      context,
      [&](auto& c) {
        SnapshotStepParams p{twin<RecurrentStepParams>(c)};
        p.snapshots = snapshots;
        p.source = source;
        cpu::snapshot_step(p, workspace(*context, p.shape, p.batch.ring), context->pool);
      },
      params);
}

replayssm_status replayssm_slot_clear(replayssm_context* context, const replayssm_slots* slots) {
  return guarded(
      context, [&](auto& c) { cpu::slot_clear(to_slots<SlotClearParams>(c), context->pool); },
      slots);
}

replayssm_status replayssm_slot_copy(replayssm_context* context, const replayssm_slots* slots,
                                     const int32_t* target_slot) {
  return guarded(
      context,
      [&](auto& c) {
        auto p = to_slots<SlotCopyParams>(c);
        p.target_slot = target_slot;
        cpu::slot_copy(p, context->pool);
      },
      slots);
}

replayssm_status replayssm_compact(replayssm_context* context, const replayssm_slots* slots,
                                   const int32_t* path, const int32_t* accepted) {
  return guarded(
      context,
      [&](auto& c) {
        auto p = to_slots<CompactParams>(c);
        p.path = path;
        p.accepted = accepted;
        cpu::compact(p, context->pool);
      },
      slots);
}

replayssm_status replayssm_check_batch(replayssm_context* context, const replayssm_batch* batch,
                                       int64_t slots) {
  return guarded(
      context, [&](auto& c) { check_batch(twin<SequenceBatch>(c), slots, WindowUse::kDecode); },
      batch);
}
