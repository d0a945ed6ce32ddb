#!/usr/bin/env bash
# Sets up, builds and runs all tests. Options:
#   --preset NAME   another preset than release (dev, asan-ubsan, tsan, emulation-tsan)
#   --cuda          with the CUDA backend, whatever it takes; else it is built where a toolkit is found
#   --target NAME   builds that alone
#   --long          the longer sweeps too
# Everything else goes to ctest: scripts/test.sh -R replicas
set -euo pipefail
cd "$(dirname "$0")/.."

preset=release
setup=()
configure=(-DGRADCLIP_BUILD_TESTS=ON)  # demo.sh leaves them out
build=()
rest=()
while [ $# -gt 0 ]; do
  case "$1" in
    --preset) preset=$2; shift 2 ;;
    --cuda) setup+=(--cuda); configure+=(-DGRADCLIP_CUDA=ON); shift ;;
    --target) build+=(--target "$2"); shift 2 ;;
    --long) export GRADCLIP_LONG=1; shift ;;
    *) rest+=("$1"); shift ;;
  esac
done

scripts/setup.sh "${setup[@]}"
scripts/setup.sh --python &  # PyTorch's download and unpacking take minutes: beside the build
python=$!
trap 'kill "$python" 2>/dev/null || true' EXIT
cmake --preset "$preset" "${configure[@]}" >/dev/null
cmake --build --preset "$preset" -j "$(($(nproc) + 1))" "${build[@]}"
wait "$python"
# Open MPI keeps memory until the process ends.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0}
# Many tests wait for processes to start and to end more than they compute.
ctest --preset "$preset" -j "$((5 * $(nproc) / 2))" "${rest[@]}"
