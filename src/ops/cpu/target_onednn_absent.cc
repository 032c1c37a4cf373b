// In place of target_onednn.cc in a build without oneDNN.
#include "ops/cpu/target_onednn.h"

namespace replayssm::cpu {

void limit_onednn(std::string_view) {}

}  // namespace replayssm::cpu
