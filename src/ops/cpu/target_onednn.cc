#include "ops/cpu/target_onednn.h"

#include <dnnl.hpp>

#include "core/check.h"

namespace replayssm::cpu {

void limit_onednn(std::string_view name) {
  const auto isa = name == "avx512" ? dnnl::cpu_isa::all
                   : name == "avx2" ? dnnl::cpu_isa::avx2
                                    : dnnl::cpu_isa::sse41;
  if (dnnl::set_max_cpu_isa(isa) != dnnl::status::success)
    fail("CPU target ", name, ": oneDNN is in use already, or built without a choice");
}

}  // namespace replayssm::cpu
