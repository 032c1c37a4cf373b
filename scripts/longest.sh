#!/usr/bin/env bash
# The ten longest source files and functions, in lines.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

sources=('*.h' '*.cc' '*.c' '*.cu' '*.cuh' '*.py')
ten_longest() { sort -rn | awk 'NR <= 10'; }

echo "Files (at most 400 lines):"
git ls-files -z -- "${sources[@]}" | xargs -0 wc -l | grep -v ' total$' | ten_longest
echo "Functions (at most 60 lines, kernels 150):"
git ls-files -- "${sources[@]}" |
  ctags -L - -x --kinds-C++=f --kinds-C=f --kinds-Python=fm --kinds-CUDA=f --fields=+e \
    --langmap=C++:+.h.cu.cuh --_xformat='%n %e %F %N' |
  awk '{ printf "%5d %s:%d %s\n", $2 - $1 + 1, $3, $1, $4 }' | ten_longest
