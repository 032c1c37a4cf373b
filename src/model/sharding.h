// A rank's part of a model: heads with their groups, keys and states, and rows of channel mixes.
// Norms, embedding, routers and logits are whole on every rank. What a rank's layers add to the
// residual stream is its part of a sum over the ranks.
#pragma once

#include <string>

#include "model/communicator.h"
#include "model/config.h"
#include "model/weights.h"

namespace replayssm {

// Why a model cannot be cut into so many parts; empty where it can.
std::string shard_obstacle(const ModelConfig& config, int64_t world);

// Leaves the rank's heads in the configuration and its slices, copied, in the weights. Throws Error
// for an obstacle.
void take_shard(ModelConfig& config, ModelWeights& weights, const Shard& shard);

}  // namespace replayssm
