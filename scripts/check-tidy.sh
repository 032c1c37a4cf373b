#!/usr/bin/env bash
# clang-tidy over the sources in a build folder's compile commands, those changed last first. After
# the given seconds it starts no further file, and says which it did not reach.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
cd "$repository"

(($# == 1 || $# == 2)) || die "usage: check-tidy.sh BUILD_FOLDER [SECONDS]"
export folder=$1 deadline=$(($(date +%s) + ${2-86400})) not_reached
[[ -f $folder/compile_commands.json ]] || die "$folder has no compile_commands.json: configure it first"
not_reached=$(mktemp)
trap 'rm -f "$not_reached"' EXIT

tidy() {
  if (($(date +%s) >= deadline)); then
    echo "$1" >>"$not_reached"
  else
    clang-tidy-19 --quiet -p "$folder" "$1" 2> >(grep -vE '^[0-9]+ warnings? generated|^Suppressed|^Use -header' >&2)
  fi
}
export -f tidy

mapfile -t files < <({
  git log --name-only --format= -n 20 -- 'src/*.cc'
  git ls-files -- 'src/*.cc'
} | awk '!seen[$0]++' | while read -r file; do
  if grep -qF "$repository/$file\"" "$folder/compile_commands.json"; then echo "$file"; fi
done)
result=0
if ((${#files[@]})); then
  printf '%s\0' "${files[@]}" | xargs -0 -P2 -I{} bash -c 'tidy {}' || result=1
fi
missed=$(wc -l <"$not_reached")
echo "$((${#files[@]} - missed)) of ${#files[@]} files"
((missed == 0)) || { echo "not reached in time:" && cat "$not_reached"; }
exit "$result"
