/* Decodes two sequences through one gated-delta layer: a prompt, then one token at a time.
 *
 *   cc -std=c99 decode.c -lreplayssm -lm
 *
 * The state is kept twice, once as checkpoint and ring (replay), once updated at every token
 * (conventional); both give the same outputs. A model does this for every layer between one begin
 * and one commit. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "replayssm/replayssm.h"

enum { kHeads = 4, kKeyHeads = 2, kHeadDim = 64, kStateDim = 64, kSequences = 2 };
enum { kPrompt = 5, kSteps = 40, kMostTokens = kSequences * kPrompt };

static const replayssm_shape kShape = {REPLAYSSM_GATED_DELTA, kHeads, kKeyHeads, kHeadDim,
                                       kStateDim};
static const replayssm_ring_config kRing = {16, 1, 4};

/* What a pool keeps for one layer. */
typedef struct layer {
  replayssm_state state;
  replayssm_cursor cursors[kSequences];
} layer;

static void* zeros(int64_t bytes) {
  void* memory = calloc(1, (size_t)bytes);
  if (memory == NULL) exit(EXIT_FAILURE);
  return memory;
}

static void check(replayssm_context* context, replayssm_status status) {
  if (status == REPLAYSSM_OK) return;
  fprintf(stderr, "replayssm: %s\n", replayssm_last_error(context));
  exit(EXIT_FAILURE);
}

static layer make_layer(const int32_t* slot) {
  const int64_t rows = kSequences * replayssm_ring_rows(&kRing);
  layer made = {0};
  made.state.checkpoint =
      zeros(kSequences * replayssm_checkpoint_bytes(&kShape, REPLAYSSM_FLOAT32));
  made.state.ring_v = zeros(rows * kHeads * kHeadDim * (int64_t)sizeof(float));
  made.state.ring_k = zeros(rows * kKeyHeads * kStateDim * (int64_t)sizeof(float));
  made.state.ring_b = zeros(rows * kHeads * (int64_t)sizeof(float));
  made.state.ring_g = zeros(rows * kHeads * (int64_t)sizeof(float));
  replayssm_reset_slots(kSequences, slot, &kRing, made.cursors);
  return made;
}

static void free_layer(layer* used) {
  free(used->state.checkpoint);
  free(used->state.ring_v);
  free(used->state.ring_k);
  free(used->state.ring_b);
  free(used->state.ring_g);
}

/* One call's tokens, as the layers in front of the recurrence would leave them. */
static float v[kMostTokens * kHeads * kHeadDim], k[kMostTokens * kKeyHeads * kStateDim];
static float q[kMostTokens * kKeyHeads * kStateDim], beta[kMostTokens * kHeads];
static float b[kMostTokens * kHeads], g[kMostTokens * kHeads];

static void make_values(float* values, int count, int seed) {
  for (int i = 0; i < count; ++i) values[i] = (float)sin(1.7 * i + 0.9 * seed);
}

static void make_tokens(replayssm_context* context, int tokens, int step) {
  static const float dt_bias[kHeads] = {0}, a[kHeads] = {-0.1f, -0.2f, -0.3f, -0.4f};
  make_values(v, tokens * kHeads * kHeadDim, 4 * step);
  make_values(k, tokens * kKeyHeads * kStateDim, 4 * step + 1);
  make_values(q, tokens * kKeyHeads * kStateDim, 4 * step + 2);
  make_values(beta, tokens * kHeads, 4 * step + 3);
  replayssm_delta_gates_params gates = {0};
  gates.beta = gates.alpha = beta;
  gates.stride = kHeads;
  gates.dt_bias = dt_bias;
  gates.a = a;
  gates.tokens = tokens;
  gates.heads = kHeads;
  gates.b = b;
  gates.g = g;
  check(context, replayssm_delta_gates(context, &gates));
}

/* Runs the prompt, or one token of every sequence, through a layer. */
static void run(replayssm_context* context, layer* used, replayssm_route route, int prompt,
                const int32_t* slot, float* o) {
  static const int32_t prompt_start[] = {0, kPrompt, 2 * kPrompt}, step_start[] = {0, 1, 2};
  static const int32_t one_each[kSequences] = {1, 1};
  replayssm_step_params p = {0};
  p.shape = kShape;
  p.route = route;
  p.batch.sequences = kSequences;
  p.batch.query_start = prompt ? prompt_start : step_start;
  p.batch.slot = slot;
  p.batch.cursors = used->cursors;
  p.batch.ring = kRing;
  p.state = used->state;
  p.v = v;
  p.k = k;
  p.q = q;
  p.v_stride = kHeads * kHeadDim;
  p.k_stride = p.q_stride = kKeyHeads * kStateDim;
  p.b = b;
  p.g = g;
  p.o = o;
  if (prompt) {
    check(context, replayssm_recurrent_prefill(context, &p));
    replayssm_commit_prefills(kSequences, slot, prompt_start, &kRing, used->cursors);
  } else {
    replayssm_begin_steps(kSequences, slot, step_start, &kRing, used->cursors);
    check(context, replayssm_check_batch(context, &p.batch, kSequences));
    check(context, replayssm_recurrent_step(context, &p));
    replayssm_commit_steps(kSequences, slot, one_each, route, used->cursors);
  }
}

int main(void) {
  static float o[2][kMostTokens * kHeads * kHeadDim];
  const int32_t slot[kSequences] = {0, 1};
  const replayssm_route routes[2] = {REPLAYSSM_OUTPUT_ONLY, REPLAYSSM_CONVENTIONAL};
  replayssm_context* context = NULL;
  if (replayssm_cpu_create(0, &context) != REPLAYSSM_OK) return EXIT_FAILURE;
  layer layers[2] = {make_layer(slot), make_layer(slot)};

  double difference = 0;
  for (int step = 0; step <= kSteps; ++step) {
    const int prompt = step == 0, tokens = prompt ? kMostTokens : kSequences;
    make_tokens(context, tokens, step);
    for (int i = 0; i < 2; ++i) run(context, &layers[i], routes[i], prompt, slot, o[i]);
    for (int i = 0; i < tokens * kHeads * kHeadDim; ++i)
      difference = fmax(difference, fabs((double)o[0][i] - o[1][i]));
  }
  printf("%d tokens of %d sequences: outputs differ by at most %.1e\n", kPrompt + kSteps,
         kSequences, difference);
  free_layer(&layers[0]);
  free_layer(&layers[1]);
  replayssm_destroy(context);
  return difference < 1e-5 ? EXIT_SUCCESS : EXIT_FAILURE;
}
