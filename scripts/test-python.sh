#!/usr/bin/env bash
# Builds the wheel of a build folder (default: build/release), installs it into an environment with
# PyTorch and runs tests/python there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

readonly folder=${1:-build/release} environment=build/python-venv

[[ -x $environment/bin/python ]] || python3 -m venv "$environment"
"$environment"/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
  -r tests/python/requirements.txt
cmake --build "$folder" --target wheel
"$environment"/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
  --force-reinstall "$folder"/wheel/replayssm-*.whl
"$environment"/bin/python -m pytest -q -p no:cacheprovider tests/python
