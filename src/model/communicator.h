// What the ranks of a model that is cut over several devices say to each other.
#pragma once

#include <cstdint>

namespace replayssm {

// One of `world` parts.
struct Shard {
  int64_t rank = 0, world = 1;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual Shard shard() const = 0;
  // Replaces the ranks' numbers by their sum, in order with the backend's work on `stream`
  // (Backend::stream_handle).
  virtual void all_reduce(float* data, int64_t count, void* stream) = 0;
};

class SingleRank final : public Communicator {
 public:
  Shard shard() const override { return {}; }
  void all_reduce(float* /*data*/, int64_t /*count*/, void* /*stream*/) override {}
};

}  // namespace replayssm
