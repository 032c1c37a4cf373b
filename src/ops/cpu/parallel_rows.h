// Spreads the rows of a [rows, dim] operand over the pool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/thread_pool.h"

namespace replayssm::cpu {

// Calls fn(begin, end) on ranges of rows; few values stay on the calling thread.
template <class Fn>
void parallel_rows(ThreadPool& pool, int64_t rows, int64_t dim, Fn&& fn) {
  constexpr int64_t kValues = 4096;  // waking a thread costs as much as a few thousand values
  const int64_t group = std::max(kValues / std::max(dim, int64_t{1}), int64_t{1});
  pool.for_ranges((rows + group - 1) / group, [&](int64_t begin, int64_t end, int) {
    fn(begin * group, std::min(end * group, rows));
  });
}

}  // namespace replayssm::cpu
