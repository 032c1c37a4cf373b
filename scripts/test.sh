#!/usr/bin/env bash
# From a bare Debian 12 to a verdict: installs what is missing, builds everything, runs all tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

install_missing "${build_packages[@]}" "${test_packages[@]}"
python_environment

say "Building everything"
configure release -DBUILD_TESTING=ON
cmake --build --preset release

say "Running all tests"
run_tests build/release
