#!/usr/bin/env bash
# memcheck over a build without sanitizers: ops of the three families, the C functions, and both
# bundled models through prefill, decode and read copies. On AVX2: valgrind knows nothing wider.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

(($# == 1)) || die "usage: check-valgrind.sh BUILD_FOLDER"
folder=$1
memcheck() {
  valgrind --quiet --error-exitcode=9 --suppressions=scripts/lib/valgrind.supp \
    --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite "$@"
}

# Two small cases each of Mamba-2, Gated Delta and Kimi Delta, whose rows no vector divides.
cases='*/case2:*/case12:*/case5:*/case22:*/case9:*/case32'
export REPLAYSSM_CPU_TARGET=avx2
memcheck "$folder/recurrent_test" --gtest_brief=1 \
  --gtest_filter="$cases:Shapes/Conv.*/1:Shapes/ConvTree.*/1:Gates.*"
memcheck "$folder/c_api_test" --gtest_brief=1
for model in tiny-nemotron-h tiny-qwen3.5; do
  for flags in "--dtype float32" "--replayssm-read-dtype int8 --replayssm-buffer-len 3"; do
    # shellcheck disable=SC2086  # several flags
    memcheck "$folder/replayssm" generate "$model" --prompt "def add(a, b):" --max-tokens 8 \
      --threads 2 --cpu-target avx2 --ignore-eos $flags
  done
done
