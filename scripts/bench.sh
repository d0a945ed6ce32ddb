#!/usr/bin/env bash
# Measures gradclip against cp, cat, h5diff, h5dump, h5py + torch and h5py + numpy on the same dumps, many small parameters
# against few large ones, two processes against two threads, and the kernels against a plain read-sum; all as ratios from
# one run, interleaved, with their spread. --quick takes seconds and small dumps; --parts diff,merge some of it; --json
# FILE keeps every number; other options: scripts/bench_peers.py run --help. Figures: docs/performance.md.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --python
cmake --preset release >/dev/null
cmake --build --preset release -j "$(nproc)" --target gradclip gradclip-bench
exec build/venv/bin/python scripts/bench_peers.py run \
  --gradclip build/release/apps/gradclip/gradclip --kernels build/release/apps/gradclip-bench/gradclip-bench "$@"
