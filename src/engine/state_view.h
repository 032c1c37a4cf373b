// What a model sees of the pools that its sequences live in.
#pragma once

#include "engine/kv_pool.h"
#include "engine/slot_pool.h"
#include "model/model.h"

namespace replayssm {

inline StateView state_view(Route route, const SlotPool& slots, const KvPool& kv) {
  return {.route = route,
          .ring = slots.ring(),
          .cursors = slots.cursors(),
          .recurrent = slots.recurrent(),
          .conv_inputs = slots.conv_inputs(),
          .kv_keys = kv.keys(),
          .kv_values = kv.values(),
          .kv_block_size = KvPool::kBlockSize,
          .snapshots = slots.snapshots()};
}

}  // namespace replayssm
