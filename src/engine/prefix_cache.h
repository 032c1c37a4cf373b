// Prompts that were computed before: their KV blocks, shared, and snapshots of the recurrent state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/buffer.h"
#include "engine/kv_pool.h"
#include "engine/slot_pool.h"

namespace replayssm {

// Snapshots lie on multiples of it: the recurrence's prefill computes in chunks of as many tokens,
// so that a prompt that continues there gives the same bits as one computed at once.
inline constexpr int64_t kPrefillChunk = 64;

// A tree of blocks of tokens. A node stands for a prefix: all tokens of the path to it. It holds
// the KV block of its own tokens, and some nodes a snapshot of the state behind them. A request can
// go on from a node with a snapshot. What has not been used for longest goes first: KV blocks when
// the pool has none left, snapshots when their own memory is full.
class PrefixCache {
 public:
  struct Stats {
    int64_t nodes = 0, snapshots = 0;                   // now
    int64_t evicted_blocks = 0, evicted_snapshots = 0;  // so far
  };

  // `kv` is null for models without attention. Of `bytes` as many snapshots are made as fit, and on
  // the host as many KV blocks again are kept, but a thousand in any case; throws
  // Error where that is none. A multiple of kPrefillChunk tokens lies between regular snapshots.
  PrefixCache(SlotPool& slots, KvPool* kv, int64_t bytes, int64_t interval,
              Memory& memory = host_memory());

  // Where a prompt can go on from, and where it should stop for a snapshot: up to there others have
  // had the same tokens, but left no state. 0 where there is none.
  struct Match {
    int64_t tokens = 0;
    int64_t branch = 0;
  };
  // At least one token is left to compute. What is found counts as used.
  Match find(std::span<const int32_t> tokens);
  // The blocks of the first `count` tokens of a match, each with one more user, into `table`.
  void share(std::span<const int32_t> tokens, int64_t count, std::vector<int32_t>& table);
  // The state behind these tokens into a slot just acquired; false where it has gone since.
  bool load(std::span<const int32_t> tokens, int64_t count, int32_t slot);

  // Whether a snapshot is due behind so many tokens of a prompt.
  bool due(int64_t computed, int64_t branch) const {
    return computed > 0 && (computed % interval_ == 0 || computed == branch);
  }
  // The first place behind `computed` where one is.
  int64_t next_due(int64_t computed, int64_t branch) const;
  // Takes over whole blocks of computed tokens; with `slot` >= 0 the slot's state, which must have
  // an empty ring and stand behind all of them.
  void publish(std::span<const int32_t> tokens, std::span<const int32_t> table, int32_t slot);

  // Gives back one KV block that nobody else uses; false where there is none.
  bool evict_block();

  const Stats& stats() const { return stats_; }

 private:
  struct Node;
  using Nodes = std::list<Node>;
  struct Node {
    Nodes::iterator parent{};
    uint64_t key = 0;  // in children_
    std::vector<int32_t> tokens{};
    int32_t block = -1;
    int32_t entry = -1;  // of the snapshot
    int64_t children = 0;
    int64_t used = 0;  // time of the snapshot's last use
  };

  Nodes::iterator child(Nodes::iterator parent, std::span<const int32_t> tokens);
  Nodes::iterator descend(std::span<const int32_t> tokens, int64_t count);
  Nodes::iterator add(Nodes::iterator parent, std::span<const int32_t> tokens);
  void touch(Nodes::iterator node);
  void remove(Nodes::iterator leaf);
  int32_t take_entry();
  std::byte* entry(int32_t index) const { return memory_.as() + index * snapshot_bytes_; }

  SlotPool& slots_;
  KvPool* kv_;
  int64_t interval_, snapshot_bytes_, most_nodes_;
  Buffer memory_;
  std::vector<int32_t> free_entries_;
  std::vector<Nodes::iterator> owners_;  // of entries
  Nodes nodes_;                          // least recently used first; children before parents
  Nodes roots_;                          // one: the empty prefix
  std::unordered_multimap<uint64_t, Nodes::iterator> children_;  // by parent and tokens
  int64_t clock_ = 0;
  Stats stats_;
};

}  // namespace replayssm
