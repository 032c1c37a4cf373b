// Everything that an attention kernel is given.
#pragma once

#include "ops/cuda/attention_plan.h"
#include "ops/cuda/fast_divide.h"

namespace replayssm::cuda {

struct AttentionCall {
  AttentionParams p;
  AttentionCut cut;
  FastDivide block_size, kv_heads, group;
  const AttentionPlan* plan = nullptr;
  // What ranges leave where a sequence has several: the sums of weighted values, not divided yet,
  // and per row the largest score, a power of two, and the sum of weights.
  float* partial = nullptr;       // [sequences, kv_heads, splits, part_rows, head_dim]
  float2* partial_sum = nullptr;  // [sequences, kv_heads, splits, part_rows]
  int part_rows = 0;
};

}  // namespace replayssm::cuda
