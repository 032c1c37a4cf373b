#include "engine/memory_plan.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "core/check.h"
#include "engine/model_drafter.h"

namespace replayssm {
namespace {

std::string gigabytes(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / 1e9 << " GB";
  return text.str();
}

// Behind the plan of the model itself.
std::string draft_text(const MemoryPlan& plan) {
  if (plan.draft_weights + plan.draft_states == 0) return {};
  return concat("; draft model: weights ", gigabytes(plan.draft_weights), ", states ",
                gigabytes(plan.draft_states), ", KV ",
                gigabytes(plan.draft_kv_blocks * plan.draft_kv_block_bytes));
}

std::string room_text(const MemoryPlan& plan, const EngineOptions& options) {
  return concat(gigabytes(plan.limit - plan.used), " (", options.memory_utilization, " of ",
                gigabytes(plan.total), " less ", gigabytes(plan.used), " for weights of ",
                gigabytes(plan.weights), ", workspaces and other programs)");
}

// Bytes of a model's KV block; 0 where it keeps none.
int64_t block_bytes(const Model& model) {
  return model.config().attention_layers() > 0
             ? KvPool::bytes_per_block(model.config(), model.activation_dtype())
             : 0;
}

void plan_draft_model(const EngineOptions& options, MemoryPlan& plan) {
  const Model* model = drafting_model(options);
  if (!model) return;
  const ModelConfig& config = model->config();
  plan.draft_weights = model->weight_bytes();
  plan.draft_states =
      plan.slots * SlotPool::bytes_per_slot(config, ModelDrafter::ring_of(options),
                                            config.state_dtype, model->activation_dtype());
  plan.draft_kv_block_bytes = block_bytes(*model);
}

// How many blocks there are, of each of the models: `wanted` or what fits. Throws Error where
// states do not fit, and where not even the blocks of the longest sequence, or those asked for, do.
int64_t fitting_blocks(const MemoryPlan& plan, const EngineOptions& options, int64_t wanted) {
  const int64_t states = plan.slots * plan.slot_bytes + plan.prefixes + plan.draft_states;
  const int64_t room = plan.limit - plan.used, longest = KvPool::blocks_for(options.max_model_len);
  const int64_t bytes = plan.kv_block_bytes + plan.draft_kv_block_bytes;
  if (states > room) {
    fail("max_num_seqs: expected states that fit into ", room_text(plan, options), ", got ",
         plan.slots, " sequences of ", gigabytes(plan.slot_bytes), ", together ",
         gigabytes(states));
  }
  if (bytes == 0 || wanted <= (room - states) / bytes) return wanted;
  const int64_t fitting = (room - states) / bytes;
  if (options.kv_blocks > 0 || fitting < longest) {
    const int64_t least = std::max(options.kv_blocks, longest);
    fail("max_model_len: expected KV blocks that fit into ", room_text(plan, options), " less ",
         gigabytes(states), " of states, got ", gigabytes(least * bytes), " for ",
         least * KvPool::kBlockSize, " tokens");
  }
  return fitting;
}

}  // namespace

MemoryPlan plan_memory(Model& model, const EngineOptions& options) {
  MemoryPlan plan;
  plan.weights = model.weight_bytes();
  plan.slots = options.max_num_seqs;
  plan.prefixes = options.prefix_cache_bytes;
  plan.slot_bytes =
      SlotPool::bytes_per_slot(model.config(), options.ring, options.state_dtype,
                               model.activation_dtype(), options.read_dtype, snapshots_of(options));
  plan.kv_block_bytes = block_bytes(model);
  plan_draft_model(options, plan);
  const int64_t all = options.max_num_seqs * KvPool::blocks_for(options.max_model_len);
  int64_t blocks = options.kv_blocks > 0 ? options.kv_blocks : all;
  const MemoryCapacity capacity = model.memory().capacity();
  if (capacity.total > 0) {
    plan.total = capacity.total;
    plan.limit =
        static_cast<int64_t>(static_cast<double>(capacity.total) * options.memory_utilization);
    plan.used = capacity.total - capacity.free;
    blocks = fitting_blocks(plan, options, blocks);
  }
  plan.kv_blocks = plan.kv_block_bytes > 0 ? blocks : 1;
  plan.draft_kv_blocks = plan.draft_kv_block_bytes > 0 ? blocks : all;
  plan.kv_tokens = plan.kv_block_bytes > 0 ? blocks * KvPool::kBlockSize : 0;
  return plan;
}

std::string to_string(const MemoryPlan& plan) {
  return concat("memory: ", gigabytes(plan.limit), " of ", gigabytes(plan.total), "; weights ",
                gigabytes(plan.weights), ", in use with workspaces ", gigabytes(plan.used),
                ", states ", gigabytes(plan.slots * plan.slot_bytes), " for ", plan.slots,
                " sequences and ", gigabytes(plan.prefixes), " of prefixes, KV ",
                gigabytes(plan.kv_blocks * plan.kv_block_bytes), " for ", plan.kv_tokens, " tokens",
                draft_text(plan));
}

}  // namespace replayssm
