# shellcheck shell=bash disable=SC2034  # the variables are for the scripts that source this
# Shared by the scripts: where the tree is, what a Debian machine needs, how it is configured.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# What building and running needs. The build is configured with its tests, which need Python.
build_packages=(
  g++ cmake ninja-build ccache pkg-config python3
  libdnnl-dev libhwy-dev libpcre2-dev libutf8proc-dev
  nlohmann-json3-dev libcli11-dev libspdlog-dev libboost1.81-dev prometheus-cpp-dev
  libgtest-dev libgmock-dev
)
# What the tests need besides: the reference tokenizer and templates come from PyPI.
test_packages=(python3-venv)
# What the checks of CI need besides.
check_packages=(clang-format-19 clang-tidy-19 universal-ctags shellcheck libbenchmark-dev
  chromium chromium-driver)

say() { printf '\n== %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Installs the packages named that are missing. Asks nothing; needs root or sudo only when some are.
install_missing() {
  if ! command -v dpkg-query >/dev/null; then
    say "Not a Debian system: expecting the equivalents of $*"
    return
  fi
  local package missing=() root=()
  for package in "$@"; do
    dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
      missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then return; fi
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "neither root nor sudo, and these are missing: ${missing[*]}"
    root=(sudo)
  fi
  say "Installing ${missing[*]}"
  "${root[@]}" apt-get update -qq
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# Configures a preset quietly, with ccache and the tests' Python where there are such; more arguments
# go to cmake.
configure() {
  local arguments=("$@")
  if command -v ccache >/dev/null; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
    export CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  fi
  if [[ -x .venv/bin/python ]]; then
    arguments+=("-DPython3_EXECUTABLE=$repository/.venv/bin/python")
  fi
  cmake --log-level=WARNING --preset "${arguments[@]}" >/dev/null
}

# Makes .venv with the Python packages of the tests.
python_environment() {
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
}

# Runs the tests of a build folder and ends with one line of counts; more arguments go to ctest.
run_tests() {
  local folder=$1 result=0
  shift
  ctest --test-dir "$folder" --output-on-failure --no-tests=error -j2 \
    --output-junit replayssm-tests.xml "$@" || result=$?
  test_counts "$folder"
  return "$result"
}

# The counts of the last run_tests of a build folder.
test_counts() {
  local suite tests failed skipped
  suite=$(sed -n '/<testsuite/,/>/p' "$1/replayssm-tests.xml" | tr '\n\t' '  ')
  attribute() { sed -n "s/.* $1=\"\([0-9]*\)\".*/\1/p" <<<"$suite"; }
  tests=$(attribute tests) failed=$(attribute failures)
  skipped=$(($(attribute skipped) + $(attribute disabled)))
  echo "$((tests - failed - skipped)) passed, $failed failed, $skipped skipped"
}
