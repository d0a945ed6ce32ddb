#!/usr/bin/env bash
# Formats the tracked C++ files with clang-format and .clang-format.
#
#   scripts/format.sh            in place
#   scripts/format.sh --check    changes nothing; exits with 1 and shows the differences if there are any
#   scripts/format.sh FILE...    these files only (also after --check)
#
# CLANG_FORMAT names another binary than clang-format. Versions differ in details; Debian 12's (14) is the one that counts.
set -euo pipefail
cd "$(dirname "$0")/.."

check=false
files=()
for argument in "$@"; do
  case "$argument" in
    --check) check=true ;;
    -*) echo "usage: scripts/format.sh [--check] [FILE...]" >&2; exit 2 ;;
    *) files+=("$argument") ;;
  esac
done
if [ "${#files[@]}" -eq 0 ]; then
  mapfile -t files < <(git ls-files -- '*.cpp' '*.hpp' '*.cu' '*.cuh' '*.inl')
fi

clang_format=${CLANG_FORMAT:-clang-format}
if ! command -v "$clang_format" >/dev/null; then
  echo "format: $clang_format is not installed; on Debian: apt-get install clang-format" >&2
  exit 2
fi

if ! $check; then
  "$clang_format" -i --style=file "${files[@]}"
  exit
fi
status=0
for file in "${files[@]}"; do
  diff -u --label "$file" --label "$file, formatted" "$file" <("$clang_format" --style=file "$file") || status=1
done
[ "$status" -eq 0 ] || echo "format: run scripts/format.sh" >&2
exit "$status"
