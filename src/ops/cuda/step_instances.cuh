// Picks an instantiation of the step kernel and launches it.
#pragma once

#include "ops/cuda/check_cuda.h"
#include "ops/cuda/step_instances.h"
#include "ops/cuda/step_kernel.cuh"

namespace replayssm::cuda {

template <Family kFamily, class Act, class Checkpoint, class Read, int kState>
void launch_instance(const RecurrentStepParams& params, const StepLaunch& launch, int64_t blocks,
                     cudaStream_t stream) {
  const auto kernel = recurrent_step_kernel<kFamily, Act, Checkpoint, Read, kState>;
  const int bytes = launch.layout.total;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "recurrent_step: shared memory");
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "recurrent_step: shared memory");
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(params.batch.sequences));
  config.blockDim = dim3(32 * launch.config.warps);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  // The kernel itself waits for what runs before it in the stream.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &overlap;
  config.numAttrs = launch.overlaps ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params, launch), "recurrent_step");
}

// Calls fn<T>() with the element type of a read copy, void for none. An 8-bit copy goes with every
// checkpoint, a 16-bit one only with fp32.
template <class Checkpoint, class Fn>
void dispatch_read(const ReadCopy& copy, Fn&& fn) {
  if (copy.data == nullptr) return fn.template operator()<void>();
  switch (copy.dtype) {
    case DType::kFloat8E4M3: return fn.template operator()<Fp8>();
    case DType::kInt8: return fn.template operator()<Int8>();
    case DType::kFloat16:
      if constexpr (std::is_same_v<Checkpoint, float>) return fn.template operator()<Fp16>();
      break;
    case DType::kBFloat16:
      if constexpr (std::is_same_v<Checkpoint, float>) return fn.template operator()<Bf16>();
      break;
    case DType::kFloat32: break;
  }
  fail("recurrent_step: a ", dtype_name(copy.dtype), " read copy of a ",
       dtype_name(device_dtype<Checkpoint>()), " checkpoint saves nothing");
}

template <class Fn>
void dispatch_checkpoint(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32: return fn.template operator()<float>();
    case DType::kFloat16: return fn.template operator()<Fp16>();
    case DType::kBFloat16: return fn.template operator()<Bf16>();
    default: fail("recurrent_step: unsupported checkpoint dtype ", dtype_name(dtype));
  }
}

template <Family kFamily, class Act, int kState>
void launch_state_dim(const RecurrentStepParams& params, const StepLaunch& launch, int64_t blocks,
                      cudaStream_t stream) {
  dispatch_checkpoint(params.state.checkpoint_dtype, [&]<class Checkpoint>() {
    dispatch_read<Checkpoint>(params.state.read_copy, [&]<class Read>() {
      launch_instance<kFamily, Act, Checkpoint, Read, kState>(params, launch, blocks, stream);
    });
  });
}

}  // namespace replayssm::cuda
