#!/usr/bin/env bash
# From a bare Debian 12 to generated text: installs what is missing, builds the program, streams text
# from the bundled models and compares the decode routes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

install_missing "${build_packages[@]}"

say "Building build/release/replayssm"
configure release
cmake --build --preset release --target replayssm

# The bundled models are tiny: they know how Python looks, not what it means.
prompt='class Stack:
    """A stack of items."""

    def __init__(self):
        self.items = []

    def push(self, item):
'
for model in tiny-nemotron-h tiny-qwen3.5; do
  say "replayssm generate $model"
  printf '%s' "$prompt"
  build/release/replayssm generate "$model" --prompt "$prompt" --max-tokens 96 \
    --temperature 0.6 --top-p 0.9 --repetition-penalty 1.1 --seed 5
done

say "replayssm bench decode tiny-qwen3.5: the conventional update against ReplaySSM"
build/release/replayssm bench decode tiny-qwen3.5 --batch-size 192 --num-steps 64 --repeats 1
