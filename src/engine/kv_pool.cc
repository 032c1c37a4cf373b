#include "engine/kv_pool.h"

#include <numeric>

#include "core/check.h"
#include "model/model.h"

namespace replayssm {
namespace {

// Bytes of one block of one layer's keys, or values.
int64_t layer_block_bytes(const ModelConfig& config, DType dtype) {
  const KvShape shape = kv_shape(config);
  return shape.heads * KvPool::kBlockSize * shape.head_dim * dtype_bytes(dtype);
}

}  // namespace

int64_t KvPool::bytes_per_block(const ModelConfig& config, DType dtype) {
  const KvShape shape = kv_shape(config);
  return (shape.values ? 2 : 1) * shape.layers * layer_block_bytes(config, dtype);
}

KvPool::KvPool(const ModelConfig& config, DType dtype, int64_t blocks, Memory& memory)
    : device_(&memory),
      users_(blocks > 0 ? blocks : 0),
      blocks_(blocks),
      bytes_(blocks * bytes_per_block(config, dtype)) {
  REPLAYSSM_CHECK(blocks >= 1 && blocks <= INT32_MAX, "blocks=", blocks);
  free_.resize(blocks);
  std::iota(free_.rbegin(), free_.rend(), 0);  // block 0 is taken first
  const auto array = [&] {
    memory_.emplace_back(blocks * layer_block_bytes(config, dtype), memory);
    return memory_.back().as<void>();
  };
  const KvShape shape = kv_shape(config);
  for (int64_t layer = 0; layer < shape.layers; ++layer) {
    keys_.push_back(array());
    values_.push_back(shape.values ? array() : keys_.back());
  }
}

bool KvPool::grow(std::vector<int32_t>& table, int64_t tokens) {
  const int64_t missing = blocks_for(tokens) - static_cast<int64_t>(table.size());
  if (missing > free_blocks()) return false;
  for (int64_t i = 0; i < missing; ++i) {
    table.push_back(free_.back());
    users_[free_.back()] = 1;
    free_.pop_back();
  }
  return true;
}

void KvPool::release(std::vector<int32_t>& table) {
  for (auto block = table.rbegin(); block != table.rend(); ++block) release(*block);
  table.clear();
}

void KvPool::release(int32_t block) {
  REPLAYSSM_CHECK(block >= 0 && block < blocks_ && users_[block] > 0, "block=", block);
  if (--users_[block] == 0) free_.push_back(block);
}

void KvPool::read_block(int32_t block, std::byte* host) const {
  for (const Buffer& part : memory_) {
    const int64_t bytes = part.bytes() / blocks_;
    device_->read(host, part.as() + block * bytes, bytes);
    host += bytes;
  }
}

void KvPool::write_block(int32_t block, const std::byte* host) {
  for (const Buffer& part : memory_) {
    const int64_t bytes = part.bytes() / blocks_;
    device_->write(part.as() + block * bytes, host, bytes);
    host += bytes;
  }
}

}  // namespace replayssm
