/* The ops of the recurrence for C: what replayssm/ops.h is for C++, where every field is described.
 *
 * A struct of zeros is a good start for all of them: what is zero or null is absent. Functions that
 * return a status write nothing when they refuse an argument; replayssm_last_error then names it. A
 * context serves one caller at a time; several may exist. */
#ifndef REPLAYSSM_REPLAYSSM_H_
#define REPLAYSSM_REPLAYSSM_H_

#include <stdint.h>

#if defined(_WIN32)
#define REPLAYSSM_API
#else
#define REPLAYSSM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t replayssm_status;
enum {
  REPLAYSSM_OK = 0,
  REPLAYSSM_INVALID_ARGUMENT = 1,
  REPLAYSSM_OUT_OF_MEMORY = 2,
  REPLAYSSM_INTERNAL_ERROR = 3
};

typedef uint8_t replayssm_dtype;
enum {
  REPLAYSSM_FLOAT32 = 0,
  REPLAYSSM_FLOAT16 = 1,
  REPLAYSSM_BFLOAT16 = 2,
  REPLAYSSM_FLOAT8_E4M3 = 3,
  REPLAYSSM_INT8 = 4
};

typedef uint8_t replayssm_family;
enum { REPLAYSSM_MAMBA2 = 0, REPLAYSSM_GATED_DELTA = 1, REPLAYSSM_KIMI_DELTA = 2 };

typedef uint8_t replayssm_route;
enum { REPLAYSSM_CONVENTIONAL = 0, REPLAYSSM_STATE_AND_OUTPUT = 1, REPLAYSSM_OUTPUT_ONLY = 2 };

typedef struct replayssm_ring_config {
  int32_t buffer_len;  /* most history rows of a ring, >= 1 */
  int32_t max_window;  /* most tokens of a decode step, >= 1 */
  int32_t conv_kernel; /* taps of the convolution in front, >= 1 */
} replayssm_ring_config;

typedef struct replayssm_cursor {
  int64_t ring_start;
  int32_t ring_count;
  int32_t ring_limit;
  int32_t fold_count;
} replayssm_cursor;

typedef struct replayssm_shape {
  replayssm_family family;
  int64_t heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t state_dim;
} replayssm_shape;

typedef struct replayssm_read_copy {
  void* data;   /* [slots, heads, head_dim, state_dim], null: there is none */
  float* scale; /* [slots, heads, head_dim] for 8-bit types */
  replayssm_dtype dtype;
} replayssm_read_copy;

typedef struct replayssm_state {
  void* checkpoint; /* [slots, heads, head_dim, state_dim] checkpoint_dtype */
  void* ring_v;     /* [slots, rows, heads, head_dim] activation_dtype */
  void* ring_k;     /* [slots, rows, key_heads, state_dim] activation_dtype */
  float* ring_b;    /* [slots, rows, heads] */
  float* ring_g;    /* [slots, rows, heads], not Kimi Delta */
  void* ring_gate;  /* [slots, rows, heads, state_dim] activation_dtype, Kimi Delta */
  replayssm_dtype checkpoint_dtype;
  replayssm_dtype activation_dtype;
  replayssm_read_copy read_copy;
} replayssm_state;

typedef struct replayssm_rounding {
  const uint64_t* seed; /* [slots], null: round to nearest */
  uint32_t stream;
} replayssm_rounding;

typedef struct replayssm_channel_gate {
  const float* scale; /* [heads] */
  const float* bias;  /* [heads, state_dim] */
  float lower_bound;
} replayssm_channel_gate;

typedef struct replayssm_batch {
  int64_t sequences;
  const int32_t* query_start;      /* [sequences + 1] */
  const int32_t* slot;             /* [sequences], -1 = padding */
  const replayssm_cursor* cursors; /* [slots] */
  replayssm_ring_config ring;
  const int32_t* parent; /* [tokens], null: chains */
  void*
      plan; /* [sequences] of 32 bytes, of a device: begin_steps writes, steps read; may be null */
} replayssm_batch;

/* Of a decode step and of a prefill. */
typedef struct replayssm_step_params {
  replayssm_shape shape;
  replayssm_route route;
  replayssm_batch batch;
  replayssm_state state;
  const void* v; /* [tokens, heads, head_dim] */
  const void* k; /* [tokens, key_heads, state_dim] */
  const void* q; /* [tokens, key_heads, state_dim] */
  int64_t v_stride;
  int64_t k_stride;
  int64_t q_stride;
  const float* b;   /* [tokens, heads] */
  const float* g;   /* [tokens, heads], not Kimi Delta */
  const void* gate; /* [tokens, heads, state_dim], Kimi Delta */
  int64_t gate_stride;
  replayssm_channel_gate channel_gate;
  const float* skip; /* [heads], may be null */
  const void* z;     /* [tokens, heads, head_dim], may be null */
  int64_t z_stride;
  replayssm_rounding rounding;
  void* o; /* [tokens, heads, head_dim] */
  replayssm_dtype o_dtype;
} replayssm_step_params;

typedef struct replayssm_fold_params {
  replayssm_shape shape;
  replayssm_batch batch;
  replayssm_state state;
  replayssm_channel_gate channel_gate;
  replayssm_rounding rounding;
  const int32_t* target_slot; /* [sequences], null: in place */
} replayssm_fold_params;

/* What slot_clear, slot_copy and compact work on; conv_inputs may be null. */
typedef struct replayssm_slots {
  replayssm_shape shape;
  replayssm_batch batch;
  replayssm_state state;
  void* conv_inputs; /* [slots, conv_rows, channels] activation_dtype */
  int64_t channels;
} replayssm_slots;

typedef struct replayssm_conv_params {
  replayssm_batch batch;
  int64_t channels;
  replayssm_dtype activation_dtype;
  replayssm_dtype x_dtype; /* float32 or activation_dtype */
  const void* x;           /* [tokens, channels] x_dtype */
  int64_t x_stride;
  const float* weight; /* [conv_kernel, channels] */
  const float* bias;   /* [channels], may be null */
  void* inputs;        /* [slots, conv_rows, channels] activation_dtype */
  void* y;             /* [tokens, channels] activation_dtype */
} replayssm_conv_params;

/* Mamba-2: b = clamp(softplus(dt + dt_bias), dt_min, dt_max), g = b a. */
typedef struct replayssm_mamba2_gates_params {
  const float* dt; /* [tokens, heads], tokens dt_stride apart */
  int64_t dt_stride;
  const float* dt_bias; /* [heads] */
  const float* a;       /* [heads] -exp(A_log) */
  float dt_min;
  float dt_max;
  int64_t tokens;
  int64_t heads;
  float* b; /* [tokens, heads] */
  float* g; /* [tokens, heads] */
} replayssm_mamba2_gates_params;

/* The delta rules: b = sigmoid(beta), g = a softplus(alpha + dt_bias). */
typedef struct replayssm_delta_gates_params {
  const float* beta;  /* [tokens, heads], tokens `stride` apart */
  const float* alpha; /* the same; may be null, then g is not computed (Kimi Delta) */
  int64_t stride;
  const float* dt_bias; /* [heads] */
  const float* a;       /* [heads] -exp(A_log) */
  int64_t tokens;
  int64_t heads;
  float* b; /* [tokens, heads] */
  float* g; /* [tokens, heads] */
} replayssm_delta_gates_params;

/* --- Context: threads and scratch memory. ------------------------------------------------------
 */

typedef struct replayssm_context replayssm_context;

/* threads counts the caller; 0 = one per available core. */
REPLAYSSM_API replayssm_status replayssm_cpu_create(int32_t threads, replayssm_context** context);
REPLAYSSM_API void replayssm_destroy(replayssm_context* context);
/* One line on the last failure of this context; "" where there was none. */
REPLAYSSM_API const char* replayssm_last_error(const replayssm_context* context);
/* Allocates the scratch memory of such calls now, so that none of them has to. */
REPLAYSSM_API replayssm_status replayssm_reserve(replayssm_context* context,
                                                 const replayssm_shape* shape,
                                                 const replayssm_ring_config* ring);
REPLAYSSM_API const char* replayssm_version(void);

/* --- Sizes. ------------------------------------------------------------------------------------
 */

REPLAYSSM_API int64_t replayssm_ring_rows(const replayssm_ring_config* ring);
REPLAYSSM_API int64_t replayssm_conv_rows(const replayssm_ring_config* ring);
REPLAYSSM_API int64_t replayssm_dtype_bytes(replayssm_dtype dtype);
/* Of one slot. */
REPLAYSSM_API int64_t replayssm_checkpoint_bytes(const replayssm_shape* shape,
                                                 replayssm_dtype dtype);
REPLAYSSM_API int64_t replayssm_read_copy_bytes(const replayssm_shape* shape,
                                                replayssm_dtype dtype);
/* Of one token in a slot's ring. */
REPLAYSSM_API int64_t replayssm_ring_row_bytes(const replayssm_shape* shape,
                                               replayssm_dtype activation_dtype);
/* Of the scratch memory that replayssm_reserve allocates. */
REPLAYSSM_API int64_t replayssm_workspace_bytes(const replayssm_context* context,
                                                const replayssm_shape* shape,
                                                const replayssm_ring_config* ring);

/* --- Cursors of a batch: arrays as in replayssm_batch, cursors changed in place. ----------------
 */

REPLAYSSM_API void replayssm_reset_slots(int64_t sequences, const int32_t* slot,
                                         const replayssm_ring_config* ring,
                                         replayssm_cursor* cursors);
REPLAYSSM_API void replayssm_begin_steps(int64_t sequences, const int32_t* slot,
                                         const int32_t* query_start,
                                         const replayssm_ring_config* ring,
                                         replayssm_cursor* cursors);
REPLAYSSM_API void replayssm_commit_steps(int64_t sequences, const int32_t* slot,
                                          const int32_t* accepted, replayssm_route route,
                                          replayssm_cursor* cursors);
REPLAYSSM_API void replayssm_commit_prefills(int64_t sequences, const int32_t* slot,
                                             const int32_t* query_start,
                                             const replayssm_ring_config* ring,
                                             replayssm_cursor* cursors);
/* target_slot: null after a fold in place. */
REPLAYSSM_API void replayssm_commit_folds(int64_t sequences, const int32_t* slot,
                                          const int32_t* target_slot, replayssm_cursor* cursors);
REPLAYSSM_API void replayssm_copy_cursors(int64_t sequences, const int32_t* slot,
                                          const int32_t* target_slot, replayssm_cursor* cursors);

/* --- Ops. --------------------------------------------------------------------------------------
 */

REPLAYSSM_API replayssm_status replayssm_causal_conv(replayssm_context* context,
                                                     const replayssm_conv_params* params);
REPLAYSSM_API replayssm_status replayssm_mamba2_gates(replayssm_context* context,
                                                      const replayssm_mamba2_gates_params* params);
REPLAYSSM_API replayssm_status replayssm_delta_gates(replayssm_context* context,
                                                     const replayssm_delta_gates_params* params);
REPLAYSSM_API replayssm_status replayssm_recurrent_step(replayssm_context* context,
                                                        const replayssm_step_params* params);
/* The rings of the batch must be empty; route is not read. */
REPLAYSSM_API replayssm_status replayssm_recurrent_prefill(replayssm_context* context,
                                                           const replayssm_step_params* params);
REPLAYSSM_API replayssm_status replayssm_recurrent_fold(replayssm_context* context,
                                                        const replayssm_fold_params* params);
/* snapshots: [slots, max_window, heads, head_dim, state_dim]; source: [sequences]. */
REPLAYSSM_API replayssm_status replayssm_snapshot_step(replayssm_context* context,
                                                       const replayssm_step_params* params,
                                                       void* snapshots, const int32_t* source);
REPLAYSSM_API replayssm_status replayssm_slot_clear(replayssm_context* context,
                                                    const replayssm_slots* slots);
REPLAYSSM_API replayssm_status replayssm_slot_copy(replayssm_context* context,
                                                   const replayssm_slots* slots,
                                                   const int32_t* target_slot);
/* path: [tokens]; accepted: [sequences]. */
REPLAYSSM_API replayssm_status replayssm_compact(replayssm_context* context,
                                                 const replayssm_slots* slots, const int32_t* path,
                                                 const int32_t* accepted);

/* For debugging, before a step and after its begin: finds slots out of range or twice in a batch,
 * windows that do not ascend or are too long, cursors out of range, parents behind their token. */
REPLAYSSM_API replayssm_status replayssm_check_batch(replayssm_context* context,
                                                     const replayssm_batch* batch, int64_t slots);

#ifdef __cplusplus
}
#endif

#endif /* REPLAYSSM_REPLAYSSM_H_ */
