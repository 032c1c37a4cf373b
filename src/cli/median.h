// Medians of what the benchmarks measure.
#pragma once

#include <algorithm>
#include <vector>

#include "core/bandwidth.h"
#include "core/check.h"

namespace replayssm::cli {

inline double median(std::vector<double> values) {
  REPLAYSSM_CHECK(!values.empty(), "no values");
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Of each kind of bandwidth on its own.
inline Bandwidth median(const std::vector<Bandwidth>& samples) {
  const auto of = [&](double Bandwidth::* kind) {
    std::vector<double> values;
    for (const Bandwidth& sample : samples) values.push_back(sample.*kind);
    return median(std::move(values));
  };
  return {.read = of(&Bandwidth::read),
          .read_modify_write = of(&Bandwidth::read_modify_write),
          .write = of(&Bandwidth::write)};
}

}  // namespace replayssm::cli
