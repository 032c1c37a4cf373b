#!/usr/bin/env bash
# Fails when clang-format would change a source file; with --fix, changes them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

report=$(mktemp)
trap 'rm -f "$report"' EXIT
mapfile -t files < <(git ls-files -- '*.h' '*.cc' '*.c' '*.cu' '*.cuh')
case ${1-} in
  '')
    if ! clang-format-19 --dry-run --Werror "${files[@]}" 2>"$report"; then
      grep -oE '^[^:]+:[0-9]+:[0-9]+: error' "$report" | cut -d: -f1 | uniq -c
      die "the files above have that many places to format: scripts/check-format.sh --fix"
    fi
    ;;
  --fix) clang-format-19 -i "${files[@]}" ;;
  *) die "usage: check-format.sh [--fix]" ;;
esac
echo "${#files[@]} files"
