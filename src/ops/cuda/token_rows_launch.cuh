// How the rows of a batch are cut into blocks that take token after token.
#pragma once

#include <cmath>

#include "core/check.h"
#include "ops/cuda/token_rows.cuh"

namespace replayssm::cuda {

// Launches kernel(p, TokenLaunch), whose blocks stage up to `most_tokens` at once. `launch` comes
// with what only steps have.
template <class Rows, class Params>
void launch_token_rows(const char* what, void (*kernel)(Params, TokenLaunch), const Params& p,
                       int most_tokens, cudaStream_t stream, TokenLaunch launch = {}) {
  int warps = kTokenWarps;
  while (warps > 1 && p.shape.head_dim % (warps * Rows::kWarpRows) != 0) warps /= 2;
  // Two passes have more of the state on its way, one gives more blocks.
  const int64_t pass_rows = warps * Rows::kWarpRows;
  const int64_t all_rows = p.batch.sequences * p.shape.heads * p.shape.head_dim;
  const bool two = Rows::kFetches && most_tokens <= kTokensAtOnce &&
                   p.shape.head_dim % (2 * pass_rows) == 0 &&
                   all_rows / (2 * pass_rows) >= 8 * multiprocessors(what);
  const int rows = static_cast<int>(pass_rows) * (two ? 2 : 1);
  const int64_t slices = (p.shape.head_dim + rows - 1) / rows;
  launch.layout =
      token_layout(Rows::kChannels, Rows::kColumns, rows, rows * Rows::kFetchedFloats, most_tokens);
  launch.layout.passes = two ? 2 : 1;
  launch.heads = static_cast<int>(p.shape.heads);
  launch.key_heads = static_cast<int>(p.shape.key_heads);
  launch.head_dim = static_cast<int>(p.shape.head_dim);
  launch.state_dim = static_cast<int>(p.shape.state_dim);
  launch.query_scale = 1.0f / std::sqrt(static_cast<float>(p.shape.state_dim));
  launch.group = FastDivide(static_cast<uint32_t>(p.shape.heads / p.shape.key_heads));
  launch.slices = FastDivide(static_cast<uint32_t>(slices));
  const int bytes = launch.layout.total * int(sizeof(float));
  reserve_shared(what, kernel, bytes);
  launch_dependent(
      what, kernel,
      dim3(static_cast<unsigned>(p.shape.heads * slices), static_cast<unsigned>(p.batch.sequences)),
      32 * warps, bytes, stream, p, launch);
}

// Calls fn<State, kState, kWhole>() for checkpoint type and state_dim. aligned: rows start at
// multiples of 16 bytes.
template <class Fn>
void dispatch_token_rows(const RecurrentStepParams& p, bool aligned, Fn&& fn) {
  const auto dispatch = [&]<class State>() {
    const int64_t dim = p.shape.state_dim;
    if (aligned && dim == 64) return fn.template operator()<State, 64, true>();
    if (aligned && dim == 128) return fn.template operator()<State, 128, true>();
    if (aligned && dim == 256) return fn.template operator()<State, 256, true>();
    if (dim <= 256) return fn.template operator()<State, 256, false>();
    fn.template operator()<State, kMaxStateDim, false>();
  };
  switch (p.state.checkpoint_dtype) {
    case DType::kBFloat16: return dispatch.template operator()<Bf16>();
    case DType::kFloat16: return dispatch.template operator()<Fp16>();
    default: return dispatch.template operator()<float>();
  }
}

}  // namespace replayssm::cuda
