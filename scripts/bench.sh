#!/usr/bin/env bash
# Measures gradclip against cp and against h5py + torch on the same dump, and its kernels against a plain read-sum; all as
# ratios from one run, interleaved, medians with their spread. Options: see scripts/bench_peers.py run --help.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh --python
cmake --preset release >/dev/null
cmake --build --preset release -j "$(nproc)" --target gradclip gradclip-bench
exec build/venv/bin/python scripts/bench_peers.py run \
  --gradclip build/release/apps/gradclip/gradclip --kernels build/release/apps/gradclip-bench/gradclip-bench "$@"
