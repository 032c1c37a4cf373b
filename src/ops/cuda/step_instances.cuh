// Picks an instantiation of the step kernel and launches it.
#pragma once

#include "core/check.h"
#include "ops/cuda/dependent_launch.cuh"
#include "ops/cuda/step_instances.h"
#include "ops/cuda/step_kernel.cuh"
#include "ops/cuda/step_prepare.cuh"

namespace replayssm::cuda {

// Calls fn<T>() with the element type of a read copy, void for none. Copies of 8 bits are read on
// behalf of 16-bit activations.
template <class Act, class Fn>
void dispatch_read(const ReadCopy& copy, Fn&& fn) {
  if (copy.data == nullptr) return fn.template operator()<void>();
  if constexpr (sizeof(Act) == 2) {
    if (copy.dtype == DType::kFloat8E4M3) return fn.template operator()<Fp8>();
    if (copy.dtype == DType::kInt8) return fn.template operator()<Int8>();
  }
  fail("recurrent_step: no kernel reads a ", dtype_name(copy.dtype), " copy for ",
       dtype_name(device_dtype<Act>()), " activations");
}

template <Family kFamily, class Act, class Checkpoint, bool kMany>
void launch_instance(const RecurrentStepParams& params, const StepLaunch& launch, StepPart part,
                     dim3 grid, cudaStream_t stream) {
  dispatch_read<Act>(params.state.read_copy, [&]<class Read>() {
    constexpr bool kAhead = can_run_ahead(kFamily, device_dtype<Act>(), device_dtype<Checkpoint>(),
                                          !std::is_void_v<Read>, kMany);
    auto kernel = recurrent_step_kernel<kFamily, Act, Checkpoint, Read, 128, kMany, kAhead>;
    if constexpr (kAhead && kMany) {
      if (!launch.ahead)
        kernel = recurrent_step_kernel<kFamily, Act, Checkpoint, Read, 128, kMany, false>;
    }
    int bytes = launch.layout.total, warps = launch.config.warps;
    if constexpr (can_prepare(kFamily, device_dtype<Act>(), kMany)) {
      if (part == StepPart::kPreparation) {
        using Source = std::conditional_t<std::is_void_v<Read>, Checkpoint, Read>;
        kernel = prepare_kernel<kFamily, Source, 128>;
        bytes = Preparation<kFamily, Source, 128>::shared_bytes(launch);
        warps = launch.config.preparing;
      }
    }
    reserve_shared("recurrent_step", kernel, bytes);
    launch_dependent("recurrent_step", kernel, grid, 32 * warps, bytes, stream, params, launch);
  });
}

}  // namespace replayssm::cuda
