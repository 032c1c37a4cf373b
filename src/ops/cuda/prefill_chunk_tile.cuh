// What a block that takes prompts in chunks of matrix products has in shared memory.
#pragma once

#include "ops/cuda/elements.cuh"
#include "replayssm/ops.h"

namespace replayssm::cuda {

// For 16 rows of the state a warp.
template <Family kFamily, int kWarpCount>
struct ChunkTile {
  // Decays of columns: queries and keys enter products with them, in two parts, the state moves on
  // after every 16 tokens, and as many warps as have the state prepare the next chunk.
  static constexpr bool kChannels = kFamily == Family::kKimiDelta;
  static constexpr int kWarps = kWarpCount, kThreads = 32 * kWarps,
                       kBlockThreads = (kChannels ? 2 : 1) * kThreads;
  static constexpr int kTokens = kChannels ? 32 : 64, kTokenTiles = kTokens / 16;
  static constexpr int kSpanTiles = kChannels ? 1 : kTokenTiles;  // from state to state
  static constexpr int kState = 128, kDim = 16 * kWarps;
  static constexpr int kMatrices = is_delta(kFamily) ? 2 : 1;  // of weights among tokens
  static constexpr int kOfQueries = 0, kOfKeys = 1;
  static constexpr int kLowerTiles = kTokenTiles * (kTokenTiles + 1) / 2;  // of such a matrix
  // Rows of eight lanes meet no bank twice.
  static constexpr int kKeyStride = kState + 8, kValueStride = kDim + 8,
                       kWeightStride = 16 * kSpanTiles + 8;

  // Shared memory, in 16-bit elements: stages of queries, keys, values.
  static constexpr int kKeys = kTokens * kKeyStride, kValues = 2 * kKeys,
                       kStage = kValues + kTokens * kValueStride, kStages = kChannels ? 3 : 2;
  // What a chunk's tokens are prepared to: parts of weights; with decays of columns the second
  // parts of queries and keys, both parts of keys as they are written, products of decays (floats).
  static constexpr int kPart = kTokens * kWeightStride, kMatrix = 2 * kPart,
                       kRest = kMatrices * kMatrix, kWritten = kRest + 2 * kKeys,
                       kProducts = kWritten + 2 * kKeys,
                       kPrepared = kChannels ? kProducts + 2 * kTokenTiles * kState : kRest,
                       kPreparedChunks = kChannels ? 2 : 1;
  // Decays of columns of the chunk that is prepared, floats.
  static constexpr int kChannelDecays = kStages * kStage + kPreparedChunks * kPrepared,
                       kEnd = kChannelDecays + (kChannels ? 2 * kTokens * kState : 0);
  // Then two of these, of one chunk and the next. Decays of columns are elsewhere: logs are zero.
  struct Decays {
    double log[kTokens];      // L
    float strength[kTokens];  // b
    float start[kTokens];     // e^L
    float end[kTokens];       // e^{D_n} b
    float key[kTokens];       // what the delta rule multiplies keys
    float query[kTokens];     // and queries by
  };
  static constexpr int kBytes = kEnd * 2 + 2 * int(sizeof(Decays));
};

}  // namespace replayssm::cuda
