/* Decode steps over caches that another engine owns, for C: the layouts, contents and cursor rules
 * of the published ReplaySSM decode functions (docs/python.md), on the CPU or on a CUDA device.
 *
 * A sequence keeps a state in a slot, and rows of inputs in three caches of that slot: what Mamba-2
 * reads back are its x, B and time steps; what Gated Delta reads back are corrected values d,
 * normalised keys and log decays. The engine moves the cursors. */
#ifndef REPLAYSSM_PAGED_H_
#define REPLAYSSM_PAGED_H_

#include "replayssm/replayssm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Floating-point values: float32, float16 or bfloat16. Strides are in elements, the last dimension
 * that is named has none and is contiguous. data may be null where the comment says so. */
typedef struct replayssm_values {
  void* data;
  int64_t stride[3];
  replayssm_dtype dtype;
} replayssm_values;

/* Integers of 1, 4 or 8 bytes, `stride` elements apart. */
typedef struct replayssm_integers {
  const void* data;
  int64_t stride;
  int32_t bytes;
} replayssm_integers;

typedef uint8_t replayssm_paged_rule;
enum {
  /* Windows of one token. write_pos and is_flush go by row of the batch. A row that flushes folds
   * its cached rows and its own token, and caches nothing. Time steps are cached as they are
   * used. */
  REPLAYSSM_PAGED_SINGLE = 0,
  /* Packed windows. write_pos, origin and is_flush go by slot; rows lie in a ring of a power of
   * two. A row that flushes folds its cached rows; every row caches its window. Time steps are
   * cached as they came. */
  REPLAYSSM_PAGED_WINDOW = 1
};

typedef uint8_t replayssm_paged_part;
enum {
  REPLAYSSM_PAGED_ALL = 0,
  REPLAYSSM_PAGED_READS = 1,  /* rows that do not flush, and padding */
  REPLAYSSM_PAGED_FLUSHES = 2 /* rows that do */
};

typedef struct replayssm_paged_step {
  replayssm_family family; /* Mamba-2 or Gated Delta */
  replayssm_paged_rule rule;
  replayssm_paged_part part;
  uint8_t softplus;  /* of Mamba-2's time step */
  uint8_t normalise; /* Gated Delta: k and q are divided by their L2 norm */
  int64_t sequences;
  int64_t heads;
  int64_t key_heads;
  int64_t head_dim;
  int64_t state_dim;
  int64_t ring;       /* rows of a cache */
  int64_t max_window; /* most tokens of a window */
  int64_t null_slot;  /* a row of it is padding, as is one of a negative slot */
  float scale;        /* of q, Gated Delta */

  replayssm_integers slot;        /* [sequences]; null: row i has slot i */
  replayssm_integers query_start; /* [sequences + 1]; null: one token each */
  replayssm_integers write_pos;   /* rows cached */
  replayssm_integers origin;      /* place of the oldest row in the ring; null: 0 */
  replayssm_integers is_flush;    /* null: write_pos == ring - 1 */

  replayssm_values state;   /* [slots, heads, head_dim, state_dim] */
  replayssm_values v;       /* [tokens, heads, head_dim] */
  replayssm_values k;       /* [tokens, key_heads, state_dim] */
  replayssm_values q;       /* [tokens, key_heads, state_dim] */
  replayssm_values dt;      /* [tokens, heads] time step; Gated Delta: a */
  replayssm_values beta;    /* [tokens, heads] Gated Delta: b; else null */
  replayssm_values a;       /* [heads] A; Gated Delta: A_log */
  replayssm_values dt_bias; /* [heads], may be null */
  replayssm_values skip;    /* [heads, head_dim] D, both strides given; may be null */
  replayssm_values z;       /* [tokens, heads, head_dim], may be null */
  replayssm_values out;     /* [tokens, heads, head_dim] */
  replayssm_values cache_v; /* [slots, heads, ring, head_dim] */
  replayssm_values cache_k; /* [slots, key_heads, ring, state_dim] */
  replayssm_values cache_g; /* [slots, heads, ring] float32, three strides: time steps or decays */
} replayssm_paged_step;

/* What moves the cursors of replayssm_paged_step's windows: the arrays go by slot. */
typedef struct replayssm_paged_cursors {
  int64_t sequences;
  replayssm_integers slot; /* [sequences] */
  int64_t null_slot;
  int32_t* write_pos;
  int32_t* origin;
  int8_t* is_flush;
  int64_t write_pos_stride;
  int64_t origin_stride;
  int64_t is_flush_stride;
  int32_t threshold;  /* a row flushes where the window after next might exceed it */
  int32_t max_window; /* most tokens of a window */
  int32_t ring;       /* rows of a cache, a power of two */
} replayssm_paged_cursors;

REPLAYSSM_API replayssm_status replayssm_paged_step_run(replayssm_context* context,
                                                        const replayssm_paged_step* step);
/* accepted: [sequences]. */
REPLAYSSM_API replayssm_status replayssm_paged_commit(replayssm_context* context,
                                                      const replayssm_paged_cursors* cursors,
                                                      const replayssm_integers* accepted);
/* Rows with first[s] != 0 start anew. */
REPLAYSSM_API replayssm_status replayssm_paged_reset(replayssm_context* context,
                                                     const replayssm_paged_cursors* cursors,
                                                     const replayssm_integers* first);

#ifdef __cplusplus
}
#endif

#endif /* REPLAYSSM_PAGED_H_ */
