#include "model/dummy_weights.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "core/half.h"
#include "core/philox.h"

namespace replayssm {
namespace {

constexpr float kLargest = 0.035f;  // uniform: a standard deviation of 0.02

std::shared_ptr<const Buffer> random_block(int64_t elements) {
  auto block = std::make_shared<Buffer>(elements * static_cast<int64_t>(sizeof(bf16)));
  uint64_t state = 0x9e3779b97f4a7c15;
  for (bf16* value = block->as<bf16>(); value != block->as<bf16>() + elements; ++value) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto bits = static_cast<int32_t>(state >> 32);
    *value = from_float<bf16>(static_cast<float>(bits) * (kLargest / 2147483648.0f));
  }
  return block;
}

// The element of a vector; u: uniform in [0, 1).
float vector_element(const std::string& name, double u) {
  if (name.ends_with("A_log")) return static_cast<float>(std::log(1 + 15 * u));
  if (name.ends_with("dt_bias")) {  // softplus gives steps of 0.001 to 0.1
    const double step = std::exp(std::log(0.001) + u * std::log(100));
    return static_cast<float>(std::log(std::expm1(step)));
  }
  const bool one =
      name.ends_with(".D") || name.ends_with("norm.weight") || name.ends_with("norm_f.weight");
  return one ? 1 : 0;
}

}  // namespace

Tensor DummyWeights::make(const std::string& name, const std::vector<int64_t>& shape) {
  Tensor tensor{.dtype = DType::kFloat32, .shape = shape, .data = nullptr, .storage = {}};
  const int64_t elements = tensor.elements();
  if (shape.size() == 1) {
    auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(elements));
    const uint64_t seed = std::hash<std::string>()(name);
    for (int64_t i = 0; i < elements; ++i) (*values)[i] = vector_element(name, uniform(seed, i));
    tensor.data = reinterpret_cast<const std::byte*>(values->data());
    tensor.storage = std::move(values);
    return tensor;
  }
  const int64_t bytes = elements * static_cast<int64_t>(sizeof(bf16));
  constexpr int64_t kLeast = int64_t{1} << 26;
  if (!block_ || block_->bytes() < bytes) block_ = random_block(std::max(elements, kLeast));
  constexpr uint64_t kAlignment = 64;
  const uint64_t places = static_cast<uint64_t>(block_->bytes() - bytes) / kAlignment + 1;
  tensor.dtype = DType::kBFloat16;
  tensor.data = block_->as<>() + std::hash<std::string>()(name) % places * kAlignment;
  tensor.storage = block_;
  return tensor;
}

}  // namespace replayssm
