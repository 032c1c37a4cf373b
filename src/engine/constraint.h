// What may come next in an output, as whoever asked for it demands.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace replayssm {

// Belongs to one sequence and follows its output.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  // 1 for every token that may come next, else 0: [vocab], or shorter where the rest may not. Valid
  // until accept(). All 0: only the output's end may come.
  virtual std::span<const uint8_t> allowed() = 0;
  virtual void accept(int32_t token) = 0;
  virtual bool may_end() const = 0;  // the output is whole as it is
  virtual bool complete() = 0;       // nothing can follow, whole or not
};

}  // namespace replayssm
