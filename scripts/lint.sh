#!/usr/bin/env bash
# Static analysis: no finding is the rule. Tools: scripts/setup.sh --lint.
#
#   scripts/lint.sh             cppcheck (a few seconds), then clang-tidy (about 15 s of processor time a file)
#   scripts/lint.sh --quick     cppcheck alone
#   scripts/lint.sh FILE...     clang-tidy over these sources
#
# cppcheck's false alarms are in .cppcheck-suppressions, clang-tidy's profile is .clang-tidy; both give reasons. clang-tidy
# takes its compile commands from build/release.
set -euo pipefail
cd "$(dirname "$0")/.."

quick=false
files=()
for argument in "$@"; do
  case "$argument" in
    --quick) quick=true ;;
    -*) echo "usage: scripts/lint.sh [--quick | FILE...]" >&2; exit 2 ;;
    *) files+=("$argument") ;;
  esac
done

status=0
if [ "${#files[@]}" -eq 0 ]; then
  cppcheck --enable=warning,performance,portability --std=c++20 --language=c++ --quiet -j "$(nproc)" --error-exitcode=1 \
    --suppressions-list=.cppcheck-suppressions --inline-suppr --suppress=unknownMacro \
    --template='{file}:{line}: {id}: {message}' src apps || status=1
  $quick && exit "$status"
  mapfile -t files < <(git ls-files -- 'src/*.cpp' 'apps/*.cpp')
fi

[ -f build/release/compile_commands.json ] || cmake --preset release >/dev/null
# What this build does not compile (no CUDA toolkit, no NCCL) has no command.
known=()
for file in "${files[@]}"; do
  if grep -q "\"file\": \"$PWD/${file#"$PWD/"}\"" build/release/compile_commands.json; then known+=("$file"); fi
done
printf '%s\0' "${known[@]}" | xargs -0 -P "$(nproc)" -n 1 clang-tidy-16 -p build/release --quiet --warnings-as-errors='*' \
  2>/dev/null || status=1
exit "$status"
