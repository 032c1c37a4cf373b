#include "engine/memory_plan.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "core/check.h"

namespace replayssm {
namespace {

std::string gigabytes(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / 1e9 << " GB";
  return text.str();
}

std::string room_text(const MemoryPlan& plan, const EngineOptions& options) {
  return concat(gigabytes(plan.limit - plan.used), " (", options.memory_utilization, " of ",
                gigabytes(plan.total), " less ", gigabytes(plan.used), " for weights of ",
                gigabytes(plan.weights), ", workspaces and other programs)");
}

}  // namespace

MemoryPlan plan_memory(Model& model, const EngineOptions& options) {
  const ModelConfig& config = model.config();
  const DType dtype = model.activation_dtype();
  MemoryPlan plan;
  plan.weights = model.weight_bytes();
  plan.slots = options.max_num_seqs;
  plan.prefixes = options.prefix_cache_bytes;
  plan.slot_bytes = SlotPool::bytes_per_slot(config, options.ring, options.state_dtype, dtype,
                                             options.read_dtype, snapshots_of(options));
  const bool paged = config.attention_layers() > 0;
  const int64_t longest = KvPool::blocks_for(options.max_model_len);
  plan.kv_block_bytes = paged ? KvPool::bytes_per_block(config, dtype) : 0;
  plan.kv_blocks = !paged                  ? 1
                   : options.kv_blocks > 0 ? options.kv_blocks
                                           : options.max_num_seqs * longest;
  const MemoryCapacity capacity = model.memory().capacity();
  if (capacity.total > 0) {
    plan.total = capacity.total;
    plan.limit =
        static_cast<int64_t>(static_cast<double>(capacity.total) * options.memory_utilization);
    plan.used = capacity.total - capacity.free;
    const int64_t room = plan.limit - plan.used,
                  states = plan.slots * plan.slot_bytes + plan.prefixes;
    if (states > room) {
      fail("max_num_seqs: expected states that fit into ", room_text(plan, options), ", got ",
           plan.slots, " sequences of ", gigabytes(plan.slot_bytes), ", together ",
           gigabytes(states));
    }
    if (paged && plan.kv_blocks > (room - states) / plan.kv_block_bytes) {
      const int64_t fitting = (room - states) / plan.kv_block_bytes;
      if (options.kv_blocks > 0 || fitting < longest) {
        fail("max_model_len: expected KV blocks that fit into ", room_text(plan, options), " less ",
             gigabytes(states), " of states, got ",
             gigabytes(std::max(options.kv_blocks, longest) * plan.kv_block_bytes), " for ",
             std::max(options.kv_blocks, longest) * KvPool::kBlockSize, " tokens");
      }
      plan.kv_blocks = fitting;
    }
  }
  plan.kv_tokens = paged ? plan.kv_blocks * KvPool::kBlockSize : 0;
  return plan;
}

std::string to_string(const MemoryPlan& plan) {
  return concat("memory: ", gigabytes(plan.limit), " of ", gigabytes(plan.total), "; weights ",
                gigabytes(plan.weights), ", in use with workspaces ", gigabytes(plan.used),
                ", states ", gigabytes(plan.slots * plan.slot_bytes), " for ", plan.slots,
                " sequences and ", gigabytes(plan.prefixes), " of prefixes, KV ",
                gigabytes(plan.kv_blocks * plan.kv_block_bytes), " for ", plan.kv_tokens,
                " tokens");
}

}  // namespace replayssm
