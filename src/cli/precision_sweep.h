// replayssm bench accuracy --precision-sweep: what storage formats of the recurrent state cost.
#pragma once

#include "cli/bench_accuracy.h"

namespace replayssm::cli {

void precision_sweep(const AccuracyOptions& options);

}  // namespace replayssm::cli
