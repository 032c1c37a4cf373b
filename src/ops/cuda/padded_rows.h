// Where the elements of a row lie that eight lanes read together from shared memory.
#pragma once

namespace replayssm::cuda {

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

// Floats of a padded row: four more behind every 32, so that eight lanes reading rows as any
// element type lays them out meet no bank twice.
constexpr int padded_index(int element) { return element + element / 32 * 4; }
constexpr int padded_width(int state_dim) { return padded_index(state_dim); }

}  // namespace replayssm::cuda
