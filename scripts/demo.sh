#!/usr/bin/env bash
# From a bare Debian 12 to generated text: installs what is missing, builds the program, streams text
# from a bundled model and compares the decode routes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

install_missing "${build_packages[@]}"

say "Building build/release/replayssm"
configure release
cmake --build --preset release --target replayssm

say "replayssm generate tiny-nemotron-h"
build/release/replayssm generate tiny-nemotron-h --max-tokens 64 --prompt 'def fibonacci(n):
    '

say "replayssm bench decode tiny-qwen3.5: the conventional update against ReplaySSM"
build/release/replayssm bench decode tiny-qwen3.5 --batch-size 192 --num-steps 64
