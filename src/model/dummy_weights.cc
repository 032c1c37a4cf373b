#include "model/dummy_weights.h"

#include <cmath>
#include <functional>
#include <memory>

#include "core/philox.h"

namespace replayssm {
namespace {

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

Tensor dummy_tensor(const std::string& name, const std::vector<int64_t>& shape) {
  Tensor tensor{.dtype = DType::kFloat32, .shape = shape, .data = nullptr, .storage = {}};
  const int64_t elements = tensor.elements();
  const uint64_t seed = std::hash<std::string>()(name);
  if (shape.size() > 1) {
    tensor.dtype = DType::kBFloat16;
    tensor.random = {{seed / 8 * 4, elements}};
    return tensor;
  }
  auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) (*values)[i] = vector_element(name, uniform(seed, i));
  tensor.data = reinterpret_cast<const std::byte*>(values->data());
  tensor.storage = std::move(values);
  return tensor;
}

}  // namespace replayssm
