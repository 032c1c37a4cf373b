#include "engine/prefix_cache.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "core/check.h"

namespace replayssm {
namespace {

constexpr int64_t kBlock = KvPool::kBlockSize;
constexpr int64_t kLeastNodes = 1 << 10, kMostNodes = 1 << 16;

// FNV-1a over the parent and the block's tokens. Equal keys are told apart by the tokens.
uint64_t key_of(const void* parent, std::span<const int32_t> tokens) {
  constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t hash = 0xcbf29ce484222325 ^ reinterpret_cast<uintptr_t>(parent);
  for (const int32_t token : tokens) hash = (hash ^ static_cast<uint32_t>(token)) * kPrime;
  return hash ^ (hash >> 32);
}

int64_t whole_chunks(int64_t tokens) { return tokens / kPrefillChunk * kPrefillChunk; }

}  // namespace

PrefixCache::PrefixCache(SlotPool& slots, KvPool* kv, int64_t bytes, int64_t interval,
                         Memory& memory)
    : slots_(slots),
      kv_(kv),
      interval_(interval),
      snapshot_bytes_(slots.snapshot_bytes()),
      most_nodes_(kMostNodes) {
  if (interval < kPrefillChunk || interval % kPrefillChunk != 0) {
    fail("prefix_interval: expected a multiple of ", kPrefillChunk, ", got ", interval);
  }
  constexpr int64_t kMostEntries = 1 << 16;
  // The host hands out a pool's memory as it is used: kept blocks must not use all of it up.
  if (kv && memory.capacity().total == 0)
    most_nodes_ = std::clamp(bytes / kv->block_bytes(), kLeastNodes, kMostNodes);
  const int64_t entries =
      snapshot_bytes_ == 0 ? kMostEntries : std::min(bytes / snapshot_bytes_, kMostEntries);
  if (entries == 0) {
    fail("prefix_cache_bytes: expected at least ", snapshot_bytes_, " for one state, got ", bytes);
  }
  if (snapshot_bytes_ > 0) memory_ = Buffer(entries * snapshot_bytes_, memory);
  free_entries_.resize(entries);
  std::iota(free_entries_.rbegin(), free_entries_.rend(), 0);
  owners_.resize(entries);
  roots_.emplace_back();
}

PrefixCache::Nodes::iterator PrefixCache::child(Nodes::iterator parent,
                                                std::span<const int32_t> tokens) {
  const auto [first, last] = children_.equal_range(key_of(&*parent, tokens));
  for (auto at = first; at != last; ++at) {
    const Nodes::iterator node = at->second;
    if (node->parent == parent && std::ranges::equal(node->tokens, tokens)) return node;
  }
  return nodes_.end();
}

// The node of the first `count` tokens; end() where one on the way is missing.
PrefixCache::Nodes::iterator PrefixCache::descend(std::span<const int32_t> tokens, int64_t count) {
  Nodes::iterator node = roots_.begin();
  for (int64_t at = 0; at < count && node != nodes_.end(); at += kBlock) {
    node = child(node, tokens.subspan(at, kBlock));
  }
  return node;
}

// Parents move behind their children: what has gone unused longest is always a leaf.
void PrefixCache::touch(Nodes::iterator node) {
  for (; node != roots_.begin(); node = node->parent) nodes_.splice(nodes_.end(), nodes_, node);
}

PrefixCache::Match PrefixCache::find(std::span<const int32_t> tokens) {
  Match match;
  Nodes::iterator node = roots_.begin(), last = node;
  int64_t known = 0;
  while (known + kBlock < std::ssize(tokens)) {
    node = child(node, tokens.subspan(known, kBlock));
    if (node == nodes_.end()) break;
    last = node;
    known += kBlock;
    if (node->entry < 0) continue;
    match.tokens = known;
  }
  touch(last);
  const int64_t branch = whole_chunks(known);
  if (branch > match.tokens) match.branch = branch;
  return match;
}

void PrefixCache::share(std::span<const int32_t> tokens, int64_t count,
                        std::vector<int32_t>& table) {
  if (!kv_) return;
  Nodes::iterator node = roots_.begin();
  for (int64_t at = 0; at < count; at += kBlock) {
    node = child(node, tokens.subspan(at, kBlock));
    REPLAYSSM_CHECK(node != nodes_.end(), "no prefix of ", at, " tokens");
    kv_->share(node->block);
    table.push_back(node->block);
  }
}

bool PrefixCache::load(std::span<const int32_t> tokens, int64_t count, int32_t slot) {
  const Nodes::iterator node = descend(tokens, count);
  if (node == nodes_.end() || node->entry < 0) return false;
  node->used = ++clock_;
  slots_.load_snapshot(slot, entry(node->entry), count);
  return true;
}

int64_t PrefixCache::next_due(int64_t computed, int64_t branch) const {
  const int64_t regular = (computed / interval_ + 1) * interval_;
  return branch > computed ? std::min(branch, regular) : regular;
}

PrefixCache::Nodes::iterator PrefixCache::add(Nodes::iterator parent,
                                              std::span<const int32_t> tokens) {
  nodes_.push_back({.parent = parent,
                    .key = key_of(&*parent, tokens),
                    .tokens = {tokens.begin(), tokens.end()}});
  const Nodes::iterator node = std::prev(nodes_.end());
  children_.emplace(node->key, node);
  ++parent->children;
  stats_.nodes = std::ssize(nodes_);
  return node;
}

int32_t PrefixCache::take_entry() {
  if (!free_entries_.empty()) {
    const int32_t index = free_entries_.back();
    free_entries_.pop_back();
    return index;
  }
  const auto oldest = std::ranges::min_element(owners_, {}, [](const auto& n) { return n->used; });
  ++stats_.evicted_snapshots;
  --stats_.snapshots;
  return std::exchange((*oldest)->entry, -1);
}

void PrefixCache::publish(std::span<const int32_t> tokens, std::span<const int32_t> table,
                          int32_t slot) {
  Nodes::iterator node = roots_.begin();
  for (int64_t at = 0; at + kBlock <= std::ssize(tokens); at += kBlock) {
    const auto block = tokens.subspan(at, kBlock);
    Nodes::iterator next = child(node, block);
    if (next == nodes_.end()) {
      next = add(node, block);
      if (kv_) {
        next->block = table[at / kBlock];
        kv_->share(next->block);
      }
    }
    node = next;
  }
  touch(node);
  // The path itself stays, however long.
  while (std::ssize(nodes_) > most_nodes_ && nodes_.begin() != node) remove(nodes_.begin());
  if (slot < 0 || node == roots_.begin() || node->entry >= 0) return;
  const int32_t index = take_entry();
  node->entry = index;
  node->used = ++clock_;
  owners_[index] = node;
  ++stats_.snapshots;
  slots_.save_snapshot(slot, entry(index));
}

void PrefixCache::remove(Nodes::iterator leaf) {
  REPLAYSSM_CHECK(leaf->children == 0, "children=", leaf->children);
  if (leaf->entry >= 0) {
    free_entries_.push_back(leaf->entry);
    ++stats_.evicted_snapshots;
    --stats_.snapshots;
  }
  if (kv_) kv_->release(leaf->block);
  const auto [first, last] = children_.equal_range(leaf->key);
  for (auto at = first; at != last; ++at) {
    if (at->second != leaf) continue;
    children_.erase(at);
    break;
  }
  --leaf->parent->children;
  nodes_.erase(leaf);
  ++stats_.evicted_blocks;
  stats_.nodes = std::ssize(nodes_);
}

bool PrefixCache::evict_block() {
  if (!kv_) return false;
  for (auto node = nodes_.begin(); node != nodes_.end(); ++node) {
    if (node->children > 0 || kv_->users(node->block) > 1) continue;
    remove(node);
    return true;
  }
  return false;
}

}  // namespace replayssm
