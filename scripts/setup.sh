#!/usr/bin/env bash
# Installs what gradclip needs on Debian 12: compilers and libraries, and with --python the virtual environment of the
# conformance tests (PyTorch; PyPI's x86-64 build is about 3 GB and runs on the CPU). Does nothing that is already done.
#
#   scripts/setup.sh            packages to build and run gradclip
#   scripts/setup.sh --python   also build/venv with torch, h5py, numpy, xxhash, pytest
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  g++ cmake ninja-build git
  openmpi-bin libopenmpi-dev libhdf5-dev libcli11-dev nlohmann-json3-dev libfmt-dev libxxhash-dev libre2-dev zlib1g-dev
  libgtest-dev libgmock-dev libbenchmark-dev hdf5-tools
)
want_python=false
for argument in "$@"; do
  case "$argument" in
    --python) want_python=true ;;
    *) echo "usage: scripts/setup.sh [--python]" >&2; exit 2 ;;
  esac
done
$want_python && packages+=(python3 python3-venv)

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
  echo "setup: installing ${missing[*]}"
  as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if $want_python; then
  requirements=tests/conformance/requirements.txt
  if ! cmp -s "$requirements" build/venv/requirements.txt; then
    echo "setup: making build/venv (PyTorch is a large download)"
    mkdir -p build
    # Debian's own python3, not whatever stands first on PATH, so that every machine gets the same wheels.
    /usr/bin/python3 -m venv --clear build/venv
    build/venv/bin/pip install --quiet --disable-pip-version-check -r "$requirements"
    cp "$requirements" build/venv/requirements.txt
  fi
fi
