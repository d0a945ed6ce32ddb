#!/usr/bin/env bash
# What only a machine with a GPU can tell: that the kernels give the CPU's bits on a real device, and how fast they are.
# Builds in build/gpu for this machine's GPU, runs every part under a limit of time, ends within six minutes and prints
# one table. With OUT set, the table is also $OUT/gpu_check.txt and what the parts printed $OUT/gpu_check.log.
#
#   scripts/gpu_check.sh                       everything
#   scripts/gpu_check.sh --all-architectures   compiles for all architectures of a release, not for this GPU alone
#   scripts/gpu_check.sh --no-build            takes build/gpu as it is
#
# Exit: 0 all that has to agree agreed; 1 something did not, or could not be run; 2 usage; 5 there is no GPU.
# shellcheck disable=SC2317  # what limited() runs is reached through bash -c
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

readonly whole=350  # seconds, build included
readonly build=build/gpu
readonly logs=$build/check
build_first=true
architectures=
for argument in "$@"; do
  case "$argument" in
    --all-architectures) architectures="80-real;90-real;100-real;120" ;;
    --no-build) build_first=false ;;
    *) echo "usage: scripts/gpu_check.sh [--all-architectures] [--no-build]" >&2; exit 2 ;;
  esac
done

# ---------------------------------------------------------------------------------------------------------------------
# The device
# ---------------------------------------------------------------------------------------------------------------------

gpus=0
if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
if [ "$gpus" -eq 0 ]; then
  echo "gpu_check: this machine has no NVIDIA GPU that nvidia-smi knows of; nothing was checked" >&2
  exit 5
fi
gpu_name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
if [ -z "$architectures" ]; then
  # "9.0" of each GPU as "90-real"; a list for cmake.
  architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d ' .' | sort -u | sed 's/$/-real/' | paste -sd ';')
fi

# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------

rows=()
failed=0
row() { rows+=("$(printf '%-42s %14s %14s %7s  %s' "$1" "$2" "$3" "$4" "$5")"); }
# A part that has to agree and did not, or did not run.
failure() {
  row "$1" "$2" "" "" "FAILED: $3"
  failed=1
}

# limited SECONDS LOG COMMAND...: at most that long, and not past the end of the whole. The output goes to the log.
limited() {
  local seconds=$1 log=$logs/$2.log
  shift 2
  local left=$((whole - SECONDS))
  if [ "$left" -lt 5 ]; then
    echo "no time was left" >"$log"
    return 124
  fi
  [ "$left" -gt "$seconds" ] || seconds=$left
  printf '\n=== %s (at most %s s, %(%H:%M:%S)T)\n' "$*" "$seconds" -1 >>"$log"
  timeout --kill-after=5 "$seconds" "$@" >>"$log" 2>&1
}
why() { if [ "$1" -eq 124 ] || [ "$1" -eq 137 ]; then echo "took too long, see $logs/$2.log"; else echo "exit $1, see $logs/$2.log"; fi; }

# Seconds that a command took, under limited().
timed() {
  local start=${EPOCHREALTIME/,/.}
  limited "$@" || return
  awk -v from="$start" -v to="${EPOCHREALTIME/,/.}" 'BEGIN { printf "%.2f\n", to - from }'
}
median() { sort -g | awk '{ value[NR] = $1 } END { print NR ? value[int((NR + 1) / 2)] : "" }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { if (b > 0) printf "%.2f\n", a / b; else print "" }'; }

python=
for candidate in build/venv/bin/python python3; do
  if "$candidate" -c 'import h5py, numpy, pytest, xxhash' 2>/dev/null; then
    python=$(command -v "$candidate")
    break
  fi
done
[ -z "$python" ] || python=$(realpath -s "$python")

compile() {
  timeout 90 scripts/setup.sh --cuda || echo "setup did not succeed; going on with what is installed"
  cmake --preset release -B "$build" -DGRADCLIP_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$architectures" \
    -DGRADCLIP_BUILD_TESTS=ON -DGRADCLIP_BUILD_BENCHMARKS=ON -DGRADCLIP_CHECK_HEADERS=OFF -DGRADCLIP_EMULATION=OFF \
    ${python:+-DGRADCLIP_TEST_PYTHON="$python"} &&
    cmake --build "$build" -j "$(nproc)" --target gradclip gradclip-bench backend_agreement_test
}

# The tests of the CUDA backend by the real runtime. None may be left out because there was no device.
agreement() {
  local log=$logs/agreement.log passed code
  limited 90 agreement "$build/tests/backend/backend_agreement_test" --gtest_filter='*cuda*' --gtest_brief=0
  code=$?
  passed=$(sed -n 's/.*\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | tail -n 1)
  if [ "$code" -ne 0 ]; then
    failure "backend agreement, cuda" "${passed:-0} passed" "$(why "$code" agreement)"
  elif [ "${passed:-0}" -eq 0 ] || grep -q 'this machine cannot run' "$log"; then
    failure "backend agreement, cuda" "${passed:-0} passed" "the device was not tested"
  else
    row "backend agreement, cuda" "$passed passed" "reference" "" "same bits"
  fi
}

# The suites of tests/cli that compare numbers and files. Their processes share the GPUs.
command_line() {
  local log=$logs/cli.log passed code
  if [ -z "$python" ]; then
    failure "command line, cuda" "" "no Python with h5py, numpy, pytest and xxhash (scripts/setup.sh --python)"
    return
  fi
  GRADCLIP_TEST_DEVICE=cuda limited 150 cli ctest --test-dir "$build" -R '^cli\.(install|golden|values|layouts)$' \
    -j 4 --timeout 145 --output-on-failure --no-tests=error
  code=$?
  passed=$(sed -n 's/.*tests passed, .* out of \([0-9]*\)/\1/p' "$log" | tail -n 1)
  if [ "$code" -ne 0 ]; then
    failure "command line, cuda" "" "$(why "$code" cli)"
  else
    row "command line, cuda" "$((passed - 1)) suites" "oracle" "" "same bits"
  fi
}

# gradclip clip of a dump on a device, and that it ran there. clip_on DEVICE OUT [PROCESSES]
clip_on() {
  local launch=()
  if [ "${3:-1}" -gt 1 ]; then
    launch=(mpirun -q --oversubscribe -np "$3")
    [ "$(id -u)" -ne 0 ] || launch+=(--allow-run-as-root)
  fi
  rm -rf "$2"
  "${launch[@]}" "$gradclip" clip "$dump" -o "$2" --device "$1" --quiet --report "$logs/report.json" &&
    grep -q "\"device\": *\"$1" "$logs/report.json"
}
export -f clip_on
gradclip=$PWD/$build/apps/gradclip/gradclip
dump=
export gradclip dump logs

several_gpus() {
  local golden count=$((gpus < 4 ? gpus : 4)) code same=0
  if [ "$gpus" -lt 2 ]; then
    row "mpirun with NCCL" "" "" "" "not run: one GPU"
    return
  fi
  for golden in fsdp_tp hsdp moe_ep pp_fsdp tp2_sequence; do
    dump=testdata/golden/$golden/dump
    limited 30 nccl bash -c "clip_on cuda '$work/many' $count && clip_on cpu '$work/one' && diff -r '$work/many' '$work/one'"
    code=$?
    if [ "$code" -ne 0 ]; then
      failure "mpirun with NCCL, $count GPUs" "$golden" "$(why "$code" nccl)"
      return
    fi
    same=$((same + 1))
  done
  row "mpirun with NCCL, $count GPUs" "$same dumps" "cpu" "" "same bytes"
}

benchmarks() {
  local log=$logs/benchmarks.log code name speed relative verdict
  limited 60 benchmarks "$build/apps/gradclip-bench/gradclip-bench" --array_mib=1024 --benchmark_filter=device \
    --benchmark_repetitions=5 --benchmark_color=false
  code=$?
  if [ "$code" -ne 0 ] || ! grep -q '^device copy ' "$log"; then
    row "device benchmarks" "" "" "" "not measured: $(why "$code" benchmarks)"
    return
  fi
  local copy
  copy=$(sed -n 's/^device copy  *\([0-9.]*\) .*/\1/p' "$log")
  # The table at the end: a name, two or more blanks, GB/s, and in brackets the share of a copy's speed.
  while IFS='|' read -r name speed relative; do
    verdict=
    if [ -n "$relative" ]; then
      verdict=$(awk -v share="$relative" 'BEGIN { print (share >= 0.85 ? "at least" : "below") " 0.85 of a copy" }')
    fi
    row "$name" "$speed GB/s" "${relative:+$copy GB/s}" "$relative" "$verdict"
  done < <(sed -nE 's/^(device [a-z0-9_ ]*[a-z0-9])  +([0-9.]+)( \(([0-9.]+)\))? *$/\1|\2|\4/p' "$log")
}

# A synthetic dump through the whole program, against a copy of it and against the CPU; in memory if there is room.
end_to_end() {
  local gigabytes=2 round code cuda=() cpu=() copy=()
  if [ -z "$python" ]; then
    row "clip of a synthetic dump" "" "" "" "not measured: no Python to make one"
    return
  fi
  dump=$work/dump
  limited 60 end_to_end "$python" scripts/bench_peers.py dump "$dump" --gigabytes "$gigabytes"
  code=$?
  if [ "$code" -ne 0 ]; then
    row "clip of a synthetic dump" "" "" "" "not measured: $(why "$code" end_to_end)"
    return
  fi
  limited 20 end_to_end bash -c "cat '$dump'/* >/dev/null"
  for round in 1 2 3; do
    rm -rf "$work/copy"
    copy+=("$(timed 20 end_to_end cp -r "$dump" "$work/copy")")
    rm -rf "$work/copy"
    cuda+=("$(timed 30 end_to_end bash -c "clip_on cuda '$work/cuda'")")
    code=$?
    if [ "$code" -ne 0 ]; then
      failure "clip --device cuda, $gigabytes GB" "round $round" "$(why "$code" end_to_end)"
      return
    fi
    cpu+=("$(timed 30 end_to_end bash -c "clip_on cpu '$work/cpu'")")
    if [ "$round" -eq 1 ]; then
      if limited 20 end_to_end diff -rq "$work/cuda" "$work/cpu"; then
        row "clip --device cuda, $gigabytes GB" "$gigabytes GB" "--device cpu" "" "same bytes"
      else
        failure "clip --device cuda, $gigabytes GB" "" "other bytes than --device cpu, see $logs/end_to_end.log"
        return
      fi
    fi
  done
  local of_cuda of_cpu of_copy
  of_cuda=$(printf '%s\n' "${cuda[@]}" | median)
  of_cpu=$(printf '%s\n' "${cpu[@]}" | median)
  of_copy=$(printf '%s\n' "${copy[@]}" | median)
  row "clip --device cuda / cp -r, $gigabytes GB" "$of_cuda s" "$of_copy s" "$(ratio "$of_cuda" "$of_copy")" ""
  row "clip --device cuda / --device cpu" "$of_cuda s" "$of_cpu s" "$(ratio "$of_cuda" "$of_cpu")" ""
}

sanitizer() {
  local tool code candidate compute_sanitizer=
  for candidate in compute-sanitizer /usr/local/cuda/bin/compute-sanitizer build/cuda/bin/compute-sanitizer; do
    if command -v "$candidate" >/dev/null; then
      compute_sanitizer=$candidate
      break
    fi
  done
  if [ -z "$compute_sanitizer" ]; then
    row "compute-sanitizer" "" "" "" "not run: not installed"
    return
  fi
  for tool in memcheck racecheck; do
    limited 40 "$tool" "$compute_sanitizer" --tool "$tool" --error-exitcode 9 \
      "$build/tests/backend/backend_agreement_test" --gtest_filter='*EachFunctionOnce/cuda*'
    code=$?
    if [ "$code" -eq 0 ] && grep -q '\[  PASSED  \] [1-9]' "$logs/$tool.log"; then
      row "compute-sanitizer $tool" "" "" "" "nothing found"
    elif [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
      row "compute-sanitizer $tool" "" "" "" "not finished: $(why "$code" "$tool")"
    else
      failure "compute-sanitizer $tool" "" "$(why "$code" "$tool")"
    fi
  done
}

# ---------------------------------------------------------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------------------------------------------------------

table() {
  printf '%s\n' "gradclip on $gpus × $gpu_name, built for $architectures, $((SECONDS)) s"
  printf '%-42s %14s %14s %7s  %s\n' name value peer ratio verdict
  printf '%s\n' "${rows[@]}"
}

# Whatever happens, what is known is shown.
finish() {
  rm -rf "$work"
  table
  if [ -n "${OUT:-}" ] && [ -d "$OUT" ]; then
    table >"$OUT/gpu_check.txt"
    for log in "$logs"/*.log; do
      printf '\n##### %s\n' "$log"
      tail -c 400000 "$log"
    done >"$OUT/gpu_check.log" 2>/dev/null
  fi
  exit "$failed"
}

rm -rf "$logs"
mkdir -p "$logs"
work=
for folder in /dev/shm "${TMPDIR:-/tmp}"; do
  # Three copies of the dump, in kilobytes, and some air.
  if [ "$(df --output=avail "$folder" 2>/dev/null | tail -n 1)" -gt 9000000 ] 2>/dev/null; then
    work=$(mktemp -d "$folder/gradclip_gpu_check.XXXXXX") && break
  fi
done
[ -n "$work" ] || work=$(mktemp -d)
trap 'failed=1; finish' INT TERM

if $build_first; then
  export architectures build python
  export -f compile
  started=$SECONDS
  limited 240 build bash -c compile
  code=$?
  if [ "$code" -ne 0 ]; then
    failure "build" "" "$(why "$code" build)"
    tail -n 30 "$logs/build.log" >&2
    finish
  fi
  row "build" "$((SECONDS - started)) s" "" "" "$architectures"
fi
agreement
several_gpus
end_to_end
benchmarks
command_line
sanitizer
finish
