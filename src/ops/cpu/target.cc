#include "ops/cpu/target.h"

#include <cstdint>

#include "core/check.h"
#include "hwy/highway.h"
#include "ops/cpu/target_onednn.h"

namespace replayssm::cpu {
namespace {

struct Target {
  const char* name;
  int64_t bit;  // Highway's; wider instruction sets have lower ones
};

constexpr Target kTargets[] = {
#if HWY_ARCH_X86
    {"avx512", HWY_AVX3},
    {"avx2", HWY_AVX2},
#endif
    {"baseline", HWY_STATIC_TARGET},
};

// Those that are compiled in and that this machine has, or something between them and the next
// wider one.
std::vector<Target> offered() {
  std::vector<Target> targets;
  int64_t rest = hwy::SupportedTargets() & HWY_TARGETS;
  for (const Target& target : kTargets) {
    const int64_t as_wide = target.bit | (target.bit - 1);
    if ((rest & as_wide) != 0) targets.push_back(target);
    rest &= ~as_wide;
  }
  return targets;
}

}  // namespace

std::vector<std::string> target_names() {
  std::vector<std::string> names;
  for (const Target& target : offered()) names.emplace_back(target.name);
  return names;
}

void limit_target(std::string_view name) {
  std::string names;
  for (const Target& target : offered()) {
    if (name == target.name) {
      hwy::DisableTargets(target.bit - 1);
      limit_onednn(name);
      return;
    }
    names += (names.empty() ? "" : ", ") + std::string(target.name);
  }
  fail("CPU target: expected one that this machine has (", names, "), got '", name, "'");
}

std::string target_name() { return target_names().front(); }

}  // namespace replayssm::cpu
