// The C interface's structs lie in memory as those of the C++ interface: fields have the same
// places and sizes, enumerators the same values.
#pragma once

#include <cstddef>

#include "ops/cpu/recurrent.h"
#include "replayssm/ops.h"
#include "replayssm/replayssm.h"

namespace replayssm {

static_assert(REPLAYSSM_INT8 == static_cast<int>(DType::kInt8));
static_assert(REPLAYSSM_FLOAT8_E4M3 == static_cast<int>(DType::kFloat8E4M3));
static_assert(REPLAYSSM_BFLOAT16 == static_cast<int>(DType::kBFloat16));
static_assert(REPLAYSSM_FLOAT16 == static_cast<int>(DType::kFloat16));
static_assert(REPLAYSSM_FLOAT32 == static_cast<int>(DType::kFloat32));
static_assert(REPLAYSSM_MAMBA2 == static_cast<int>(Family::kMamba2));
static_assert(REPLAYSSM_GATED_DELTA == static_cast<int>(Family::kGatedDelta));
static_assert(REPLAYSSM_KIMI_DELTA == static_cast<int>(Family::kKimiDelta));
static_assert(REPLAYSSM_CONVENTIONAL == static_cast<int>(Route::kConventional));
static_assert(REPLAYSSM_STATE_AND_OUTPUT == static_cast<int>(Route::kStateAndOutput));
static_assert(REPLAYSSM_OUTPUT_ONLY == static_cast<int>(Route::kOutputOnly));

#define REPLAYSSM_SAME_FIELD(c_struct, cc_struct, field)                   \
  static_assert(offsetof(c_struct, field) == offsetof(cc_struct, field) && \
                sizeof(c_struct::field) == sizeof(cc_struct::field))
// NOLINTBEGIN(bugprone-sizeof-expression): the sizes of pointers are meant
REPLAYSSM_SAME_FIELD(replayssm_cursor, Cursor, ring_start);
REPLAYSSM_SAME_FIELD(replayssm_cursor, Cursor, ring_count);
REPLAYSSM_SAME_FIELD(replayssm_cursor, Cursor, ring_limit);
REPLAYSSM_SAME_FIELD(replayssm_cursor, Cursor, fold_count);
REPLAYSSM_SAME_FIELD(replayssm_ring_config, RingConfig, buffer_len);
REPLAYSSM_SAME_FIELD(replayssm_ring_config, RingConfig, max_window);
REPLAYSSM_SAME_FIELD(replayssm_ring_config, RingConfig, conv_kernel);
REPLAYSSM_SAME_FIELD(replayssm_shape, RecurrentShape, family);
REPLAYSSM_SAME_FIELD(replayssm_shape, RecurrentShape, heads);
REPLAYSSM_SAME_FIELD(replayssm_shape, RecurrentShape, key_heads);
REPLAYSSM_SAME_FIELD(replayssm_shape, RecurrentShape, head_dim);
REPLAYSSM_SAME_FIELD(replayssm_shape, RecurrentShape, state_dim);
REPLAYSSM_SAME_FIELD(replayssm_read_copy, ReadCopy, data);
REPLAYSSM_SAME_FIELD(replayssm_read_copy, ReadCopy, scale);
REPLAYSSM_SAME_FIELD(replayssm_read_copy, ReadCopy, dtype);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, checkpoint);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, ring_v);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, ring_k);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, ring_b);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, ring_g);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, ring_gate);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, checkpoint_dtype);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, activation_dtype);
REPLAYSSM_SAME_FIELD(replayssm_state, RecurrentState, read_copy);
REPLAYSSM_SAME_FIELD(replayssm_rounding, StochasticRounding, seed);
REPLAYSSM_SAME_FIELD(replayssm_rounding, StochasticRounding, stream);
REPLAYSSM_SAME_FIELD(replayssm_channel_gate, ChannelGate, scale);
REPLAYSSM_SAME_FIELD(replayssm_channel_gate, ChannelGate, bias);
REPLAYSSM_SAME_FIELD(replayssm_channel_gate, ChannelGate, lower_bound);
REPLAYSSM_SAME_FIELD(replayssm_batch, SequenceBatch, sequences);
REPLAYSSM_SAME_FIELD(replayssm_batch, SequenceBatch, query_start);
REPLAYSSM_SAME_FIELD(replayssm_batch, SequenceBatch, slot);
REPLAYSSM_SAME_FIELD(replayssm_batch, SequenceBatch, cursors);
REPLAYSSM_SAME_FIELD(replayssm_batch, SequenceBatch, ring);
REPLAYSSM_SAME_FIELD(replayssm_batch, SequenceBatch, parent);
REPLAYSSM_SAME_FIELD(replayssm_batch, SequenceBatch, plan);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, shape);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, route);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, batch);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, state);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, v);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, k);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, q);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, v_stride);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, k_stride);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, q_stride);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, b);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, g);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, gate);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, gate_stride);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, channel_gate);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, skip);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, z);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, z_stride);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, rounding);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, o);
REPLAYSSM_SAME_FIELD(replayssm_step_params, RecurrentStepParams, o_dtype);
REPLAYSSM_SAME_FIELD(replayssm_fold_params, RecurrentFoldParams, shape);
REPLAYSSM_SAME_FIELD(replayssm_fold_params, RecurrentFoldParams, batch);
REPLAYSSM_SAME_FIELD(replayssm_fold_params, RecurrentFoldParams, state);
REPLAYSSM_SAME_FIELD(replayssm_fold_params, RecurrentFoldParams, channel_gate);
REPLAYSSM_SAME_FIELD(replayssm_fold_params, RecurrentFoldParams, rounding);
REPLAYSSM_SAME_FIELD(replayssm_fold_params, RecurrentFoldParams, target_slot);
REPLAYSSM_SAME_FIELD(replayssm_slots, SlotClearParams, shape);
REPLAYSSM_SAME_FIELD(replayssm_slots, SlotClearParams, batch);
REPLAYSSM_SAME_FIELD(replayssm_slots, SlotClearParams, state);
REPLAYSSM_SAME_FIELD(replayssm_slots, SlotClearParams, conv_inputs);
REPLAYSSM_SAME_FIELD(replayssm_slots, SlotClearParams, channels);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, batch);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, channels);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, activation_dtype);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, x_dtype);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, x);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, x_stride);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, weight);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, bias);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, inputs);
REPLAYSSM_SAME_FIELD(replayssm_conv_params, ConvParams, y);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, dt);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, dt_stride);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, dt_bias);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, a);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, dt_min);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, dt_max);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, tokens);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, heads);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, b);
REPLAYSSM_SAME_FIELD(replayssm_mamba2_gates_params, Mamba2GateParams, g);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, beta);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, alpha);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, stride);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, dt_bias);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, a);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, tokens);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, heads);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, b);
REPLAYSSM_SAME_FIELD(replayssm_delta_gates_params, DeltaGateParams, g);
// NOLINTEND(bugprone-sizeof-expression)
#undef REPLAYSSM_SAME_FIELD

}  // namespace replayssm
