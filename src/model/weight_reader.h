// Takes tensors out of a checkpoint by name and keeps account of those that nobody took.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/safetensors.h"
#include "model/tensor.h"

namespace replayssm {

class WeightReader {
 public:
  using Shape = std::vector<int64_t>;

  explicit WeightReader(const Checkpoint& checkpoint);
  // Makes up what is asked for (model/dummy_weights.h).
  WeightReader() = default;

  bool has(const std::string& name) const;
  bool has_prefix(std::string_view prefix) const;
  // The same, or weights that are made up.
  bool may_have(std::string_view prefix) const { return !checkpoint_ || has_prefix(prefix); }
  std::string folder() const { return checkpoint_ ? checkpoint_->folder() : "dummy weights"; }

  // A required tensor. Throws Error when it is missing or has another shape.
  Tensor take(const std::string& name, const Shape& shape);
  // The same where `wanted`, else absent.
  Tensor take_if(bool wanted, const std::string& name, const Shape& shape);
  // A depthwise filter, stored as [channels, 1, taps] or [channels, taps].
  Tensor take_filter(const std::string& name, int64_t channels, int64_t taps);
  // A vector, stored with any number of further dimensions of one.
  Tensor take_vector(const std::string& name, int64_t elements);
  // Consecutive pieces of a fused tensor of `shape`, each of `piece`'s shape.
  std::vector<Tensor> take_pieces(const std::string& name, const Shape& shape, const Shape& piece);

  // Leaves out every tensor whose name starts with `prefix`.
  void skip(std::string_view prefix);
  // Leaves `name` out if it is there and equals `other`; throws Error if it differs.
  void skip_copy(const std::string& name, const std::string& other);

  // The tensors left out. Throws Error for tensors neither taken nor left out.
  std::vector<std::string> finish();

 private:
  const TensorEntry& use(const std::string& name, const Shape& shape);
  void mark(const TensorEntry& entry);

  const Checkpoint* checkpoint_ = nullptr;
  std::vector<bool> used_;  // by position in the checkpoint's entries
  std::vector<std::string> skipped_;
};

}  // namespace replayssm
