#!/usr/bin/env bash
# Sets up, builds and runs all tests. Options:
#   --preset NAME   another preset than release (dev, asan-ubsan)
#   --long          the longer sweeps too
# Everything else goes to ctest: scripts/test.sh -R replicas
set -euo pipefail
cd "$(dirname "$0")/.."

preset=release
rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --preset) preset=$2; shift 2 ;;
    --long) export GRADCLIP_LONG=1; shift ;;
    *) rest+=("$1"); shift ;;
  esac
done

scripts/setup.sh --python
cmake --preset "$preset" -DGRADCLIP_BUILD_TESTS=ON >/dev/null  # demo.sh leaves them out
cmake --build --preset "$preset" -j "$(nproc)"
ctest --preset "$preset" -j "$(nproc)" "${rest[@]}"
