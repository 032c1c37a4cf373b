# shellcheck shell=bash
# Completion for bash: commands, flags and the values of flags, as the program's help has them.
_replayssm() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
  local program=${COMP_WORDS[0]} command=() word help values
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case $word in
      generate | serve | logits | bench | decode | op | accuracy | spec) command+=("$word") ;;
      -*) break ;;
    esac
  done
  help=$("$program" "${command[@]}" --help 2>/dev/null) || return
  if [[ $previous == --* ]]; then
    # A flag's line has its values in braces: "--device NAME:{auto,cpu,cuda}".
    values=$(sed -n "s/^ *$previous [^{]*{\([^}]*\)}.*/\1/p" <<<"$help" | tr , ' ')
    if [[ -n $values ]]; then
      mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
      return
    fi
  fi
  if [[ $current == -* ]]; then
    values=$(grep -oE -- '--[a-z][a-z0-9-]*' <<<"$help" | sort -u)
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
    return
  fi
  values=$(sed -n '/^Subcommands:/,$ s/^  \([a-z]*\) .*/\1/p' <<<"$help")
  mapfile -t COMPREPLY < <(compgen -W "$values" -f -- "$current")
}
complete -F _replayssm replayssm
