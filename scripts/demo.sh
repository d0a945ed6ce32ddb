#!/usr/bin/env bash
# Sets up, builds, clips a recorded training step with 2 processes and shows what was found.
# The step: a tiny transformer trained with FSDP2 over tensor parallelism, 2 × 2 ranks (testdata/README.md).
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
cmake --preset release -DGRADCLIP_BUILD_TESTS=OFF >/dev/null
cmake --build --preset release -j "$(nproc)" --target gradclip
gradclip=build/release/apps/gradclip/gradclip
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

launch=(mpirun -q --oversubscribe -np 2)
[ "$(id -u)" -ne 0 ] || launch+=(--allow-run-as-root)

show() { printf '\n$ %s\n' "$*"; }
show "gradclip inspect testdata/golden/fsdp_tp/dump"
"$gradclip" inspect testdata/golden/fsdp_tp/dump
show "mpirun -np 2 gradclip clip testdata/golden/fsdp_tp/dump -o clipped --report report.json"
"${launch[@]}" "$gradclip" clip testdata/golden/fsdp_tp/dump -o "$out/clipped" --report "$out/report.json"
show "ls clipped"
ls "$out/clipped"
