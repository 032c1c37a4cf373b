#!/usr/bin/env bash
# Every header compiles alone, and the public ones include nothing but the standard library and each
# other.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

if grep -rnE '^ *# *include' include |
  grep -vE '# *include (<(std[a-z]+\.h|[a-z_0-9]+)>|"replayssm/[a-z_0-9/]+\.h")'; then
  die "include/ may only use the standard library and replayssm/ headers"
fi

# Files ending in -inl.h are bodies that another header or source includes several times.
compile_alone() {
  g++ -std=c++20 -Wall -Wextra -Werror -fsyntax-only "-I$1" -Iinclude -x c++ - <<<"#include \"${2#"$1"/}\""
}
export -f compile_alone
mapfile -t public < <(git ls-files -- 'include/*.h')
mapfile -t internal < <(git ls-files -- 'src/*.h' ':!*-inl.h')
printf '%s\0' "${public[@]}" | xargs -0 -P2 -I{} bash -c 'compile_alone include {}'
printf '%s\0' "${internal[@]}" | xargs -0 -P2 -I{} bash -c 'compile_alone src {}'
echo "${#public[@]} public and ${#internal[@]} internal headers"
