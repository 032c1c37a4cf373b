#include <algorithm>

#include "core/check.h"
#include "model/jinja/builtins.h"

namespace replayssm::jinja {

Bound::Bound(std::string_view function, Arguments arguments,
             std::initializer_list<std::string_view> parameters, size_t required)
    : values_(parameters.size()) {
  if (arguments.positional.size() > parameters.size()) {
    fail(function, "() takes at most ", parameters.size(), " arguments (",
         arguments.positional.size(), " given)");
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) {
    values_[i] = std::move(arguments.positional[i]);
  }
  for (auto& [name, value] : arguments.named) {
    const auto found = std::find(parameters.begin(), parameters.end(), name);
    if (found == parameters.end()) {
      fail(function, "() got an unexpected keyword argument '", name, "'");
    }
    std::optional<Value>& place = values_[static_cast<size_t>(found - parameters.begin())];
    if (place) fail(function, "() got multiple values for argument '", name, "'");
    place = std::move(value);
  }
  for (size_t i = 0; i < required; ++i) {
    if (!values_[i]) {
      fail(function, "() missing required argument '", *(parameters.begin() + i), "'");
    }
  }
}

}  // namespace replayssm::jinja
