#!/usr/bin/env bash
# Runs tests of the CUDA recurrence and convolution on the CPU, under the address sanitizer: kernels as
# they are, tensor cores and warps emulated. Needs the CUDA toolkit, no device. Takes minutes to build
# and longer to run: name the tests that matter, as GoogleTest filters them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

readonly filter=${1:-'*CudaWindow.EveryRoute*:*CudaStep.EveryRoute*'}

configure cuda
for program in cuda_emulation_test cuda_conv_emulation_test cuda_paged_emulation_test cuda_prefill_emulation_test; do
  cmake --build --preset cuda --target "$program"
  cases=$("build/cuda/$program" --gtest_list_tests --gtest_filter="$filter:-*Graph*" |
    awk '/^[^ ]/ { suite = $1 } /^ / { print suite $1 }')
  xargs -r -P "$(nproc)" -I{} "build/cuda/$program" --gtest_brief=1 --gtest_filter={} <<<"$cases"
done
