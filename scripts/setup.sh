#!/usr/bin/env bash
# Installs what gradclip needs on Debian 12: compilers and libraries, and with --python the virtual environment of the
# conformance tests (PyTorch; PyPI's x86-64 build is about 3 GB and runs on the CPU) and a headless browser. Does
# nothing that is already done.
#
#   scripts/setup.sh            packages to build and run gradclip
#   scripts/setup.sh --python   also build/venv with torch, h5py, numpy, xxhash, safetensors, pytest; and Chromium
#   scripts/setup.sh --fuzz     also clang 16 with libFuzzer (preset fuzz)
#   scripts/setup.sh --lint     also clang-tidy 16 and cppcheck (scripts/lint.sh)
#   scripts/setup.sh --cuda     also a CUDA toolkit: the installed one, or NVIDIA's wheels in build/cuda (500 MB)
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  g++ cmake ninja-build git
  openmpi-bin libopenmpi-dev libhdf5-dev libcli11-dev nlohmann-json3-dev libfmt-dev libxxhash-dev libre2-dev zlib1g-dev
  libgtest-dev libgmock-dev libbenchmark-dev hdf5-tools
)
want_python=false
want_cuda=false
for argument in "$@"; do
  case "$argument" in
    --python) want_python=true ;;
    --cuda) want_cuda=true ;;
    --fuzz) packages+=(clang-16 libclang-rt-16-dev) ;;
    --lint) packages+=(clang-tidy-16 cppcheck) ;;
    *) echo "usage: scripts/setup.sh [--python] [--cuda] [--fuzz] [--lint]" >&2; exit 2 ;;
  esac
done
if $want_python || $want_cuda; then packages+=(python3 python3-venv); fi
# The tests of the package, the manual and completion; the browser in which they open reports; memcheck.
if $want_python; then packages+=(dpkg-dev file iproute2 man-db strace zsh fish chromium valgrind); fi

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

# The first nvcc of CUDA 12.8 or newer, where scripts/cmake/GradclipCuda.cmake looks for it too; empty if there is none.
find_nvcc() {
  local nvcc version
  for nvcc in "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc build/cuda/bin/nvcc; do
    [ -x "$nvcc" ] || continue
    version=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9][0-9.]*\),.*/\1/p')
    [ -n "$version" ] || continue
    if [ "$(printf '%s\n' 12.8 "$version" | sort -V | head -n 1)" = 12.8 ]; then
      echo "$nvcc"
      return
    fi
    echo "setup: $nvcc is of CUDA $version, and 12.8 is needed" >&2
  done
}

if $want_cuda; then
  requirements=scripts/cuda-requirements.txt
  nvcc=$(find_nvcc)
  # Wheels of other versions than the file says are replaced; an installed toolkit is left alone.
  if [ -z "$nvcc" ] || { [ "$nvcc" = build/cuda/bin/nvcc ] && ! cmp -s "$requirements" build/cuda-venv/requirements.txt; }; then
    echo "setup: no CUDA toolkit is installed; fetching NVIDIA's wheels into build/cuda (about 300 MB to download)"
    mkdir -p build
    rm -rf build/cuda build/cuda-venv
    /usr/bin/python3 -m venv build/cuda-venv
    if ! build/cuda-venv/bin/pip install --quiet --disable-pip-version-check -r "$requirements"; then
      echo "setup: *** NO CUDA: NVIDIA's wheels could not be installed, and the build will have no CUDA backend ***" >&2
      exit 1
    fi
    # The wheels leave out the links that a linker and CMake look for, and have NCCL in a folder of its own. nvcc finds
    # its other parts from its real path, so everything is brought into the folder where that is.
    packages_folder=$(build/cuda-venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    toolkit=$packages_folder/nvidia/cu13
    ln -sfn lib "$toolkit/lib64"
    ln -sfn libcudart.so.13 "$toolkit/lib/libcudart.so"
    ln -sfn ../../nccl/lib/libnccl.so.2 "$toolkit/lib/libnccl.so.2"
    ln -sfn libnccl.so.2 "$toolkit/lib/libnccl.so"
    for header in "$packages_folder"/nvidia/nccl/include/*; do
      ln -sfn "../../nccl/include/${header##*/}" "$toolkit/include/${header##*/}"
    done
    mkdir build/cuda
    for part in bin include lib lib64 nvvm; do ln -sfn "$toolkit/$part" "build/cuda/$part"; done
    cp "$requirements" build/cuda-venv/requirements.txt
    nvcc=$(find_nvcc)
  fi
  if [ -z "$nvcc" ]; then
    echo "setup: *** NO CUDA: there is no working nvcc, and the build will have no CUDA backend ***" >&2
    exit 1
  fi
  echo "setup: CUDA from $(realpath "$nvcc"), $("$nvcc" --version | sed -n 's/.*\(release [0-9.]*\),.*/\1/p')"
elif [ -z "$(find_nvcc)" ]; then
  echo "setup: *** no CUDA toolkit: the build will have no CUDA backend (scripts/setup.sh --cuda fetches one) ***"
fi
